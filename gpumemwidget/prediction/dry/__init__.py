"""Carry out a step on tensors without memory, and note its operators."""
