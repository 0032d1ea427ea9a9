"""Masters of float32 for parameters of 16 bits, beside them or in the CPU's memory."""

from __future__ import annotations

from .optimizer import MasterOptimizer

__all__ = ["MasterOptimizer"]
