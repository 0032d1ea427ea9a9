"""Seconds of a step at ResNet-50's shapes, beside eager, torch's fused, and a copy.

The benchmark's own figure is the compiled step. The others take their turns between
its rounds; extra_info has their medians, and how many times the compiled step's time
each of them takes.
"""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import fuseopt
from bench.interleave import Seconds, medians, seconds_of
from bench.shapes import Shape, elements, make_params, model_shapes

ROUNDS = 25
WARM_UP = 3

HYPERPARAMETERS = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.01},
    "SGD": {"lr": 1e-3, "momentum": 0.9},
}
# Bytes a step must move for an element: AdamW reads the parameter, its gradient and
# two moments and writes three of them back; SGD has one buffer instead of the moments.
STEP_BYTES = {"AdamW": 28, "SGD": 20}
# A copy reads an element, reads the line it will write into, and writes it.
COPY_BYTES = 12


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_resnet50_step(
    benchmark: BenchmarkFixture, backend: str, optimizer: str
) -> None:
    shapes = model_shapes("resnet50")
    count = elements(make_params(shapes))
    compiled = torch.compile(
        make(optimizer, shapes, foreach=True).step, backend=backend
    )
    others = {
        "eager_foreach": make(optimizer, shapes, foreach=True).step,
        "torch_fused": make(optimizer, shapes, fused=True).step,
        "copy_of_the_same_bytes": Copy(count * STEP_BYTES[optimizer] // COPY_BYTES),
    }
    for call in (compiled, *others.values()):
        for _ in range(WARM_UP):
            call()

    seconds: Seconds = {name: [] for name in others}

    def others_take_their_turns() -> None:
        # in another order each round: nobody always runs after the same one
        names = list(others)
        start = len(seconds[names[0]]) % len(names)
        for name in names[start:] + names[:start]:
            seconds[name].append(seconds_of(others[name]))

    benchmark.group = f"{optimizer} step, ResNet-50, {len(shapes)} tensors"
    benchmark.pedantic(compiled, setup=others_take_their_turns, rounds=ROUNDS)

    benchmark.extra_info["backend"] = backend
    benchmark.extra_info["elements"] = count
    if backend == "fuseopt":
        # the last graph: SGD makes its momentum buffers in a first one of its own
        benchmark.extra_info["launches"] = fuseopt.reports()[-1].launches
    if benchmark.stats is None:  # --benchmark-disable: run, but nothing measured
        return
    own = benchmark.stats.stats.median
    benchmark.extra_info["bytes_per_second"] = count * STEP_BYTES[optimizer] / own
    for name, median in medians(seconds).items():
        benchmark.extra_info[f"{name}_seconds"] = median
        benchmark.extra_info[f"{name}_over_compiled"] = median / own


def make(name: str, shapes: list[Shape], **flags: bool) -> torch.optim.Optimizer:
    """Return an optimizer over parameters of its own, with their gradients."""
    kind = getattr(torch.optim, name)
    return kind(make_params(shapes), **HYPERPARAMETERS[name], **flags)


class Copy:
    """Copies so many float32 elements at each call: what memory can do at best."""

    def __init__(self, count: int) -> None:
        self._source = torch.ones(count)
        self._target = torch.zeros(count)

    def __call__(self) -> None:
        """Copy once."""
        self._target.copy_(self._source)
