"""Graph -> Schedule, in four passes: dependencies, stages, grouping, fusion."""

from .pipeline import schedule

__all__ = ["schedule"]
