from __future__ import annotations
import sys
from typing import Any
class Facts:
    def hold(self): return True
class Watch:
    def __init__(self, held, recording): self.facts=Facts()
    def __enter__(self): return self
    def __exit__(self,*_): pass
    def restore(self): pass
