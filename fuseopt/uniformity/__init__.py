"""Prove by abstract interpretation that a step treats equal lanes equally.

The analysis walks the syntax tree of the code that the step may run, without running
it. It computes an abstract value (`values`) for each expression. Reads, calls and
branches must be on a whitelist. For any other, the analysis refuses to let a few lanes
lead, and reports the source line. docs/led-lanes.md lists the whitelist and argues why
it suffices.
"""

from __future__ import annotations

from .analysis import Proof, prove
from .world import Unknown, World

__all__ = ["Proof", "Unknown", "World", "prove"]
