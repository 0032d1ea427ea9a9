"""Kernel -> C++ for the CPU."""
