"""Refuse code that Dynamo traces otherwise than Python runs it, where no guard helps.

Where the trace of a step meets such code, the trace ends and the step runs in eager:
its bits are eager's, and the user is told the line.
"""

from __future__ import annotations

import collections
import functools
import os
from typing import Any

from torch.optim import Optimizer

from .dynamo import refuse
from .hooks import Hook, all_kinds, around, asks
from .outcomes import is_among
from .symbol_uses import constant
from .tracing import traces_own, traces_step
from .watched import watched

#: What a class may define without that its values are compared or computed otherwise.
HARMLESS = frozenset(
    [
        *("__new__", "__init__", "__doc__", "__str__", "__repr__", "__format__"),
        *("__reduce__", "__reduce_ex__", "__getnewargs__", "__dir__", "__sizeof__"),
    ]
)
VALUES = (bool, int, float, complex, str, bytes)
CONTAINERS = (dict, list, collections.OrderedDict, collections.defaultdict)


def acts_otherwise(value: Any) -> bool:
    """Is it a number or a text with operators of its own?"""
    kind = type(value)
    if kind in VALUES or not isinstance(value, VALUES):
        return False
    base = next(x for x in kind.__mro__ if x in VALUES)
    operators = vars(base).keys() - HARMLESS
    derived = (x for x in kind.__mro__[: kind.__mro__.index(base)])
    return any(operators & vars(x).keys() for x in derived)


def refuse_values() -> None:
    """No value is used that Dynamo takes for another one, or for a constant."""
    from torch._dynamo.variables.builder import VariableBuilder

    def build(original: Hook, self: Any, value: Any) -> Any:
        why = _untraceable(value) if asks(self.tx) else ""
        if not why and type(value) in CONTAINERS and traces_step():
            why = _is_copied(self.tx, value)
        if why:
            refuse(self.tx, why)
        return original(self, value)

    around(VariableBuilder, "__call__", build)


def _is_copied(tx: Any, value: Any) -> str:
    """Why a container may not be used, of which an optimizer's shadow has a copy."""
    root = tx.output.local_scope.get("self")
    for holder in (root, *getattr(root, "optimizers", ())):
        ref = watched.shadows.get(holder) if isinstance(holder, Optimizer) else None
        shadow = None if ref is None else ref()
        if shadow is not None and shadow.copies(value):
            return f"it finds a {type(value).__name__} of its optimizer's elsewhere"
    return ""


def _untraceable(value: Any) -> str:
    """Why a step that uses a value must run in eager; "" if nothing is known."""
    if acts_otherwise(value):
        return f"it uses a {type(value).__name__}, which has operators of its own"
    if value is os.environ or value is os.getenv:
        return "it reads variables of the environment"
    if type(value) is collections.deque and value.maxlen is not None:
        return "it uses a deque that has a greatest length"
    return ""


def refuse_texts() -> None:
    """No text is made of a number that moves: Dynamo would keep it as it is."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.tensor import SymNodeVariable

    def text(original: Hook, self: Any, *args: Any) -> Any:
        if asks(self) and isinstance(self.stack[-1].realize(), SymNodeVariable):
            number = constant(self, self.stack[-1].realize())
            if number is None:
                refuse(self, "it makes text of a number that changes")
            self.stack[-1] = number
        return original(self, *args)

    around(InstructionTranslatorBase, "_format_value", text)


def refuse_symbols() -> None:
    """A number that moves is not looked for in a list: Dynamo would not find it."""
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    def contains(original: Hook, self: Any, tx: Any, item: Any) -> Any:
        if not asks(tx):
            return original(self, tx, item)
        both = [item.realize(), *(x.realize() for x in self.items)]
        if any(isinstance(x, SymNodeVariable) for x in both):
            answer = is_among(tx, item, self.items)
            if answer is None:
                refuse(tx, "it looks for a number that changes, or among such numbers")
            return answer
        return original(self, tx, item)

    for kind in set(all_kinds(BaseListVariable)):
        if "sq_contains" in vars(kind):
            around(kind, "sq_contains", contains)


def refuse_random() -> None:
    """What numpy draws is not what Dynamo draws in its place."""
    from torch._dynamo.variables.misc import NumpyVariable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        owner = type(getattr(self.value, "__self__", None))
        homes = owner.__module__, getattr(self.value, "__module__", None) or ""
        if asks(tx) and any(home.startswith("numpy.random") for home in homes):
            refuse(tx, "it draws random numbers of numpy's")
        return original(self, tx, args, kwargs)

    around(NumpyVariable, "call_function", call)


def refuse_addresses() -> None:
    """Where a tensor lies, and how often it was written, is no constant."""
    from torch._dynamo.variables.tensor import TensorVariable

    def asked(original: Hook, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if traces_own():
            what = original.__name__.removeprefix("method_").removeprefix("attr_")
            refuse(tx, f"it reads {what!r} of a tensor")
        return original(self, tx, *args, **kwargs)

    for name in ("method_data_ptr", "method_const_data_ptr", "method_attr__version"):
        if hasattr(TensorVariable, name):
            around(TensorVariable, name, asked)


def refuse_caches() -> None:
    """What functools.lru_cache has kept is not looked through; torch's own caches keep
    what is the same for a whole process, such as its list of functions with a device.
    """
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable

    def call(original: Hook, self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        cached = isinstance(self.wrapper_obj, functools._lru_cache_wrapper)
        home = getattr(self.wrapper_obj, "__module__", None) or ""
        if asks(tx) and cached and home.partition(".")[0] != "torch":
            refuse(tx, "it calls a function that has a cache")
        return original(self, tx, args, kwargs)

    around(WrapperUserFunctionVariable, "call_function", call)
