"""Files of other packages, without what the packages load besides."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def path_of(package: str, file: str) -> Path:
    """A file of a package; skips where it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(found.origin).parent / file


def module_of(package: str, file: str) -> ModuleType:
    """A file of a package as a module of its own; skips where it is not installed."""
    path = path_of(package, file)
    name = f"{package}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where Dynamo looks for what functions name
    spec.loader.exec_module(module)
    return module
