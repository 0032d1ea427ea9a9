"""An error at any place of a step on a device leaves it whole: not begun, or done."""

from __future__ import annotations

import contextlib
import functools
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.errors import LaunchError
from tests.caller_states import alike
from tests.papers import LAMB, Lion
from tests.runtime.test_undo import AtFunction, Injected, raised_at_each
from tests.simulated.twins import SHAPES, SINGLE, Clipped, ExactRoots
from tests.steps import eager_step

pytest.importorskip("triton")
pytestmark = [pytest.mark.mishaps, pytest.mark.filterwarnings("ignore")]

KINDS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    # counters on the CPU, and numbers made of them that kernels of the device read
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "capturable": partial(torch.optim.AdamW, lr=0.01, foreach=True, capturable=True),
    "Lion": partial(Lion, lr=0.1),
    # two launches, with memory between
    "Clipped": Clipped,
    "LAMB": partial(LAMB, lr=0.1),
}


class Side:
    """An optimizer on the simulated device, or in eager on the CPU."""

    def __init__(
        self, kind: str, device: str, lanes: int, cudagraphs: bool, tail: bool = False
    ) -> None:
        # norms of these are the same in whatever order they are added
        single = tail or kind in ("Clipped", "LAMB")
        shapes = (SINGLE if single else SHAPES) * lanes
        self.drawn = torch.Generator().manual_seed(2)
        self.device = device
        #: of "sim", "sim:1" in turn where there are several
        self.devices = ["sim", "sim:1"] if device == "both" else [device]
        self.params: list[Any] = [
            torch.nn.Parameter(self._draw(shape, n))
            for n, shape in enumerate(shapes[:lanes])
        ]
        self.opt = KINDS[kind](self.params)
        self.run: Any = self.opt.step
        options = {"cudagraphs": cudagraphs, "eager_if_faster": False}
        if device == "cpu":
            self.run = (
                self._clipped if tail else functools.partial(eager_step, self.opt)
            )
        elif tail:
            clip: Any = {"clip_grad_norm": 1.0, "zero_grad": False}
            self.run = fuseopt.tail(self.opt, **clip, **options)
        else:
            fuseopt.compile(self.opt, **options)
            self.run = self.opt.step

    def _clipped(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        eager_step(self.opt)

    def _draw(self, shape: Any, n: int) -> torch.Tensor:
        device = self.devices[n % len(self.devices)]
        return torch.randn(shape, generator=self.drawn).to(device)

    def set_grads(self) -> None:
        for n, p in enumerate(self.params):
            p.grad = self._draw(p.shape, n)

    def step(self) -> None:
        if self.device == "cpu":
            with ExactRoots():
                self.run()
        else:
            self.run()

    def held(self) -> list[Any]:
        """Copies of the parameters and of their state, on the CPU."""
        state = (x for p in self.params for x in self.opt.state.get(p, {}).values())
        every = (*self.params, *state)
        return [
            x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x
            for x in every
        ]


def both(
    kind: str, lanes: int, cudagraphs: bool, tail: bool = False, on: str = "sim"
) -> tuple[Side, Side]:
    """On the device, and beside it."""
    own = Side(kind, on, lanes, cudagraphs, tail)
    return own, Side(kind, "cpu", lanes, False, tail)


@pytest.mark.parametrize(
    ("kind", "lanes", "cudagraphs", "every"),
    [
        ("SGD", 4, True, 12),
        ("Clipped", 4, True, 24),
        ("AdamW", 4, True, 12),
        ("AdamW", 4, False, 12),
        pytest.param("AdamW", 18, True, 1, marks=pytest.mark.slow),
        pytest.param("AdamW", 18, False, 1, marks=pytest.mark.slow),
        pytest.param("SGD", 18, True, 2, marks=pytest.mark.slow),
        pytest.param("SGD", 18, False, 2, marks=pytest.mark.slow),
        pytest.param("capturable", 18, True, 2, marks=pytest.mark.slow),
        pytest.param("Lion", 4, False, 2, marks=pytest.mark.slow),
        pytest.param("Clipped", 4, True, 1, marks=pytest.mark.slow),
        pytest.param("Clipped", 4, False, 2, marks=pytest.mark.slow),
        pytest.param("LAMB", 4, True, 2, marks=pytest.mark.slow),
    ],
)
def test_errors_of_python_calls(
    sim: ModuleType, kind: str, lanes: int, cudagraphs: bool, every: int
) -> None:
    """At every function of fuseopt's that a steady step enters."""
    assert raised_at_each(*both(kind, lanes, cudagraphs), AtFunction, every) > 30
    assert (sim.counters().replays > 0) == cudagraphs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("cudagraphs", [True, False])
def test_errors_of_a_tail(sim: ModuleType, kind: str, cudagraphs: bool) -> None:
    """A clip and the step, as one graph, or launch by launch."""
    twins = both(kind, 4, cudagraphs, tail=True)
    assert raised_at_each(*twins, AtFunction, 3) > 30


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "Clipped"])
def test_errors_of_first_steps(sim: ModuleType, kind: str, turn: int) -> None:
    """The step that is compiled, the one that is captured, and the first replay."""
    place, done = 1, False
    while not done:
        fused, twin = both(kind, 4, True)
        for k in range(4):
            fused.set_grads()
            twin.set_grads()
            before = fused.held()
            if k == turn:
                with AtFunction(place) as at, contextlib.suppress(Injected):
                    fused.step()
                done = at.count < place
                if not done and alike(fused.held(), before):
                    fused.step()
            else:
                fused.step()
            twin.step()
            assert alike(fused.held(), twin.held()), at.where
        place += max(29, place // 4)


@pytest.mark.parametrize("place", [1, 2])
def test_errors_of_launches(sim: ModuleType, place: int) -> None:
    """Two launches, of which the last one writes the parameters."""
    fused, twin = both("Clipped", 4, False)
    for turn in range(5):
        fused.set_grads()
        twin.set_grads()
        if turn == 3:
            before = fused.held()
            sim.fail_launch(place)
            with pytest.raises(LaunchError):
                fused.step()
            sim.fail_launch(0)
            assert alike(fused.held(), before)
        fused.step()
        twin.step()
        assert alike(fused.held(), twin.held())


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_errors_of_replays(
    sim: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    error: type[Exception],
) -> None:
    """A graph that is refused, and the handler of a signal that raises just before."""
    kept, failing = sim.Graph.replay, []

    def replay(graph: Any) -> None:
        if failing:
            raise failing.pop()
        kept(graph)

    monkeypatch.setattr(sim.Graph, "replay", replay)
    fused, twin = both(kind, 4, True)
    for turn in range(6):
        fused.set_grads()
        twin.set_grads()
        if turn == 4:
            before = fused.held()
            failing.append(error("no"))
            with pytest.raises(LaunchError if error is RuntimeError else error):
                fused.step()
            assert not failing
            assert alike(fused.held(), before)
        fused.step()
        twin.step()
        assert alike(fused.held(), twin.held())


@pytest.mark.family(3)
@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "capturable"])
def test_errors_between_the_graphs_of_two_devices(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, refused: int
) -> None:
    """The graph of one device has begun when that of the other is refused."""
    kept, left = sim.Graph.replay, [-1]

    def replay(graph: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("no")
        kept(graph)

    monkeypatch.setattr(sim.Graph, "replay", replay)
    fused, twin = both(kind, 6, True, on="both")
    for turn in range(6):
        fused.set_grads()
        twin.set_grads()
        if turn == 4:
            before = fused.held()
            left[0] = refused
            with pytest.raises(LaunchError):
                fused.step()
            assert left[0] == -1
            assert alike(fused.held(), before)
        fused.step()
        twin.step()
        assert alike(fused.held(), twin.held())
    assert sim.counters().replays >= 6
