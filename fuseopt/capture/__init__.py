"""Translate an FX graph from Dynamo into a Graph."""

from .trace import Captured, capture

__all__ = ["Captured", "capture"]
