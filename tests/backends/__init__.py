"""Tests of what reads memory: real where the machine has it, replayed where it has not."""
