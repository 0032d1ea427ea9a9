"""Build C++ kernels, and fill the tables that they read."""
