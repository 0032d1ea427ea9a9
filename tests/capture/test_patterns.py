"""Calls that tracing takes apart are put back in Dynamo's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, symbolic_trace

from fuseopt import compat
from fuseopt.backend import attach, fuseopt
from fuseopt.capture.fx.eager import as_eager, replay
from fuseopt.capture.fx.patterns import restore

Step = Callable[..., None]


def lerp_below(p: list[Tensor], g: list[Tensor]) -> None:
    torch._foreach_lerp_(p, g, 0.1)


def lerp_above(p: list[Tensor], g: list[Tensor]) -> None:
    torch._foreach_lerp_(p, g, 0.9)


def lerp_by_a_tensor(p: list[Tensor], g: list[Tensor], w: Tensor) -> None:
    torch._foreach_lerp_(p, g, w)


def products(p: list[Tensor], g: list[Tensor]) -> None:
    for x, y in zip(p, g, strict=True):
        x.addcmul_(y, y, value=-0.1)
        x.addcdiv_(y, y, value=0.3)


def scaled_by_a_tensor(p: list[Tensor], g: list[Tensor], w: Tensor) -> None:
    for x, y in zip(p, g, strict=True):
        x.add_(y, alpha=w)
        x.addcdiv_(y, y, value=w)


STEPS: dict[Step, set[str]] = {
    lerp_below: {"_foreach_lerp_"},
    lerp_above: {"_foreach_lerp_"},
    lerp_by_a_tensor: {"_foreach_lerp_"},
    products: {"addcmul_", "addcdiv_"},
    scaled_by_a_tensor: {"add_", "addcdiv_"},
}


def arguments(step: Step, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    lists = [
        [torch.rand(5, generator=generator).to(dtype) for _ in range(3)]
        for _ in range(2)
    ]
    return [*lists, torch.tensor(0.3)][: step.__code__.co_argcount]


def graph_of(step: Step, args: list[Any]) -> tuple[GraphModule, list[Any]]:
    """What Dynamo hands over, and the arguments of that call."""
    torch._dynamo.reset()
    found: list[Any] = []

    def keep(gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.extend((gm, list(inputs)))
        return lambda *_: ()

    attach()
    keep.compiler_fn = fuseopt  # type: ignore[attr-defined]
    with compat.scalar_outputs():
        torch.compile(step, backend=keep)(*args)
    return found[0], found[1]


def calls(gm: GraphModule) -> set[str]:
    """What of arithmetic a graph calls."""
    return {
        str(getattr(n.target, "__name__", n.target))
        for n in gm.graph.nodes
        if n.op.startswith("call")
    }


def contents(args: list[Any]) -> set[bytes]:
    """The bits of all tensors."""
    tensors = [t for x in args for t in (x if isinstance(x, list) else [x])]
    return {t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_graph_has_the_calls_and_the_bits_of_eager(
    step: Step, dtype: torch.dtype
) -> None:
    gm, given = graph_of(step, arguments(step, dtype))
    restore(gm)
    gm.graph.lint()
    assert calls(gm) >= STEPS[step]
    gone = {"_foreach_addcmul_", "_foreach_sub", "copy_", "fma"}
    assert not calls(gm) & gone
    want = arguments(step, dtype)
    step(*want)
    got = replay(gm, given)[1]
    as_eager(gm)(*given)
    assert contents(got) == contents(given) == contents(want)


def test_what_is_read_elsewhere_stays() -> None:
    def step(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        product = torch.mul(y, y)
        fma = torch.ops.prims.fma(product, w, x)
        x.copy_(fma)
        return fma

    gm = symbolic_trace(step)
    before = calls(gm)
    restore(gm)
    assert calls(gm) == before


def test_a_graph_is_restored_once() -> None:
    gm, _ = graph_of(products, arguments(products, torch.float32))
    restore(gm)
    nodes = list(gm.graph.nodes)
    restore(gm)
    assert list(gm.graph.nodes) == nodes
