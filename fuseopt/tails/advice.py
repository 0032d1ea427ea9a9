"""Advise a `fuseopt.tail` that does the same as a function of the user.

Nothing runs. The advice reads the calls in the function's source. It looks up the
objects whose methods are called, in the function's globals and closure. It contains the
user's own expressions.
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
#: Methods of a GradScaler that take an optimizer.
OF_SCALER = ("unscale_", "step")


class Advice:
    """Arguments of the `fuseopt.tail` that does the same as a function."""

    def __init__(self) -> None:
        #: the expressions for optimizers, in order, each once
        self.optimizers: dict[str, None] = {}
        self.arguments: dict[str, str] = {}
        self.averages: list[str] = []

    def __str__(self) -> str:
        """Return the call of `fuseopt.tail`; "" if the function does only a step."""
        if not self.optimizers or not (self.arguments or self.averages):
            return ""
        names = [*self.optimizers]
        first = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
        arguments = [f"{key}={value}" for key, value in self.arguments.items()]
        if self.averages:
            arguments.append(f"ema=[{', '.join(self.averages)}]")
        return f"fuseopt.tail({', '.join([first, *arguments])})"


def tail_of(function: Callable[..., Any]) -> Advice:
    """Return the advice for a function; empty if it has no source."""
    advice = Advice()
    owner = getattr(function, "__self__", None)
    function = inspect.unwrap(getattr(function, "__func__", function))
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source)
        variables = inspect.getclosurevars(function)
    except (OSError, TypeError, SyntaxError, ValueError):
        return advice
    names = {**variables.builtins, **variables.globals, **variables.nonlocals}
    if owner is not None and function.__code__.co_argcount:
        names[function.__code__.co_varnames[0]] = owner
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        _note(advice, call, names)
    return advice


def _note(advice: Advice, call: ast.Call, names: Mapping[str, Any]) -> None:
    """Add a call to the advice, if a tail does it."""
    keywords = {x.arg: ast.unparse(x.value) for x in call.keywords if x.arg}
    arguments = [ast.unparse(x) for x in call.args]
    function = _value_of(call.func, names)
    if function in NORM or function in VALUE:
        _note_clip(advice, function in NORM, arguments, keywords)
        return
    if not isinstance(call.func, ast.Attribute):
        return
    on, method = _value_of(call.func.value, names), call.func.attr
    text = ast.unparse(call.func.value)
    if isinstance(on, Optimizer) and method == "step":
        advice.optimizers[text] = None
    elif isinstance(on, torch.amp.GradScaler) and method in OF_SCALER and call.args:
        if isinstance(_value_of(call.args[0], names), Optimizer):
            advice.optimizers[arguments[0]] = None
            advice.arguments["scaler"] = text
    elif isinstance(on, (Optimizer, torch.nn.Module)) and method == "zero_grad":
        none = keywords.get("set_to_none") or "".join(arguments[:1]) or "True"
        advice.arguments["zero_grad"] = "True" if none == "True" else "'zeros'"
    elif arguments and _updates(on, method):
        advice.averages.append(f"({text}, {arguments[0]})")


def _note_clip(
    advice: Advice, norm: bool, arguments: list[str], keywords: Mapping[str, str]
) -> None:
    limit = keywords.get("max_norm" if norm else "clip_value") or "".join(
        arguments[1:2]
    )
    if not limit:
        return
    advice.arguments["clip_grad_norm" if norm else "clip_grad_value"] = limit
    kind = keywords.get("norm_type") or "".join(arguments[2:3])
    if norm and kind:
        advice.arguments["norm_type"] = kind


def _updates(owner: Any, method: str) -> bool:
    """Does the method update an average with the parameters it is given?"""
    if isinstance(owner, AveragedModel):
        return method == "update_parameters"
    kind = None if owner is None else kind_of(owner)
    return kind is not None and method == kind[1]


def _value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the present value of a name or an attribute; None if there is none.

    The lookup runs no property and calls no code.
    """
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _value_of(node.value, names)
    if owner is None:
        return None
    if isinstance(owner, torch.nn.Module) and node.attr in owner._modules:
        return owner._modules[node.attr]
    try:
        return inspect.getattr_static(owner, node.attr)
    except AttributeError:
        return None
