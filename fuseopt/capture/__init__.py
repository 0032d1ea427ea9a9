"""FX graph from Dynamo -> Graph."""

from .trace import Captured, capture

__all__ = ["Captured", "capture"]
