"""`FILE.py:OBJECT` -> the optimizer that is meant."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from torch.optim import Optimizer


class NoTarget(Exception):
    """What was asked for is not there, or is no optimizer."""


def optimizer_of(target: str) -> Optimizer:
    """The optimizer of a name in a file, or the one that the function makes which has
    that name and takes no arguments. Runs the file. Raises NoTarget.
    """
    name, colon, attribute = target.rpartition(":")
    if not colon or not name or not attribute:
        raise NoTarget(f"{target!r} is not of the form FILE.py:OBJECT")
    path = Path(name)
    if not path.is_file():
        raise NoTarget(f"there is no file {name}")
    value: Any = _loaded(path)
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise NoTarget(f"{name} has no {attribute}")
        value = getattr(value, part)
    if callable(value) and not isinstance(value, Optimizer):
        value = value()
    if not isinstance(value, Optimizer):
        kind = type(value).__name__
        raise NoTarget(f"{attribute} of {name} is no optimizer, but a {kind}")
    return value


def _loaded(path: Path) -> Any:
    """The module of a file, which finds what lies beside it, as a script would."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise NoTarget(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
