"""Kernel -> Triton for accelerators."""
