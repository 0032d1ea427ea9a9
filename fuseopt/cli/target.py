"""Load the object that `FILE.py:OBJECT` or `MODULE:OBJECT` names, or its optimizer."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from torch.optim import Optimizer


class NoTarget(Exception):
    """The file, module or object does not exist, or is no optimizer."""


def optimizer_of(target: str) -> Optimizer:
    """Return the optimizer that a target names.

    If the name is a function without arguments, call it for the optimizer. Runs the
    file. Raises NoTarget.
    """
    value = found(target)
    if callable(value) and not isinstance(value, Optimizer):
        value = value()
    if not isinstance(value, Optimizer):
        name, _, attribute = target.rpartition(":")
        kind = type(value).__name__
        raise NoTarget(f"{attribute} of {name} is no optimizer, but a {kind}")
    return value


def found(target: str) -> Any:
    """Return the object that a target names. Runs the file. Raises NoTarget."""
    name, colon, attribute = target.rpartition(":")
    if not colon or not name or not attribute:
        raise NoTarget(f"{target!r} is neither FILE.py:OBJECT nor MODULE:OBJECT")
    value: Any
    if name.endswith(".py") or os.sep in name:
        path = Path(name)
        if not path.is_file():
            raise NoTarget(f"there is no file {name}")
        value = _loaded(path)
    else:
        try:
            value = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise NoTarget(f"there is no module {name} ({error})") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise NoTarget(f"{name} has no {attribute}")
        value = getattr(value, part)
    return value


def _loaded(path: Path) -> Any:
    """Load a file as a module that can import the files beside it, as a script can."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise NoTarget(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
