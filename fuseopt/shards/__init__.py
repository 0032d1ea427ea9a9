"""Step optimizers of DTensors on the local parts of this process."""
