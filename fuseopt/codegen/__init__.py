"""Generate source text and launch layout from a Kernel, for each target."""

from .cpp.kernel import CppTarget
from .target import Source, Target

__all__ = ["CppTarget", "Source", "Target"]
