"""What a compiled call depends on, and how the next call is compared with it."""
