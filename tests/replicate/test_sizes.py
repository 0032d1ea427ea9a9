"""Lanes of several sizes have one lead where a step is arithmetic on elements alone.

Every trap is a step whose lanes do the same but for something that follows from their
sizes; then lanes of each size have a lead of their own, and all bits are eager's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.replicate import worth
from tests.replicate.test_replicate import Loop, Pair, led, whole
from tests.steps import set_grads

#: in one dimension and in two, the leads' of sizes that steps below may mistake
SIZES = [(3,), (4, 4), (5,), (2, 7), (3,), (4, 4), (5,), (2, 7), (5, 5), (5, 5), (9,)]
SIZES += [(9,), (6, 3), (6, 3)]
EACH = len(set(SIZES))


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "FEW", 6)
    monkeypatch.setattr(worth, "SHARE", 0.6)
    # as for users: no check of graphs behind those that are tested here
    monkeypatch.setenv("FUSEOPT_CHECK", "0")


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_one_lead_for_several_sizes(name: str, foreach: bool) -> None:
    pair = Pair(name, SIZES, foreach=foreach)
    pair.step(3)
    led(2, len(SIZES))
    assert all(r.launches == 1 for r in fuseopt.reports())
    for opt in pair.both:
        opt.param_groups[0]["lr"] = 0.01
    pair.step(2)


def test_a_for_loop_of_several_sizes() -> None:
    pair = Pair(Loop, SIZES)
    pair.step(4)
    led(2, len(SIZES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_with_and_without_leftovers(dtype: torch.dtype) -> None:
    """How eager rounds what its vector loops leave over depends on sizes."""
    sizes = [(n,) for n in (3, 64, 65, 127, 200, 31, 33, 1000)]
    pair = Pair("AdamW", sizes)
    for params in (pair.mine, pair.theirs):
        for p in params:
            p.data = p.data.to(dtype)
            p.grad = None
    pair.step(3)
    led(2, len(sizes))


def test_one_element_is_no_size() -> None:
    """What has one element may be broadcast; it leads lanes of one element."""
    sizes = [(1,), (4,), (1,), (5,), (1, 1), (6,), (1, 1), (2, 2), (3, 2), (7,)]
    pair = Pair("SGD", sizes)
    pair.step(2)
    led(4, len(sizes))


@pytest.mark.slow
def test_gradients_of_other_strides_are_another_kind() -> None:
    pair = Pair("SGD", [(4, 4), (5, 5), (6, 6)] * 4)
    pair.step()
    led(2, 12)
    for _ in range(2):
        pair.grads()
        for params in (pair.theirs, pair.mine):
            for p in params[::3]:
                assert p.grad is not None
                p.grad = p.grad.t().contiguous().t()
        pair.plain.step()
        pair.opt.step()
        pair.check()
    assert fuseopt.reports()[-1].traced.startswith("2 of 12")


def test_a_lane_changes_its_size() -> None:
    pair = Pair("SGD", [(3,), (4,), (5,), (6,)] * 3, momentum=0.0)
    pair.step(2)
    for params in (pair.theirs, pair.mine):
        params[4].data, params[4].grad = torch.ones(8), None
    set_grads(pair.theirs, pair.mine, 9)
    for opt in pair.both:
        opt.step()
    pair.check()
    pair.step()


# ---------------------------------------------------------------- traps


class BySize(Loop):
    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return 1.0 / p.numel()


class ByRows(Loop):
    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        return 2.0 if p.shape[0] > 5 else 1.0


class Extra(Loop):
    """What `more` gives is taken from a parameter before each step."""

    def more(self, p: Tensor, g: Tensor) -> Tensor:
        raise NotImplementedError

    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        # no assert: pytest's own, with all that they see, are no plain code
        p.sub_(self.more(p, p.grad), alpha=0.1)  # type: ignore[arg-type]
        return 1.0


class Means(Extra):
    """The mean's divisor is no argument of the call."""

    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return g * g.mean()


class Norms(Extra):
    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return g / g.norm()


class RowMeans(Extra):
    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return g - g.mean(dim=-1, keepdim=True)


class Flat(Extra):
    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return (g.view(-1) * 2).view_as(p)


class Turned(Extra):
    """Of a square the transposed has the same sizes."""

    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return g.t().contiguous().t() * 2


class FirstOnes(Extra):
    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return g * g[0]


class Stacked(Extra):
    """Three numbers look like a parameter of three elements."""

    def more(self, p: Tensor, g: Tensor) -> Tensor:
        one = torch.tensor(0.5)
        return g * torch.stack([one, one * 2, one]).sum()


class Filled(Extra):
    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return g * torch.full(p.shape, 0.5)


class Counted(Extra):
    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return g * torch.arange(p.numel()).view(p.shape)


class Padded(Extra):
    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return torch.nn.functional.pad(g, (1, 0))[..., 1:] * 2


class Cumulated(Extra):
    def more(self, p: Tensor, g: Tensor) -> Tensor:
        return g.cumsum(0)


@pytest.mark.family(12)
@pytest.mark.parametrize(
    "kind",
    [
        *(BySize, ByRows, Means, Norms, RowMeans, Flat, Turned, FirstOnes, Stacked),
        *(Filled, Counted, Padded, Cumulated),
    ],
)
def test_steps_in_which_sizes_matter(kind: Any) -> None:
    pair = Pair(kind, SIZES)
    pair.step(3)
    if kind in (Stacked, Counted):
        whole("lanes share memory")
    else:
        led(EACH, len(SIZES))


class Kept(Loop):
    """State that no lane uses in the step that makes it."""

    def scale(self, i: int, p: Tensor, group: dict[str, Any]) -> float:
        state = self.state[p]
        if "zeros" not in state:
            state["zeros"] = torch.zeros_like(p)
            state["ones"] = torch.ones_like(p)
        return 1.0


def test_state_that_no_lane_uses_has_the_lanes_sizes() -> None:
    pair = Pair(Kept, SIZES)
    pair.step(3)
    for p in pair.mine:
        assert pair.opt.state[p]["zeros"].shape == p.shape
        assert pair.opt.state[p]["ones"].shape == p.shape


def test_a_step_led_in_vain_has_written_nothing() -> None:
    """Whoever tries a few leads first does not count the step twice."""
    pair = Pair(Means, SIZES)
    pair.step()
    assert {pair.opt.state[p]["t"] for p in pair.mine} == {1}
