"""Steps under a mode of torch's, as `torch.set_default_device` sets one for good.

A mode is called around each function, so that the last frame of a call is its own:
methods with a scale were once taken for other ones there, and rounded otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from tests.papers import ELEMENTWISE
from tests.steps import differences, make, make_params, set_grads

STRICT = {"fallback": "error"}
TORCHS = ["AdamW", "Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "SGD"]
PAPERS = {kind.__name__: (kind, given) for kind, given in ELEMENTWISE}


class Counting(TorchFunctionMode):
    """A user's mode that looks and changes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], Any]] = {
    "default device": default_device,
    "device": lambda: torch.device("cpu"),
    "base": BaseTorchFunctionMode,
    "a user's": Counting,
}


def pair(name: str, lanes: int, **given: Any) -> tuple[Any, Any, Any, Any]:
    mine, theirs = make_params([(3, 5)] * lanes), make_params([(3, 5)] * lanes)
    if name in PAPERS:
        kind, own = PAPERS[name]
        return mine, theirs, kind(mine, **own), kind(theirs, **own)
    return mine, theirs, make(name, mine, **given), make(name, theirs, **given)


def check(
    name: str,
    lanes: int,
    mode: Callable[[int], Any],
    steps: int = 4,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> None:
    """Bits of eager after so many steps, each under what `mode` gives for it."""
    mine, theirs, compiled, eager = pair(name, lanes, **given)
    step = torch.compile(compiled.step, backend="fuseopt", options=options)
    for seed in range(steps):
        set_grads(mine, theirs, seed)
        with mode(seed):
            step()
            eager.step()
    assert differences(mine, compiled, theirs, eager) == []


@pytest.mark.family(12)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lanes", [2, 20])
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "Adagrad"])
def test_bits_under_each_mode(name: str, lanes: int, mode: str) -> None:
    check(name, lanes, lambda seed: MODES[mode]())
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.family(15)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", TORCHS)
def test_bits_of_torch_optimizers(name: str, foreach: bool) -> None:
    check(name, 4, lambda seed: default_device(), foreach=foreach)


@pytest.mark.family(20)
@pytest.mark.parametrize("name", PAPERS)
def test_bits_of_papers(name: str) -> None:
    check(name, 4, lambda seed: default_device())


def test_a_mode_that_comes_and_goes() -> None:
    modes = contextlib.nullcontext(), torch.device("cpu")
    check("AdamW", 20, lambda seed: modes[seed % 2], 8)


@pytest.mark.parametrize("lanes", [2, 20])
def test_a_branch_is_compiled_under_a_mode(lanes: int) -> None:
    """A mode makes arguments of its own within each way; it changes nothing else."""
    check("RAdam", lanes, lambda seed: default_device(), 8, STRICT)
    assert fuseopt.reports()[-1].launches == 1


class Halving(TorchDispatchMode):
    """A user's mode that halves the result of each ATen call that writes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.endswith("_"):
            for t in args[0] if isinstance(args[0], list) else args[:1]:
                t.copy_(t / 2)
        return out


#: Ways to compile a step.
WAYS: dict[str, Callable[[Optimizer], Callable[[], Any]]] = {
    "compile": lambda opt: fuseopt.compile(opt, eager_if_faster=False).step,
    "backend": lambda opt: torch.compile(opt.step, backend="fuseopt"),
}


@pytest.mark.family(4)
@pytest.mark.parametrize("within", [(0, 1, 4), (2, 3)], ids=["first", "later"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("name", ["AdamW", "SGD", *list(PAPERS)[:1]])
def test_a_dispatch_mode_gets_the_calls_of_its_step(
    name: str, lanes: int, way: str, within: tuple[int, ...]
) -> None:
    """The mode changes what calls write. Other steps are compiled, whichever is first.

    Dynamo's choice at a first step within a mode would hold for good.
    """
    mine, theirs, compiled, eager = pair(name, lanes)
    step = WAYS[way](compiled)
    known = len(fuseopt.reports())
    for seed in range(6):
        set_grads(mine, theirs, seed)
        with Halving() if seed in within else contextlib.nullcontext():
            step()
        with Halving() if seed in within else contextlib.nullcontext():
            eager.step()
        assert differences(mine, compiled, theirs, eager) == []
    reports = fuseopt.reports()[known:]
    assert reports
    assert not any(report.fallback for report in reports)
