"""A step's function, its optimizer -> is every lane treated like those alike to it?

The code that the step may run is gone through without running it (an abstract
interpretation of its syntax), with what is known of each value: see `values`. What may
be read, called and branched on is a whitelist; anything else is a reason not to let a
few lanes lead, with the line where it stands. docs/led-lanes.md says what is on it, and
why that is enough.
"""

from __future__ import annotations

from .analysis import Proof, prove

__all__ = ["Proof", "prove"]
