"""Numbers of a step: those of the host, and those that it reads from tensors."""
