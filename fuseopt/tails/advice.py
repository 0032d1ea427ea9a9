"""A function that does the tail of a training step -> the tail that does the same.

Nothing is run: the calls in the function's source are read, and what they are called on
is looked up among its globals and in its closure. What is found is told as the user
would write it, with the user's own expressions.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from .adapters import kind_of
from .clip import clip_grad_norm_

NORM = (torch.nn.utils.clip_grad_norm_, clip_grad_norm_)
VALUE = (torch.nn.utils.clip_grad_value_,)
#: Methods of a GradScaler that are given an optimizer.
OF_SCALER = ("unscale_", "step")


class Advice:
    """What a function does to optimizers, in the words of `fuseopt.tail`."""

    def __init__(self) -> None:
        #: in order, each once
        self.optimizers: dict[str, None] = {}
        self.given: dict[str, str] = {}
        self.averages: list[str] = []

    def __str__(self) -> str:
        """The call, or "" where there is no more than one step."""
        if not self.optimizers or not (self.given or self.averages):
            return ""
        names = [*self.optimizers]
        first = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
        given = [f"{key}={x}" for key, x in self.given.items()]
        if self.averages:
            given.append(f"ema=[{', '.join(self.averages)}]")
        return f"fuseopt.tail({', '.join([first, *given])})"


def tail_of(function: Callable[..., Any]) -> Advice:
    """What of a function's own calls a tail does; nothing where it has no source."""
    found = Advice()
    owner = getattr(function, "__self__", None)
    function = inspect.unwrap(getattr(function, "__func__", function))
    try:
        text = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(text)
        known = inspect.getclosurevars(function)
    except (OSError, TypeError, SyntaxError, ValueError):
        return found
    names = {**known.builtins, **known.globals, **known.nonlocals}
    if owner is not None and function.__code__.co_argcount:
        names[function.__code__.co_varnames[0]] = owner
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        _take(found, call, names)
    return found


def _take(found: Advice, call: ast.Call, names: Mapping[str, Any]) -> None:
    """Note a call, if it is one that a tail does."""
    keywords = {x.arg: ast.unparse(x.value) for x in call.keywords if x.arg}
    given = [ast.unparse(x) for x in call.args]
    function = _meant(call.func, names)
    if function in NORM or function in VALUE:
        _take_clip(found, function in NORM, given, keywords)
        return
    if not isinstance(call.func, ast.Attribute):
        return
    on, method = _meant(call.func.value, names), call.func.attr
    text = ast.unparse(call.func.value)
    if isinstance(on, Optimizer) and method == "step":
        found.optimizers[text] = None
    elif isinstance(on, torch.amp.GradScaler) and method in OF_SCALER and call.args:
        if isinstance(_meant(call.args[0], names), Optimizer):
            found.optimizers[given[0]] = None
            found.given["scaler"] = text
    elif isinstance(on, (Optimizer, torch.nn.Module)) and method == "zero_grad":
        none = keywords.get("set_to_none") or "".join(given[:1]) or "True"
        found.given["zero_grad"] = "True" if none == "True" else "'zeros'"
    elif given and _updates(on, method):
        found.averages.append(f"({text}, {given[0]})")


def _take_clip(
    found: Advice, norm: bool, given: list[str], keywords: Mapping[str, str]
) -> None:
    limit = keywords.get("max_norm" if norm else "clip_value") or "".join(given[1:2])
    if not limit:
        return
    found.given["clip_grad_norm" if norm else "clip_grad_value"] = limit
    kind = keywords.get("norm_type") or "".join(given[2:3])
    if norm and kind:
        found.given["norm_type"] = kind


def _updates(on: Any, method: str) -> bool:
    """Is it a method with which an average follows the parameters it is given?"""
    if isinstance(on, AveragedModel):
        return method == "update_parameters"
    kind = None if on is None else kind_of(on)
    return kind is not None and method == kind[1]


def _meant(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of one, is now; None where that is not known.

    No property of anybody's is asked: attributes are looked up where they lie.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    on = _meant(node.value, names)
    if on is None:
        return None
    if isinstance(on, torch.nn.Module) and node.attr in on._modules:
        return on._modules[node.attr]
    try:
        return inspect.getattr_static(on, node.attr)
    except AttributeError:
        return None
