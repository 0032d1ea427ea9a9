"""Masters of float32 for parameters of 16 bits, on the same device or in CPU memory."""

from __future__ import annotations

from .cpu import CPUOffloadOptimizer
from .optimizer import MasterOptimizer

__all__ = ["CPUOffloadOptimizer", "MasterOptimizer"]
