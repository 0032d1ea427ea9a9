"""Private API of ATen and libtorch: overloads, metadata guards, library functions."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import EagerOnly
from .capability import probed
from .names import Missing, find

#: Targets of FX nodes: higher-order ops such as `torch.cond`, and the switch of
#: `torch.no_grad`, which sets the grad mode without an object that undoes it.


class _Nothing:
    """Replaces a class that torch lacks, without any objects."""


class _NoMode:
    """Replaces a mode that torch lacks; entering it is an error."""

    def __enter__(self) -> Any:
        raise EagerOnly(f"torch {torch.__version__} has no TorchDispatchMode")

    def __exit__(self, *_: object) -> None:
        """Do nothing, since the mode is never entered."""


def _switch_grad(mode: bool) -> None:
    """Set the grad mode, like torch's function that Dynamo writes into graphs."""
    torch.set_grad_enabled(mode)


#: A mode that intercepts each ATen call, for recording a graph.
DISPATCH_MODE: Any = find("torch.utils._python_dispatch:TorchDispatchMode", _NoMode)
HIGHER_ORDER: Any = find("torch._ops:HigherOrderOperator", _Nothing)
#: The target of a `foreach_map`; None where torch has none.
FOREACH_MAP: Any = find("torch._higher_order_ops.foreach_map:_foreach_map", None)
OVERLOAD: Any = find("torch._ops:OpOverload", type(torch.ops.aten.add.Tensor))
FAKE: Any = find("torch._subclasses.fake_tensor:FakeTensor", _Nothing)
GRAD_SWITCH: Any = find("torch._C:_set_grad_enabled", _switch_grad)
#: The `__torch_function__` of a tensor class that overrides nothing.
NO_FUNCTION: Any = find("torch._C:_disabled_torch_function_impl", None)
#: `torch.tensor` in a graph of Dynamo: for a constant, and for a number that changes.
MAKE_TENSOR = tuple(
    x for x in (torch.tensor, find("torch._refs:tensor", None)) if x is not None
)


def keeps_class(kind: type) -> bool:
    """Have results of ATen calls on tensors of a class this class, and not Tensor?

    The class has Tensor's `__torch_function__`, and is no wrapper subclass.
    """
    default: Any = torch.Tensor.__torch_function__
    function: Any = getattr(kind, "__torch_function__", None)
    return (
        kind is not torch.Tensor
        and getattr(function, "__func__", None) is default.__func__
        and getattr(kind, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
    )


def negated_view(t: torch.Tensor) -> torch.Tensor:
    """Return a view that reads a tensor's memory negated, as `x.conj().imag` does."""
    view = find("torch:_neg_view", None)
    if view is None:
        raise EagerOnly(f"torch {torch.__version__} has no _neg_view")
    seen: torch.Tensor = view(t)
    return seen


@probed(
    "bound-ops",
    "an ATen call is made without torch's layer of Python",
    "each extern takes a microsecond longer",
)
def BOUND_OPS() -> None:
    find("torch._ops:OpOverload")
    op = getattr(torch.ops.aten.neg.default, "_op", None)
    if op is None or float(op(torch.ones(1, device="cpu"))) != -1.0:
        raise Missing("torch._ops.OpOverload has no _op that does the same")


def bound_op(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the C function that an overload of an ATen op calls.

    Relies on `OpOverload.__call__` calling `_op` and nothing else (torch 2.11 to 2.15).
    Any other function, or one without `_op`, is returned unchanged.
    """
    if type(func) is not OVERLOAD or not BOUND_OPS.available():
        return func
    return getattr(func, "_op", func)


@probed(
    "metadata-in-c",
    "the layouts of tensors are compared in C where no compiler is there",
    "they are compared in Python",
)
def METADATA() -> None:
    kind = find("torch._C._dynamo.guards:TensorGuards")
    t, other = torch.zeros(2, 3, device="cpu"), torch.zeros(3, 2, device="cpu").t()
    guard = kind(t, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
    if not guard.check(t) or guard.check(other):
        raise Missing("TensorGuards compares something else")


def metadata_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a fast `check(*tensors)`: dtype, device, sizes and strides are unchanged.

    Relies on Dynamo's TensorGuards (C++); without it, compares in Python.
    """
    if not tensors:
        return lambda: True
    kind = find("torch._C._dynamo.guards:TensorGuards", None)
    if kind is not None and METADATA.available():
        # torch annotates these as flat lists, but takes a list for each tensor
        sizes: list[Any] = [list(t.shape) for t in tensors]
        strides: list[Any] = [list(t.stride()) for t in tensors]
        try:
            guard = kind(
                *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
            )
            if guard.check(*tensors):
                return guard.check  # type: ignore[no-any-return]
        except (TypeError, AttributeError) as error:
            METADATA.broke(error)
    expected = [_metadata(t) for t in tensors]
    return lambda *now: [_metadata(t) for t in now] == expected


def _metadata(t: torch.Tensor) -> tuple[Any, ...]:
    return (t.dtype, t.device, tuple(t.shape), t.stride())


@probed(
    "device-hints",
    "shape rules know the device that a tensor without memory stands for",
    "a step whose products depend on strides of a decomposition runs in eager",
)
def DEVICE_HINTS() -> None:
    find("torch._meta_registrations:device_hint")


@contextlib.contextmanager
def shapes_of(device_of: Callable[[torch.Tensor], str]) -> Iterator[None]:
    """Give shape rules the device that a meta tensor represents.

    `device_of(t)` is its name, such as "cpu". The strides of decompositions depend on
    it, and the bits of products of their results on the strides. Relies on
    `torch._meta_registrations.device_hint`; without it, strides are those of a GPU.
    """
    rules: Any = sys.modules.get("torch._meta_registrations")
    original = getattr(rules, "device_hint", None)
    if original is None or not DEVICE_HINTS.available():
        yield
        return

    def hint(t: Any) -> str:
        return device_of(t).split(":")[0] if type(t) is torch.Tensor else original(t)

    rules.device_hint = hint
    try:
        yield
    finally:
        rules.device_hint = original


def wraps_others(t: torch.Tensor) -> bool:
    """Is a tensor a wrapper of others, whose own address means nothing?

    These are DTensor and its like, fake and functional tensors, and tensors within a
    transform. Relies on the dispatch key by which ATen calls Python, and on two
    functions that detect wrappers in C++. If these are missing, relies on the key
    alone.
    """
    if type(t) not in (torch.Tensor, torch.nn.Parameter):
        keys_of = find("torch._C:_dispatch_keys", None)
        python = find("torch._C:DispatchKey.Python", None)
        if keys_of is None or python is None or keys_of(t).has(python):
            return True
    return any(check(t) for check in _wrapped())


@functools.cache
def _wrapped() -> tuple[Callable[[torch.Tensor], bool], ...]:
    checks = (
        find("torch:_is_functional_tensor", None),
        find("torch._C:_functorch.is_functorch_wrapped_tensor", None),
    )
    return tuple([x for x in checks if x is not None])


def bump_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Report to autograd that tensors were changed in place, as an ATen call would."""
    if tensors:
        torch.autograd.graph.increment_version(tensors)


def first_difference(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Describe the first difference in the bits of two tensors, or return None.

    NaN equals NaN.
    """
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}"
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    same = (got == want) & (torch.signbit(got) == torch.signbit(want))
    same |= torch.isnan(got) & torch.isnan(want)
    if bool(same.all()):
        return None
    wrong = (~same).flatten()
    i = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements differ from eager; element "
        f"{i} is {got.flatten()[i].item()!r}, eager has {want.flatten()[i].item()!r}"
    )
