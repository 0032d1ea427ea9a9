"""Files of other packages, without what the packages load besides."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def module_of(package: str, file: str) -> ModuleType:
    """A file of a package as a module of its own; skips where it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    path = Path(found.origin).parent / file
    spec = importlib.util.spec_from_file_location(f"{package}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
