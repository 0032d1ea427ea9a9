"""Steps with the kernels of a GPU: eager's bits, captured and replayed, and no fault.

Each goes through a course of steps: gradients move, stay, lie at odd addresses, are not
there; the rate changes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import Optimizer

import fuseopt
from fuseopt.codegen.triton import variant
from tests.papers import ELEMENTWISE, REDUCING
from tests.simulated.twins import SINGLE, Clipped

from .kernels import Log
from .twins import COURSE, MANY, SHAPES, PtxTwins, beside_the_interpreter

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
Make = Callable[[list[Any]], Optimizer]


def check(log: Log, make: Make, seed: int, launches: int = 1, **options: Any) -> None:
    """Run a course. `launches`: of one step, on the device."""
    log.seed = seed
    course = options.pop("course", COURSE)
    twins = PtxTwins(make, **options)
    assert not twins.run(course)
    assert not log.faults
    # `moved` and `stay` are a call without a graph, then the capture and its replay
    sim: Any = torch.get_device_module("sim")
    counted = sim.counters()
    assert counted.captures >= 1
    assert counted.replays >= 1
    assert len(log.launches) == launches * len(course)


def adamw(params: list[Any]) -> Optimizer:
    return optim.AdamW(params, foreach=True)


def test_adamw_in_float32(ptx: Log) -> None:
    check(ptx, adamw, seed=0)


def test_adamw_in_float16_in_any_order(ptx: Log) -> None:
    check(ptx, adamw, seed=7, dtype=F16, course=COURSE[:4])


def test_adamw_in_bfloat16(ptx: Log) -> None:
    """Its roots are estimates, and pairs of numbers are widened together."""
    ptx.seed = 5
    assert not beside_the_interpreter(ptx, adamw, COURSE[:4], dtype=BF16)
    assert not ptx.faults
    assert ptx.launches


def test_two_launches_in_any_order(ptx: Log) -> None:
    course = ("moved", "stay", "odd", "moved")
    check(ptx, Clipped, seed=3, launches=2, whole=True, course=course)


#: torch's that take lists of tensors, with the options that have other kernels.
TORCH: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (optim.Adam, {"amsgrad": True}),
    "AdamW": (optim.AdamW, {}),
    "NAdam": (optim.NAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (optim.Rprop, {}),
    "capturable-Adam": (optim.Adam, {"capturable": True}),
    "capturable-AdamW": (optim.AdamW, {"capturable": True, "lr": torch.tensor(0.01)}),
    "capturable-NAdam": (optim.NAdam, {"capturable": True}),
    "capturable-RAdam": (optim.RAdam, {"capturable": True}),
    "capturable-RMSprop": (optim.RMSprop, {"capturable": True}),
    "capturable-Adamax": (optim.Adamax, {"capturable": True}),
    "capturable-Adadelta": (optim.Adadelta, {"capturable": True}),
    "capturable-Rprop": (optim.Rprop, {"capturable": True}),
}


#: MANY's lanes are few enough that a step without a gradient is traced whole.
LED = MANY * 2


def test_counters_of_led_lanes_in_any_order(ptx: Log) -> None:
    """A lane that takes no part has counters too."""
    course = ("moved", "missing", "missing")
    check(ptx, maker("capturable-NAdam"), seed=1, shapes=LED, course=course)


#: Without those whose powers are of float64: the machine has no calls. Nor RAdam's
#: halves: Triton's interpreter, which is their reference, refuses an `&` of theirs.
OTHERS = [
    (name, dtype)
    for name in TORCH
    for dtype in (BF16, F16, F64)
    if not (name.startswith("capturable") and (dtype == F64 or "RAdam" in name))
]


def maker(name: str) -> Make:
    kind, options = TORCH[name]
    # a rate that is a tensor belongs to one optimizer
    return lambda params: kind(params, foreach=True, **copy.deepcopy(options))


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH)
def test_torchs_optimizers(ptx: Log, name: str) -> None:
    check(ptx, maker(name), seed=len(name), shapes=MANY)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", TORCH)
def test_led_lanes_of_torchs_optimizers(ptx: Log, name: str, seed: int) -> None:
    check(ptx, maker(name), seed=seed, shapes=LED)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), OTHERS)
def test_torchs_optimizers_in_other_dtypes(
    ptx: Log, name: str, dtype: torch.dtype
) -> None:
    ptx.seed = 1
    assert not beside_the_interpreter(ptx, maker(name), dtype=dtype)
    assert not ptx.faults
    assert len(ptx.launches) >= len(COURSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [x for x, _ in ELEMENTWISE], ids=lambda x: x.__name__)
def test_optimizers_of_papers(ptx: Log, kind: type[Optimizer]) -> None:
    ptx.seed = 2
    assert not beside_the_interpreter(ptx, kind)
    assert not ptx.faults
    assert ptx.launches


REDUCE: list[type[Optimizer]] = [*(x for x, _ in REDUCING), optim.Adafactor]


@pytest.mark.slow
@pytest.mark.parametrize("kind", REDUCE, ids=lambda x: x.__name__)
def test_reductions(ptx: Log, kind: type[Optimizer]) -> None:
    """Of one number each, exact; of many, in another order than the interpreter's."""
    ptx.seed = 4
    assert not beside_the_interpreter(ptx, kind, shapes=SINGLE)
    assert not ptx.faults
    assert ptx.launches
    torch._dynamo.reset()
    twins = PtxTwins(kind)
    twins.run()
    assert not ptx.faults
    for p, q in zip(twins.eager_params, twins.params, strict=True):
        assert torch.allclose(p, q.cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("few", [0, variant.FEW], ids=["64 bits", "32 bits"])
def test_lanes_with_geometry(ptx: Log, monkeypatch: Any, few: int) -> None:
    """Indices are divided in 32 bits, or in 64 where a lane has 2**31 elements."""
    monkeypatch.setattr(variant, "FEW", few)
    twins = PtxTwins(Clipped, MANY, whole=True)
    assert not twins.run(("moved", "strided", "strided"))
    assert not ptx.faults


@pytest.mark.parametrize("capturable", [False, True])
def test_a_captured_step_with_live_numbers(ptx: Log, capturable: bool) -> None:
    """In a graph of the user's; rates and counters come with a refresh."""
    kind = functools.partial(optim.AdamW, foreach=True, capturable=capturable)
    twins = PtxTwins(kind, SHAPES)
    sim: Any = torch.get_device_module("sim")
    twins.run(("moved", "stay", "rate"))
    fuseopt.refresh(twins.optimizer)
    graph = sim.CUDAGraph()
    with sim.graph(graph):
        twins.optimizer.step()
    for event in ("stay", "rate", "rate"):
        twins.set_grads(stay=True)
        if event == "rate":
            for optimizer in (twins.eager, twins.optimizer):
                optimizer.param_groups[0]["lr"] *= 0.5
        twins.step_eager()
        fuseopt.refresh(twins.optimizer)
        graph.replay()
        sim.synchronize()
        assert twins.differences() == []
    assert not ptx.faults
