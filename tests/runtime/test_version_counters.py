"""What eager's step counts as written, the compiled step counts as written.

Autograd and a user's checks compare version counters. Parameters of one memory have
counters apart, as has memory that the step gives a tensor. A gradient or a state that
lies in a parameter's memory may be counted up beyond eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from tests.beside import WAYS

Params = list[torch.nn.Parameter]


def one_memory(ps: Params) -> None:
    ps[3].data = ps[1].data


def one_memory_for_all(ps: Params) -> None:
    for p in ps[1:]:
        p.data = ps[0].data


def transposed(ps: Params) -> None:
    ps[3].data = ps[1].data.T


def overlapping(ps: Params) -> None:
    memory = torch.arange(24.0)
    ps[1].data, ps[3].data = memory[:16].view(4, 4), memory[8:].view(4, 4)


def flat(ps: Params) -> None:
    memory = torch.cat([p.detach().reshape(-1) for p in ps])
    for p, part in zip(ps, torch.chunk(memory, len(ps)), strict=True):
        p.data = part.view(4, 4)


def interleaved(ps: Params) -> None:
    memory = torch.stack([p.detach() for p in ps], 2).contiguous()
    for k, p in enumerate(ps):
        p.data = memory[..., k]


def two_of_three(ps: Params) -> None:
    ps[2].data = ps[0].data
    ps[3].data = ps[1].data


#: How the memory of parameters, each (4, 4), comes to be shared.
SHARED = [
    one_memory,
    one_memory_for_all,
    transposed,
    overlapping,
    flat,
    interleaved,
    two_of_three,
]


class Own(Optimizer):
    """Each parameter for itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["m"], s["n"] = torch.zeros_like(p), 0
                s["n"] += 1
                s["m"].mul_(0.9).add_(p.grad)
                self.write(p, s["m"], group["lr"] / s["n"])

    def write(self, p: Tensor, m: Tensor, rate: float) -> None:
        p.add_(m, alpha=-rate)


class AssignedThenWritten(Own):
    def write(self, p: Tensor, m: Tensor, rate: float) -> None:
        p.data = p.data * 0.5
        p.add_(m, alpha=-rate)


class WrittenThenAssigned(Own):
    def write(self, p: Tensor, m: Tensor, rate: float) -> None:
        p.add_(m, alpha=-rate)
        p.data = p.data * 0.5


class OnlyAssigned(Own):
    def write(self, p: Tensor, m: Tensor, rate: float) -> None:
        p.data = p.data.sub(m, alpha=rate)


class WrittenByView(Own):
    def write(self, p: Tensor, m: Tensor, rate: float) -> None:
        p.view(-1)[::2].sub_(m.view(-1)[::2], alpha=rate)


class WrittenThroughData(Own):
    def write(self, p: Tensor, m: Tensor, rate: float) -> None:
        p.data.sub_(m, alpha=rate)


class GivenItsState(Own):
    """A parameter lies in the memory of its state from the first step on."""

    def write(self, p: Tensor, m: Tensor, rate: float) -> None:
        m.sub_(p, alpha=rate)
        p.data = m


class GivenGradient(Own):
    def write(self, p: Tensor, m: Tensor, rate: float) -> None:
        p.grad.data = m.clone()  # type: ignore[union-attr]
        p.grad.mul_(rate)  # type: ignore[union-attr]
        p.sub_(p.grad)  # type: ignore[arg-type]


#: What a step does with memory of parameters that share none.
GIVEN = [
    AssignedThenWritten,
    WrittenThenAssigned,
    OnlyAssigned,
    WrittenByView,
    WrittenThroughData,
    GivenItsState,
    GivenGradient,
]
MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "own": Own,
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
}


class Side:
    """An optimizer, its parameters, and which of its tensors a step counted up."""

    def __init__(self, make: Callable[[Any], Optimizer], lanes: int) -> None:
        drawn = torch.Generator().manual_seed(lanes)
        self.ps = [
            torch.nn.Parameter(torch.randn(4, 4, generator=drawn)) for _ in range(lanes)
        ]
        self.opt = make(self.ps)
        self.step: Callable[[], Any] = self.opt.step

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for k, p in enumerate(self.ps):
            assert p.grad is not None
            found |= {f"p{k}": p, f"g{k}": p.grad}
            for name, x in self.opt.state.get(p, {}).items():
                if isinstance(x, Tensor):
                    found[f"{name}{k}"] = x
        return found

    def written(self) -> set[str]:
        """Take a step; return the names of tensors that it counted up."""
        before = {k: (x, x._version) for k, x in self.tensors().items()}
        self.step()
        return {k for k, (x, version) in before.items() if x._version != version}


def compare(
    make: Callable[[Any], Optimizer],
    share: Callable[[Params], None],
    at: int,
    way: str,
    lanes: int,
) -> None:
    sides = [Side(make, lanes), Side(make, lanes)]
    sides[1].step = WAYS[way](sides[1].opt)
    for turn in range(5):
        for side in sides:
            if turn == at:
                share(side.ps)
            for k, p in enumerate(side.ps):
                drawn = torch.Generator().manual_seed(100 * turn + k)
                p.grad = torch.randn(p.shape, generator=drawn)
        want, got = (side.written() for side in sides)
        assert want <= got, f"step {turn} did not count {sorted(want - got)}"
        one, other = (side.tensors() for side in sides)
        for name, x in one.items():
            assert torch.equal(x, other[name]), f"step {turn}: {name}"


@pytest.mark.family(12)
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("share", SHARED, ids=lambda f: f.__name__)
def test_parameters_of_one_memory(
    share: Callable[[Params], None], name: str, at: int, way: str, lanes: int
) -> None:
    compare(MAKE[name], share, at, way, lanes)


@pytest.mark.family(6)
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("kind", GIVEN, ids=lambda c: c.__name__)
def test_memory_that_a_step_gives(kind: type[Own], way: str, lanes: int) -> None:
    compare(kind, lambda ps: None, 0, way, lanes)


@pytest.mark.parametrize("at", [0, 2])
def test_the_twin_of_a_written_parameter_is_in_the_compiled_step(at: int) -> None:
    """No fallback hides the comparison."""
    compare(Own, one_memory, at, "compile", 4)
    assert fuseopt.reports()[-1].fallback == ""


@pytest.mark.parametrize("forgotten", ["p3", "g1"])
def test_a_write_that_is_not_counted_is_found(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = Side.written

    def written(side: Side) -> set[str]:
        found = eager(side)
        return found if side.step == side.opt.step else found - {forgotten}

    monkeypatch.setattr(Side, "written", written)
    make = {"p3": Own, "g1": GivenGradient}[forgotten]
    with pytest.raises(AssertionError, match=f"did not count .*{forgotten}"):
        compare(make, one_memory, 0, "compile", 4)
