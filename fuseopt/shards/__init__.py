"""Optimizers of tensors that are spread over processes, stepped on this one's parts."""
