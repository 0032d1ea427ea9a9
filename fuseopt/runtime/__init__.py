"""Build kernels, keep their tables, run steps."""
