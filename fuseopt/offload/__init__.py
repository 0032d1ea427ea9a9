"""Masters of float32 for parameters of 16 bits, beside them or in the CPU's memory."""

from __future__ import annotations

from .cpu import CPUOffloadOptimizer
from .optimizer import MasterOptimizer

__all__ = ["CPUOffloadOptimizer", "MasterOptimizer"]
