"""Classes and functions for code that makes an optimizer itself: a trainer, a config.

compiled(AdamW)                        takes the place of the class
make(params, cls="torch.optim.AdamW")  for configs that name a function by its path
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Mapping
from typing import Any, TypeVar

from torch.optim import Optimizer

from ..errors import NotAnOptimizer
from ..isolate.compile import compile

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def compiled(cls: type[AnyOptimizer], **options: Any) -> type[AnyOptimizer]:
    """Return a class to pass in place of `cls`.

    A call of it makes an object of `cls` itself, with a compiled step. So names,
    checkpoints and pickles are those of a plain optimizer. `options`: those of
    `fuseopt.compile`, checked when an optimizer is made. Raises NotAnOptimizer unless
    `cls` is a class of optimizers.
    """
    candidate: Any = cls
    if not (isinstance(candidate, type) and issubclass(candidate, Optimizer)):
        raise NotAnOptimizer(
            f"compiled takes a class of torch.optim.Optimizer, not {cls!r}; for an "
            "optimizer: fuseopt.compile(optimizer)"
        )

    def new(_: Any, *args: Any, **kwargs: Any) -> Any:
        return compile(cls(*args, **kwargs), **options)

    own = {"__new__": new, "__module__": cls.__module__, "__doc__": cls.__doc__}
    made: type[AnyOptimizer] = types.new_class(
        cls.__name__, (cls,), exec_body=lambda names: names.update(own)
    )
    return made


def make(
    params: Any, cls: str, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Optimizer:
    """Make an optimizer with a compiled step; `cls`: the path of its class.

    For configs that name a function by its path and give it arguments. `kwargs`: those
    of the class. `options`: those of `fuseopt.compile`. Raises ImportError or
    AttributeError for a path to nothing, and NotAnOptimizer for a path to something
    else.
    """
    module, _, name = cls.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    made: Optimizer = compiled(found, **(options or {}))(params, **kwargs)
    return made
