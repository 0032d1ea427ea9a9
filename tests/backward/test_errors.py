"""An error at any place of a backward that steps leaves each bucket whole.

Its parameters and their state are as before the step or as after it, and the next
backward steps what is there.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

import fuseopt
from tests.papers import Lion
from tests.runtime.test_undo import AtFunction, Injected
from tests.tails.twins import same

WIDTH, LAYERS = 5, 4
KINDS: dict[str, Any] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Lion": functools.partial(Lion, lr=0.01),
}
pytestmark = [pytest.mark.mishaps, pytest.mark.filterwarnings("ignore")]


class Loop:
    """A model that is stepped in its backward (`fused`), or after it."""

    def __init__(self, fused: bool, buckets: str, kind: str) -> None:
        self.kind = kind
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.net = torch.nn.Sequential(*layers)
        self.layers = layers
        self.fused = fused
        if fused:
            self.opt: Any = fuseopt.in_backward(self.net, self.make, buckets=buckets)
        else:
            self.opt = self.make(self.net.parameters())

    def make(self, params: Any) -> Any:
        return KINDS[self.kind](params)

    def backward(self, turn: int) -> None:
        drawn = torch.Generator().manual_seed(turn)
        self.net(torch.randn(3, WIDTH, generator=drawn)).square().mean().backward()
        if not self.fused:
            self.opt.step()
        self.no_gradients()

    def no_gradients(self) -> None:
        for p in self.net.parameters():
            p.grad = None

    def of(self, layer: torch.nn.Module) -> list[torch.Tensor]:
        """The tensors of a layer and of its state."""
        params = [*layer.parameters()]
        state = (x for p in params for x in self.opt.state[p].values())
        return [*params, *state]

    def held(self) -> list[list[torch.Tensor]]:
        return [[x.detach().clone() for x in self.of(layer)] for layer in self.layers]

    @torch.no_grad()
    def put(self, held: list[list[torch.Tensor]]) -> None:
        for layer, values in zip(self.layers, held, strict=True):
            for x, value in zip(self.of(layer), values, strict=True):
                x.copy_(value)


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(same, one, other))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("buckets", "kind", "every"),
    [
        ("layer", "AdamW", 24),
        pytest.param("layer", "AdamW", 3, marks=pytest.mark.slow),
        pytest.param("layer", "SGD", 5, marks=pytest.mark.slow),
        pytest.param("layer", "Lion", 5, marks=pytest.mark.slow),
    ],
)
def test_each_bucket_is_whole(buckets: str, kind: str, every: int) -> None:
    fused, twin = Loop(True, buckets, kind), Loop(False, buckets, kind)
    turn = 0
    for _ in range(4):
        turn += 1
        fused.backward(turn)
        twin.backward(turn)
    place, done, ends = 1, False, set()
    while not done:
        turn += 1
        before = fused.held()
        with AtFunction(place) as injected, contextlib.suppress(Injected):
            fused.backward(turn)
        done = injected.count < place
        twin.backward(turn)
        fused.no_gradients()
        after = twin.held()
        for now, old, new in zip(fused.held(), before, after, strict=True):
            ends.add(alike(now, new))
            assert alike(now, new) or alike(now, old), injected.where
        # the next one steps what each bucket has
        twin.put(fused.held())
        turn += 1
        fused.backward(turn)
        twin.backward(turn)
        for now, new in zip(fused.held(), twin.held(), strict=True):
            assert alike(now, new), injected.where
        place += every
    assert ends == {False, True}
    assert place > 100
