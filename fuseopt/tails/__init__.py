"""Run the whole tail of a training step, of which the optimizer's step is one part."""
