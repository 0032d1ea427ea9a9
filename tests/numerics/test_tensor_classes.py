"""A class of tensors without code: what eager makes from such tensors has it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from tests.beside import PATHS, WAYS


class Named(torch.Tensor):
    pass


class Averages(torch.optim.Optimizer):
    """State of a parameter and of its gradient; with `anew` at each step again."""

    def __init__(self, params: Any, anew: bool) -> None:
        super().__init__(params, {})
        self.anew = anew

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["k"] = torch.zeros_like(p), p.grad.clone()
                    state["z"] = torch.zeros(3)
                if self.anew:
                    state["v"] = state["k"] * 2
                state["m"].lerp_(p.grad, 0.1)
                p.sub_(state["m"], alpha=0.1)


def tail(opt: Any) -> Any:
    return fuseopt.tail(opt, clip_grad_value=10.0)


def named(t: Any) -> Any:
    return t.as_subclass(Named)


def trained(way: Any, lanes: int, which: str, anew: bool) -> list[Any]:
    """Values and classes after each of six steps."""
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(3)) for _ in range(lanes)]
    for k in {"one": [-2], "all": range(lanes)}.get(which, []):
        ps[k] = torch.nn.Parameter(named(ps[k].detach()))
    opt = Averages(ps, anew)
    step, found = way(opt), []
    for turn in range(6):
        for p in ps:
            p.grad = torch.ones(3)
        if which == "a gradient" and turn in (0, 3):
            ps[-2].grad = named(ps[-2].grad)
        if which == "gradients":
            for p in ps:
                p.grad = named(p.grad)
        if which == "state" and turn == 2:
            for p in ps:
                opt.state[p]["k"] = named(opt.state[p]["k"])
        step()
        found += [
            {k: (type(t), t.tolist()) for k, t in opt.state[p].items()} for p in ps
        ]
        found += [(type(p), p.tolist()) for p in ps]
    return found


@pytest.mark.family(6)
@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", [*PATHS, "tail"])
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("which", ["all", "one", "a gradient", "gradients", "state"])
def test_a_class_is_kept(which: str, anew: bool, way: str, lanes: int) -> None:
    want = trained(lambda opt: opt.step, lanes, which, anew)
    compiled = tail if way == "tail" else WAYS[way]
    assert trained(compiled, lanes, which, anew) == want
    reasons = [r.fallback for r in fuseopt.reports()]
    makes = anew or (which != "state" and way != "tail")  # a tail begins with eager's
    assert any("whose class they keep" in x for x in reasons) == makes
    assert anew or "" in reasons
