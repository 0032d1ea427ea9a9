"""Graph -> Schedule: kernels first, then one pass after another over the schedule."""

from .passes import Machine
from .pipeline import PASSES, schedule

__all__ = ["PASSES", "Machine", "schedule"]
