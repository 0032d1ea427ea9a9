"""Compile the step of one optimizer in isolation: `fuseopt.compile`."""
