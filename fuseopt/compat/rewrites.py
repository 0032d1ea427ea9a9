"""Rewrite calls that scale or interpolate to one form, for all versions of Dynamo.

Versions of torch decompose these calls differently, and round otherwise than eager.
Some decompositions cannot be distinguished from user code. `trace_rewrites` makes
Dynamo write them in the form that fuseopt.capture.fx.patterns recognizes. If Dynamo has
other hooks than these, its own forms stand; those of torch 2.13 are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .layers import traces_for
from .names import Missing, find
from .patches import Hook, Patcher, patch

#: Key in the `meta` of a node: the user's method whose last call the node is.
WRITTEN_AS = "fuseopt_written_as"


def foreach_lerp(start: Any, end: Any, weight: Any) -> Any:
    """Compute `torch._foreach_lerp_(start, end, weight)`, for a weight that is no list.

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


@patch(
    "rewrites",
    "calls that scale or interpolate come in one form, whatever Dynamo's version",
    "steps in which Dynamo takes such a call apart run in eager",
    bits=True,
)
def REWRITES(patcher: Patcher) -> None:
    """Write lerp, `addcmul_`, `addcdiv_` and `add_` with scales in one form each.

    This covers a foreach lerp, `addcmul_` and `addcdiv_` with a value, and `add_` with
    a tensor as alpha. A foreach call reads the number of a tensor as alpha, as eager
    does. Relies on Dynamo's table of handlers, and on its methods for those of tensors.
    """
    VariableTracker = find("torch._dynamo.variables.base:VariableTracker")
    BaseListVariable = find("torch._dynamo.variables.lists:BaseListVariable")
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
    TensorVariable = find("torch._dynamo.variables.tensor:TensorVariable")
    in_graph = find("torch._dynamo.variables.torch:TorchInGraphFunctionVariable")
    shapes = find("torch.fx.experimental.symbolic_shapes")
    handlers = in_graph._get_handlers()
    backend = patcher.backend

    def ours(tx: Any) -> bool:
        return traces_for(tx, backend)

    def call(tx: Any, function: Any, *args: Any) -> Any:
        return in_graph(function).call_function(tx, list(args), {})

    def fused(name: str, target: Any, tx: Any, product: Any, scale: Any) -> Any:
        fma = find("torch._inductor.inductor_prims:fma")
        result = call(tx, fma, product, scale, target)
        # its source line does not show it if a mode calls the method
        copied = target.call_method(tx, "copy_", [result], {})
        copied.as_proxy().node.meta[WRITTEN_AS] = name
        return copied

    if torch._foreach_lerp_ not in handlers:
        raise Missing("Dynamo has no handler of torch._foreach_lerp_")

    def lerp(original: Hook, this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours(tx):
            return original(this, tx, *args, **kwargs)
        if len(args) != 3 or kwargs or isinstance(args[2], BaseListVariable):
            return None  # a list of weights is traced unchanged
        function = VariableTracker.build(tx, foreach_lerp)
        return tx.inline_user_function_return(function, list(args), {})

    def quotient(original: Hook, this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """Trace `torch.addcdiv`, which Dynamo decomposes: eager scales the first
        factor.
        """
        if ours(tx) and not isinstance(kwargs.get("value"), TensorVariable):
            return None
        return original(this, tx, *args, **kwargs)

    def scaled(function: Any) -> None:
        def traced(
            original: Hook, this: Any, tx: Any, *args: Any, **kwargs: Any
        ) -> Any:
            alpha = kwargs.get("alpha")
            if not isinstance(alpha, TensorVariable) or not ours(tx):
                return original(this, tx, *args, **kwargs)
            number = alpha.call_method(tx, "item", [], {})
            again = in_graph(function)
            return again.call_function(tx, list(args), {**kwargs, "alpha": number})

        patcher.handler(handlers, function, traced)

    def method(name: str, make: Callable[..., Any]) -> None:
        def traced(
            original: Hook, this: Any, tx: Any, *args: Any, **kwargs: Any
        ) -> Any:
            result = make(this, tx, *args, **kwargs) if ours(tx) else NotImplemented
            if result is NotImplemented:
                return original(this, tx, *args, **kwargs)
            return result

        patcher.around(TensorVariable, name, traced, "self", "tx")

    def addcmul(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or [*kwargs] != ["value"]:
            return None
        product = call(tx, torch.mul, *args)
        return fused("addcmul_", this, tx, product, kwargs["value"])

    def addcdiv(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or [*kwargs] != ["value"]:
            return None
        quotient = call(tx, torch.div, *args)
        return fused("addcdiv_", this, tx, quotient, kwargs["value"])

    def add(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        alpha = kwargs.get("alpha")
        if len(args) != 1 or len(kwargs) != 1 or not isinstance(alpha, TensorVariable):
            return None
        return fused("add_", this, tx, args[0], alpha)

    def is_number(value: Any) -> bool:
        if isinstance(value.realize(), SymNodeVariable):
            return value.python_type() in (int, float)
        is_constant = value.is_python_constant()
        return is_constant and type(value.as_python_constant()) in (int, float)

    def fill(this: Any, tx: Any, *args: Any) -> Any:
        """Trace `x[mask] = number`, for a mask of x's shape."""
        if len(args) != 2:
            return NotImplemented
        key, value = args
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

    def without_this_file(original: Hook) -> set[str]:
        """Return files that source lines of nodes omit, to name the user's own."""
        return {*original(), __file__}

    patcher.around(shapes, "uninteresting_files", without_this_file)
    patcher.handler(handlers, torch._foreach_lerp_, lerp)
    patcher.handler(handlers, torch.addcdiv, quotient)
    method("method___setitem__", fill)
    for scale in ("add", "add_", "sub", "sub_"):
        scaled(getattr(torch, f"_foreach_{scale}"))
    method("method_addcmul_", addcmul)
    method("method_addcdiv_", addcdiv)
    method("method_add_", add)
