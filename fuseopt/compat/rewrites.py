"""Rewrite calls that scale or interpolate to one form, whatever Dynamo's version.

Versions of torch take these calls apart in different ways, some of which cannot be told
from what a user might write, and round otherwise than eager. `trace_rewrites` has them
written in the form that fuseopt.capture.fx.patterns recognises. Where Dynamo has other
hooks than these, its own forms stand; those of torch 2.13 are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .dynamo import leads_to

#: In the `meta` of a node: the method that was written, of which it is the last call.
WRITTEN_AS = "fuseopt_written_as"


def foreach_lerp(start: Any, end: Any, weight: Any) -> Any:
    """`torch._foreach_lerp_(start, end, weight)`, for a weight that is no list.

    Runs while Dynamo traces it. Each weight has lerp's own formula, and no tensor is
    read as a number.
    """
    difference = torch._foreach_sub(end, start)
    if isinstance(weight, torch.Tensor):
        high = weight.abs() >= 0.5
        factor = torch.where(high, -(1.0 - weight), weight)
        bases = [torch.where(high, e, s) for s, e in zip(start, end)]  # noqa: B905
        torch._foreach_addcmul_(bases, [factor] * len(difference), difference)
        for s, b in zip(start, bases):  # noqa: B905
            s.copy_(b)
    elif (weight if weight >= 0 else -weight) >= 0.5:
        of = start[0]
        factor = -(1.0 - torch.tensor(weight, dtype=of.dtype, device=of.device))
        for s, e in zip(start, end):  # noqa: B905
            s.copy_(e)
        torch._foreach_addcmul_(start, [factor] * len(difference), difference)
    else:
        factors = [torch.full_like(d, weight) for d in difference]
        torch._foreach_addcmul_(start, factors, difference)
    return start


def trace_rewrites(backend: Callable[..., Any]) -> None:
    """Where Dynamo traces for `backend`: a foreach lerp, `addcmul_` and `addcdiv_` with
    a value, `add_` with a tensor as alpha, each in one form. A call of lists reads the
    number of a tensor as alpha, as eager does.

    Relies on Dynamo's table of handlers, and on its methods for those of tensors.
    """
    try:
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.lists import BaseListVariable
        from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    except (ImportError, AttributeError):
        return

    def ours(tx: Any) -> bool:
        return leads_to(getattr(tx.output, "compiler_fn", None), backend)

    def call(tx: Any, function: Any, *args: Any) -> Any:
        return TorchInGraphFunctionVariable(function).call_function(tx, list(args), {})

    def fused(name: str, target: Any, tx: Any, product: Any, scale: Any) -> Any:
        from torch._inductor import inductor_prims

        result = call(tx, inductor_prims.fma, product, scale, target)
        # its line of source does not say so where a mode calls the method
        copied = target.call_method(tx, "copy_", [result], {})
        copied.as_proxy().node.meta[WRITTEN_AS] = name
        return copied

    original_lerp = handlers.get(torch._foreach_lerp_)

    def lerp(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours(tx) or original_lerp is None:
            return original_lerp(this, tx, *args, **kwargs) if original_lerp else None
        if len(args) != 3 or kwargs or isinstance(args[2], BaseListVariable):
            return None  # a list of weights is traced as it is
        _hide_frames()
        function = VariableTracker.build(tx, foreach_lerp)
        return tx.inline_user_function_return(function, list(args), {})

    def scaled(function: Any) -> None:
        original = handlers.get(function)

        def traced(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            alpha = kwargs.get("alpha")
            if not isinstance(alpha, TensorVariable) or not ours(tx):
                return original(this, tx, *args, **kwargs) if original else None
            number = alpha.call_method(tx, "item", [], {})
            again = TorchInGraphFunctionVariable(function)
            return again.call_function(tx, list(args), {**kwargs, "alpha": number})

        handlers[function] = traced

    def method(name: str, make: Callable[..., Any]) -> None:
        original = getattr(TensorVariable, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def traced(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            result = make(this, tx, *args, **kwargs) if ours(tx) else NotImplemented
            return (
                original(this, tx, *args, **kwargs)
                if result is NotImplemented
                else result
            )

        setattr(TensorVariable, name, traced)

    def addcmul(this: Any, tx: Any, a: Any, b: Any, *, value: Any = None) -> Any:
        if value is None:
            return None
        return fused("addcmul_", this, tx, call(tx, torch.mul, a, b), value)

    def addcdiv(this: Any, tx: Any, a: Any, b: Any, *, value: Any = None) -> Any:
        if value is None:
            return None
        return fused("addcdiv_", this, tx, call(tx, torch.div, a, b), value)

    def add(this: Any, tx: Any, other: Any, *, alpha: Any = None) -> Any:
        if not isinstance(alpha, TensorVariable):
            return None
        return fused("add_", this, tx, other, alpha)

    def is_number(value: Any) -> bool:
        if isinstance(value.realize(), SymNodeVariable):
            return value.python_type() in (int, float)
        is_constant = value.is_python_constant()
        return is_constant and type(value.as_python_constant()) in (int, float)

    def fill(this: Any, tx: Any, key: Any, value: Any) -> Any:
        """`x[mask] = number`, for a mask of x's shape."""
        sizes = [getattr(x, "_size", None) for x in (this, key)]
        if (
            not isinstance(key, TensorVariable)
            or key.dtype is not torch.bool
            or sizes[0] is None
            or sizes[0] != sizes[1]
            or not is_number(value)
        ):
            return NotImplemented
        this.call_method(tx, "masked_fill_", [key, value], {})
        return VariableTracker.build(tx, None)

    handlers[torch._foreach_lerp_] = lerp
    method("method___setitem__", fill)
    for scale in ("add", "add_", "sub", "sub_"):
        scaled(getattr(torch, f"_foreach_{scale}"))
    method("method_addcmul_", addcmul)
    method("method_addcdiv_", addcdiv)
    method("method_add_", add)


@functools.cache
def _hide_frames() -> None:
    """Leave this file out of the source lines of nodes: they name the user's own.

    Relies on the set of files that Dynamo leaves out; without it, a node that stands
    for a lerp names this file.
    """
    try:
        from torch.fx.experimental.symbolic_shapes import uninteresting_files

        uninteresting_files().add(__file__)
    except (ImportError, AttributeError):
        return
