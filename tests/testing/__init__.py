"""Simulated GPUs, scripts, recordings and their player."""
