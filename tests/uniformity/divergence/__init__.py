"""Optimizers that treat lanes apart, or seem to: what `test_divergence.py` runs.

Without asserts, which pytest rewrites: what an optimizer runs must be its source.
"""
