"""Generate Triton for accelerators from a Kernel."""
