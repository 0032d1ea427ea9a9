"""One run on a machine with a GPU: is it right, and how fast is it.

`python -m bench.gpu` does the sections of `SECTIONS` within a budget of seconds, writes
bench/results/gpu-<name>-torch<version>.json as it goes and prints a short table last.
With `--rehearse` the same code runs where no GPU is.
"""
