"""Generate C++ for the CPU from a Kernel."""
