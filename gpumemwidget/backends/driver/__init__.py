"""Whole devices and the processes on them, from NVML and the operating system."""
