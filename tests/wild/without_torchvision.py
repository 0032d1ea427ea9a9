"""`import timm`, `import ultralytics` where torchvision cannot be loaded.

Both import torchvision for images and for layers that take features out of a model;
the wheels of torchvision are built for one build of torch each, and fail to load beside
another one, such as the one for CPUs alone. No training here needs what it does, so a
name that is looked up in a stand-in is a class without contents.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

#: A version for packages that look for it before they import.
VERSION = "0.28.0"
#: What they import of it.
MODULES = """
    torchvision torchvision.datasets torchvision.models torchvision.models.detection
    torchvision.models.feature_extraction torchvision.ops torchvision.ops.misc
    torchvision.transforms torchvision.transforms.functional
    torchvision.transforms.v2 torchvision.transforms.v2.functional torchvision.io
    torchvision.utils
""".split()


class _Members(type):
    """The type of a class that has a member by every name, such as an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    """A module in which every name is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Members(name, (), {})
        setattr(self, name, made)
        return made


@contextmanager
def stand_ins() -> Iterator[None]:
    """Stand-ins in the place of torchvision while this is open, unless there is one
    that can be imported. Other packages, which ask whether it is there, are not to
    find them later.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        made: dict[str, ModuleType] = {}
        for name in MODULES:
            module = made[name] = _StandIn(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = []
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(made[parent], last, module)
        sys.modules.update(made)
        plain = importlib.metadata.version
        importlib.metadata.version = lambda name: (
            VERSION if name == "torchvision" else plain(name)
        )
        try:
            yield
        finally:
            importlib.metadata.version = plain
            for name in made:
                sys.modules.pop(name, None)
    else:
        yield
