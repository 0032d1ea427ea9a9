"""A step's function, its optimizer -> does the step treat equal lanes equally?

An abstract interpretation of the syntax tree: the code that the step may run is walked
without running it, with an abstract value (`values`) for each expression. Reads, calls
and branches must be on a whitelist; anything else is a reason not to let a few lanes
lead, and is reported with its source line. docs/led-lanes.md lists the whitelist and
argues why it suffices.
"""

from __future__ import annotations

from .analysis import Proof, prove
from .world import Unknown, World

__all__ = ["Proof", "Unknown", "World", "prove"]
