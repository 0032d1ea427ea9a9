"""Schedule a Graph: fuse it into kernels, then apply one pass after another."""

from .passes import Machine
from .pipeline import PASSES, schedule

__all__ = ["PASSES", "Machine", "schedule"]
