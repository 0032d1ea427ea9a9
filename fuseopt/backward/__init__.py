"""An optimizer that steps while the backward runs: each bucket of parameters as soon as
its gradients are there, which are then freed.

docs/backward.md says what it does and what it refuses.
"""
