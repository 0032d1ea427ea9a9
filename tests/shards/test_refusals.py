"""Steps that need more than the part of a DTensor that is here: eager, and a warning.

Each is one that gives other bits if it is done to parts, or could.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import SGD, Optimizer

import fuseopt
from tests.shards import assert_same, spread
from tests.shards.steps import WAYS, compared, give, parameters, run, step_of


class Step(Optimizer):
    """Momentum, and something that a class derived from this one does first."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def one(self, p: Any, state: Any, lr: float) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "m" not in state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad)
                self.one(p, state, group["lr"])
                p.add_(state["m"], alpha=-group["lr"])


class Numel(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.mul_(1 - 1 / (100 + p.numel()))


class Shape(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.mul_(1 - 1 / (100 + p.shape[0]))


class Length(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.mul_(1 - 1 / (100 + len(p)))


class Rows(Step):
    """All of a part, if it has no more than eight rows."""

    def one(self, p: Any, state: Any, lr: float) -> None:
        p[:8].mul_(0.5)


class Narrow(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.narrow(0, 0, 1).mul_(0.5)


class Transposed(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        if p.dim() == 2:
            p.t().mul_(0.5)


class Flat(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.view(-1).mul_(0.5)


class Norm(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.mul_(1 / (1 + p.grad.norm()))


class Mean(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.sub_(p.mean(0, keepdim=True))


class Total(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.mul_(0.99 if p.grad.sum().item() > 0 else 0.98)


class Most(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.div_(p.abs().max().clamp(min=1.0))


class Later(Step):
    """What it needs of the whole it needs in its fourth call alone."""

    calls = 0

    def one(self, p: Any, state: Any, lr: float) -> None:
        state["n"] = state.get("n", 0) + 1
        if state["n"] >= 4:
            p.mul_(1 / (1 + p.grad.norm()))


class Sums(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.add_(p.grad.cumsum(0), alpha=-lr)


class Softmax(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.add_(p.grad.softmax(0), alpha=-lr)


class IsDTensor(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.mul_(0.5 if isinstance(p, DTensor) else 0.25)


class TypeIs(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.mul_(0.25 if type(p) is torch.nn.Parameter else 0.5)


class HasPart(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.mul_(0.5 if hasattr(p, "to_local") else 0.25)


class OnPart(Step):
    def one(self, p: Any, state: Any, lr: float) -> None:
        p.to_local().mul_(0.5)


class OfWhole(Step):
    """State that is no DTensor."""

    def one(self, p: Any, state: Any, lr: float) -> None:
        if "n" not in state:
            state["n"] = torch.zeros(3)
        state["n"].add_(1)


class Initial(Step):
    """A norm where Dynamo lets the optimizer make its state."""

    def _init_group(self, group: Any) -> None:
        for p in group["params"]:
            if len(self.state[p]) == 0:
                self.state[p]["m"] = torch.zeros_like(p)
                self.state[p]["n"] = p.norm()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self._init_group(group)
            for p in group["params"]:
                state = self.state[p]
                state["m"].mul_(0.9).add_(p.grad)
                p.add_(state["m"], alpha=-group["lr"])


class OwnSum(Step):
    """State that is a sum of a part."""

    def one(self, p: Any, state: Any, lr: float) -> None:
        state["n"] = p.grad.sum()


REFUSED = [Total, IsDTensor, TypeIs, HasPart, OnPart]


@pytest.mark.parametrize("kind", REFUSED, ids=lambda k: k.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_what_asks_for_more_than_sizes_runs_in_eager(
    mesh: DeviceMesh, way: str, kind: Any
) -> None:
    (told,) = compared(lambda ps: kind(ps), mesh, 5, way)
    assert "eager: its parameters are DTensors, and " in told
    assert "(placed as S(0) or S(1) or R)" in told


def test_the_op_and_the_placement_are_named(mesh: DeviceMesh) -> None:
    """Though the step is refused for another reason first."""
    (told,) = compared(lambda ps: Total(ps), mesh, 5, WAYS[0])
    assert "it branches on tensor data: p.grad.sum().item()" in told
    assert "aten.sum.default needs whole tensors" in told
    assert "(placed as S(0) or S(1) or R)" in told


def test_an_error_where_no_fallback_is_wanted(mesh: DeviceMesh) -> None:
    params = parameters(mesh, 5)
    optimizer = Total(params)
    fuseopt.compile(optimizer, fallback="error")
    give(params, torch.Generator())
    with pytest.raises(fuseopt.errors.CaptureError, match="DTensors"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize(
    "placements", [[Replicate()], [Shard(1)]], ids=["whole", "columns"]
)
def test_gradients_that_lie_otherwise(mesh: DeviceMesh, placements: Any) -> None:
    """Eager moves them to where the parameter is, or fails: so does the step."""

    def between(o: Optimizer, k: int) -> None:
        p = o.param_groups[0]["params"][0]
        if k == 2:
            full = torch.arange(40.0).reshape(8, 5)
            p.grad = spread(full, mesh, placements)

    def make(ps: Any) -> Optimizer:
        return SGD(ps, momentum=0.9)

    told = compared(make, mesh, 5, WAYS[0], between)
    assert len(told) == 1
    assert "the gradient" in told[0]
    assert fuseopt.reports()[0].launches == 1


def test_gradients_to_be_added_up(mesh: DeviceMesh) -> None:
    def between(o: Optimizer, k: int) -> None:
        p = o.param_groups[0]["params"][4]
        if k == 2:
            full = torch.arange(12.0).reshape(4, 3)
            p.grad = DTensor.from_local(full, mesh, [Partial()])

    told = compared(lambda ps: SGD(ps), mesh, 5, WAYS[0], between)
    assert len(told) == 1
    assert "Partial" in told[0]


@pytest.mark.filterwarnings("ignore:fuseopt")
def test_a_plain_gradient_of_a_dtensor_is_eagers_error(mesh: DeviceMesh) -> None:
    texts = []
    for way in ("", WAYS[0]):
        params = parameters(mesh, 3)
        optimizer = SGD(params, momentum=0.9)
        step = step_of(optimizer, way)
        give(params, torch.Generator())
        params[0].grad = torch.ones(8, 5)
        with pytest.raises(RuntimeError) as raised:
            step()
        texts.append(str(raised.value).splitlines()[0])
    assert texts[0] == texts[1]


def test_after_a_call_in_eager_the_next_is_compiled(mesh: DeviceMesh) -> None:
    def between(o: Optimizer, k: int) -> None:
        p = o.param_groups[0]["params"][0]
        if k % 2:
            p.grad = spread(torch.ones(8, 5), mesh, [Replicate()])

    def make(ps: Any) -> Optimizer:
        return SGD(ps, momentum=0.9)

    want = run(make, parameters(mesh, 5), "", between=between)
    with pytest.warns(RuntimeWarning, match="another mesh, placement or size"):
        got = run(make, parameters(mesh, 5), WAYS[0], between=between)
    assert_same(got, want)


def test_a_closure_runs_in_eager(mesh: DeviceMesh) -> None:
    ends = []
    for way in ("", WAYS[0]):
        params = parameters(mesh, 5)
        optimizer = SGD(params, momentum=0.9)
        step = step_of(optimizer, way)
        give(params, torch.Generator().manual_seed(0))
        step()
        if way:
            with pytest.warns(RuntimeWarning, match="its step is given arguments"):
                assert optimizer.step(lambda: 3.0) == 3.0
        else:
            optimizer.step(lambda: 3.0)
        ends.append(optimizer)
    assert_same(ends[1], ends[0])


def test_explain_says_where_to_look(mesh: DeviceMesh) -> None:
    optimizer = SGD(parameters(mesh, 2))
    with pytest.raises(fuseopt.errors.UnsupportedInput, match="reports"):
        fuseopt.explain(optimizer)
