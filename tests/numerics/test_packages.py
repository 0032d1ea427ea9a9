"""Optimizers of packages that nobody here wrote: the bits of eager.

What a package changes is its own affair: the tables name classes and nothing else.
Where the step of a class is one graph of elementwise arithmetic, it is one launch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

import fuseopt
from tests.zoo import SHAPES, Pair, race

#: One launch, all bits.
ELEMENTWISE = {
    "pytorch_optimizer": (
        "ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaMax AdaMod "
        "AdaPNM AdamC AdamWSN Adan AggMo Ano BCOS DiffGrad DualAdam EXAdam EmoLynx "
        "EmoNavi FOCUS FTRL Fira GaLore Grams GrokFastAdamW Kate Lion MSVAG PAdam PID "
        "PNM QHM RAdam SGDW SRMM ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD "
        "SignSGD Tiger VSGD Yogi"
    ).split(),
    "torch_optimizer": (
        "AdaBelief AdaBound AdaMod AggMo DiffGrad PID QHAdam QHM SGDW Yogi"
    ).split(),
    "schedulefree": (
        "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference "
        "SGDScheduleFree SGDScheduleFreeReference"
    ).split(),
    "lion_pytorch": ["Lion"],
}
#: All bits, in whatever launches: reductions, products of matrices, decompositions.
MIXED = {"pytorch_optimizer": "A2Grad ApolloDQN Conda SCION SOAP SPlus".split()}
#: All bits, nothing but kernels, and at most so many launches.
REDUCTIONS = {
    "pytorch_optimizer": {
        **dict.fromkeys(["Amos", "MARS", "NovoGrad", "StableAdamW"], 2),
        **dict.fromkeys(
            ("AdaGC AdaNorm AdaTAM Aida EmoFact FAdam Fromage LARS Lamb TAM").split(),
            3,
        ),
        **dict.fromkeys(["Adai", "AdamS", "RACS"], 4),
        "AdaFactor": 5,
        "SM3": 6,
        "CAME": 8,
    },
    "torch_optimizer": {"Adafactor": 5},
}
#: What the rest of `make test` has time for.
QUICK = {
    "pytorch_optimizer": set(
        "AdaBelief EmoNavi FTRL LARS Lamb ScheduleFreeSGD".split()
    ),
    "torch_optimizer": {"AggMo", "QHAdam"},
    "schedulefree": {"AdamWScheduleFree"},
    "lion_pytorch": {"Lion"},
}


def cases(table: Mapping[str, Iterable[str]]) -> list[Any]:
    return [
        pytest.param(
            package,
            name,
            id=f"{package}-{name}",
            marks=() if name in QUICK.get(package, ()) else (pytest.mark.slow,),
        )
        for package, names in table.items()
        for name in names
    ]


def pair_of(package: str, name: str, **options: Any) -> Pair:
    kind = getattr(importlib.import_module(package), name)
    known = inspect.signature(kind).parameters
    given: dict[str, Any] = {}
    lr = known["lr"].default if "lr" in known else None
    if lr is inspect.Parameter.empty:
        lr = given["lr"] = 0.01
    second = {"lr": 2 * lr} if isinstance(lr, float) else {}
    make = functools.partial(kind, **given)
    shapes = tuple(s for s in SHAPES if accepts(make, s))
    return Pair(make, second, shapes, **options)


def accepts(make: Any, shape: tuple[int, ...]) -> bool:
    """Does an optimizer take parameters of this shape, in eager?"""
    pair = Pair(make, shapes=(shape,))
    try:
        pair.step_eager()
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


@pytest.mark.family(60)
@pytest.mark.parametrize(("package", "name"), cases(ELEMENTWISE))
def test_elementwise_optimizers_are_one_launch(package: str, name: str) -> None:
    race(pair_of(package, name, fallback="error"))
    for report in fuseopt.reports():
        assert report.launches == 1
        assert report.externs == []


@pytest.mark.family(20)
@pytest.mark.parametrize(("package", "name"), cases(REDUCTIONS))
def test_optimizers_with_reductions(package: str, name: str) -> None:
    race(pair_of(package, name, fallback="error"))
    for report in fuseopt.reports():
        assert report.launches <= REDUCTIONS[package][name]
        assert report.externs == []


@pytest.mark.parametrize(("package", "name"), cases(MIXED))
def test_other_optimizers(package: str, name: str) -> None:
    race(pair_of(package, name, fallback="error"))
    assert any(report.launches for report in fuseopt.reports())
