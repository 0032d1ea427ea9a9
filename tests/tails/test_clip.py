"""torch.nn.utils.clip_grad_norm_, compiled: its norm, its gradients, its errors."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from tests.tails.twins import SHAPES, same


def params(*dtypes: torch.dtype, shapes: Any = SHAPES) -> list[Any]:
    torch.manual_seed(0)
    kinds = dtypes or (torch.float32,)
    return [
        torch.nn.Parameter(torch.randn(s).to(kinds[k % len(kinds)]))
        for k, s in enumerate(shapes)
    ]


def set_grads(ps: list[Any], seed: int, size: float = 1.0) -> None:
    g = torch.Generator().manual_seed(seed)
    for p in ps:
        p.grad = (torch.randn(p.shape, generator=g) * size).to(p.dtype)


def alike(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(p.grad is q.grad is None or same(p.grad, q.grad) for p, q in pairs)


def both(one: list[Any], other: list[Any], *args: Any, **kwargs: Any) -> None:
    norm = torch.nn.utils.clip_grad_norm_(one, *args, **kwargs)
    assert same(fuseopt.clip_grad_norm_(other, *args, **kwargs), norm)
    assert alike(one, other)


@pytest.mark.family(5)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf"), "inf"])
def test_bits_in_two_launches(norm_type: Any) -> None:
    one, other = params(), params()
    for n in range(5):
        for ps in (one, other):
            set_grads(ps, n, 10.0 ** (n - 3))
        both(one, other, 0.5 + n, norm_type)
    assert fuseopt.reports()[-1].launches == 2
    assert len(fuseopt.reports()) <= 2


@pytest.mark.family(3)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("raises", [False, True])
def test_dtypes_in_one_list(raises: bool, foreach: bool | None) -> None:
    """Norms are of each list that torch makes, in its order."""
    kinds = torch.bfloat16, torch.float32, torch.float64
    one, other = params(*kinds), params(*kinds)
    for n in range(3):
        for ps in (one, other):
            set_grads(ps, n, 3.0)
        both(one, other, 1.0, error_if_nonfinite=raises, foreach=foreach)


def test_large_and_empty_ones() -> None:
    shapes = [(40000,), (0,), (129, 257)]
    one, other = params(shapes=shapes), params(shapes=shapes)
    for n in range(3):
        for ps in (one, other):
            set_grads(ps, n)
        both(one, other, 1.0)


def test_norms_that_are_not_finite() -> None:
    """Gradients are scaled by them, or left as they are with torch's own error."""
    one, other = params(), params()
    for n, bad in enumerate([1.0, float("inf"), float("nan"), 1.0]):
        for ps in (one, other):
            set_grads(ps, n)
            ps[1].grad[3] = bad
        both(one, other, 1.0)
        for ps in (one, other):
            set_grads(ps, n)
            ps[1].grad[3] = bad
        if bad == 1.0:
            both(one, other, 1e-9, error_if_nonfinite=True)
            continue
        with pytest.raises(RuntimeError) as expected:
            torch.nn.utils.clip_grad_norm_(one, 1e-9, error_if_nonfinite=True)
        with pytest.raises(RuntimeError) as raised:
            fuseopt.clip_grad_norm_(other, 1e-9, error_if_nonfinite=True)
        assert str(raised.value) == str(expected.value)
        assert alike(one, other)


def test_what_is_given() -> None:
    """One tensor, generators, numbers as tensors; none that has a gradient."""
    one, other = params(), params()
    set_grads(one, 0)
    set_grads(other, 0)
    torch.nn.utils.clip_grad_norm_(one[0], torch.tensor(0.1))  # type: ignore[arg-type]
    fuseopt.clip_grad_norm_(other[0], torch.tensor(0.1))  # type: ignore[arg-type]
    assert alike(one, other)
    torch.nn.utils.clip_grad_norm_((p for p in one), -1.0)
    fuseopt.clip_grad_norm_((p for p in other), -1.0)
    assert alike(one, other)
    assert same(fuseopt.clip_grad_norm_([], 1.0), torch.tensor(0.0))
    assert same(fuseopt.clip_grad_norm_(params(), 1.0), torch.tensor(0.0))
    with pytest.warns(UserWarning, match="empty generator"):
        fuseopt.clip_grad_norm_((p for p in []), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuseopt.clip_grad_norm_([], 1.0)


def test_gradients_that_come_and_go() -> None:
    one, other = params(), params()
    norms = []
    for n in range(8):
        for ps in (one, other):
            set_grads(ps, n)
            ps[n % 3].grad = None
        norm = torch.nn.utils.clip_grad_norm_(one, 1.0)
        norms.append((fuseopt.clip_grad_norm_(other, 1.0), norm))
        assert alike(one, other)
    # each is a tensor of its own
    assert all(same(a, b) for a, b in norms)


def test_what_torch_does_itself() -> None:
    """Shared and sparse gradients, subclasses, gradients with a graph: it is told."""

    class Tagged(torch.Tensor):
        pass

    def sparse(ps: list[Any]) -> None:
        ps[0].grad = ps[0].grad.to_sparse()

    def tagged(ps: list[Any]) -> None:
        for p in ps:
            p.grad = p.grad.as_subclass(Tagged)

    for change, text in (
        (sparse, "sparse"),
        (tagged, "another class"),
    ):
        ps = params()
        set_grads(ps, 0)
        change(ps)
        try:
            torch.nn.utils.clip_grad_norm_(ps, 1.0)
        except Exception as error:
            with pytest.raises(type(error)):
                fuseopt.clip_grad_norm_(ps, 1.0)
        else:
            fuseopt.clip_grad_norm_(ps, 1.0)
        assert text in fuseopt.reports()[-1].fallback
    one, other = params(shapes=[(3,), (3,)]), params(shapes=[(3,), (3,)])
    for ps in (one, other):
        set_grads(ps, 0)
        ps[1].grad = ps[0].grad
    both(one, other, 0.1)
    assert "share a gradient" in fuseopt.reports()[-1].fallback


def test_modes_see_what_is_called() -> None:
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    one, other = params(), params()
    for n in range(3):
        for ps in (one, other):
            set_grads(ps, n)
        norm = torch.nn.utils.clip_grad_norm_(one, 1.0)
        with Watching() if n else contextlib.nullcontext():
            assert same(fuseopt.clip_grad_norm_(other, 1.0), norm)
        assert alike(one, other)
    assert "_foreach_norm.Scalar" in seen


@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_whose_memory_was_taken_away(first: bool) -> None:
    """At it torch's function ends the process; when it has memory, it is compiled."""
    one, other = params(), params()
    if not first:
        set_grads(one, 0), set_grads(other, 0)
        both(one, other, 1.0)
    set_grads(one, 1), set_grads(other, 1)
    memory = other[0].grad.untyped_storage()
    content = memory.clone()
    memory.resize_(0)
    with pytest.raises(fuseopt.errors.UnsupportedInput, match="no memory"):
        fuseopt.clip_grad_norm_(other, 1.0)
    memory.resize_(content.nbytes())
    memory.copy_(content)
    assert alike(one, other)
    both(one, other, 1.0)
    assert fuseopt.reports()[-1].launches == 2


@pytest.mark.slow
def test_limits_that_are_zero_infinite_or_move() -> None:
    """And gradients that are zeros, and all that Dynamo has being dropped."""
    one, other = params(), params()
    for n, limit in enumerate([1.0, float("inf"), 2.0, 0.0, -1.0, float("nan"), 3.0]):
        for ps in (one, other):
            set_grads(ps, n, 0.0 if n == 2 else 1.0)
        both(one, other, limit)
        if n == 4:
            torch._dynamo.reset()


def test_two_sets_that_overlap() -> None:
    """Each has its own; what is clipped twice is clipped twice."""
    one, other = params(), params()
    for n in range(4):
        for ps in (one, other):
            set_grads(ps, n)
        for begin, end in ((0, 6), (0, 3), (2, 6)):
            both(one[begin:end], other[begin:end], 0.5)
        assert alike(one, other)


@pytest.mark.slow
def test_nothing_is_kept() -> None:
    def used() -> list[Any]:
        ps = params()
        for n in range(3):
            set_grads(ps, n)
            fuseopt.clip_grad_norm_(ps, 1.0)
        return [*map(weakref.ref, ps)]

    dead = used()
    gc.collect()
    assert [x() for x in dead] == [None] * len(SHAPES)


def test_within_torch_compile() -> None:
    one, other = params(), params()
    set_grads(one, 0)
    set_grads(other, 0)

    def clip() -> torch.Tensor:
        return fuseopt.clip_grad_norm_(other, 1.0)

    norm = torch.nn.utils.clip_grad_norm_(one, 1.0)
    assert same(torch.compile(clip, backend="eager")(), norm)
    assert alike(one, other)
