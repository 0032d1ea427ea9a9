"""Build and launch Triton kernels, and fill the tables that they read."""
