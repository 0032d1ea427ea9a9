"""Translate the ATen calls of a step into buffers, values, nodes and externs."""
