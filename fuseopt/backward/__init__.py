"""Step an optimizer while the backward runs.

Each bucket of parameters is stepped as soon as its gradients exist, which are then
freed. docs/backward.md describes what this does and what it refuses.
"""
