"""Each rule of vertical fusion: one legal pair, one illegal pair and its code."""

from __future__ import annotations

import pytest

from fuseopt.ir.graph import Buffer
from fuseopt.scheduler.legality import RULES, Pair, why_not


def buffer(shape: tuple[int, ...], name: str = "b") -> Buffer:
    return Buffer(name, "f32", shape, (1,) * len(shape), 0, 0, "static", 0, "cpu")


def pair(shape=(4,), producer=(4,), consumer=(4,), **more) -> Pair:
    devices = {"producer_device": "cpu", "consumer_device": "cpu"}
    return Pair(buffer(shape), producer, consumer, **{**devices, **more})


CASES = {
    "device": (
        pair(producer_device="cuda:0", consumer_device="cuda:0"),
        pair(producer_device="cpu", consumer_device="cuda:0"),
        "cpu and cuda:0",
    ),
    "overlap": (
        pair(exact=True),
        pair(exact=False),
        "b has overlapping views",
    ),
    "shared_scalar": (
        pair(shape=(), producer=(), consumer=(4,)),
        pair(shape=(), producer=(), consumer=(4,), shared=True),
        "b is one number, which many lanes read and the step changes",
    ),
    "index_space": (
        pair(producer=(4,), consumer=(4,)),
        pair(producer=(4,), consumer=(3, 4)),
        "[4] and [3, 4]",
    ),
    "broadcast": (
        pair(shape=(3, 4), producer=(3, 4), consumer=(3, 4)),
        pair(shape=(4,), producer=(3, 4), consumer=(3, 4)),
        "[4] read as [3, 4]",
    ),
}


def test_every_rule_has_a_case() -> None:
    assert [r.code for r in RULES] == list(CASES)
    assert all(r.why for r in RULES)


@pytest.mark.parametrize("code", CASES)
def test_legal(code: str) -> None:
    assert why_not(CASES[code][0]) is None


@pytest.mark.parametrize("code", CASES)
def test_illegal(code: str) -> None:
    _, illegal, detail = CASES[code]
    assert why_not(illegal) == (code, detail)


@pytest.mark.parametrize("code", CASES)
def test_no_earlier_rule_forbids_the_pair(code: str) -> None:
    illegal = CASES[code][1]
    assert next(r.code for r in RULES if r.check(illegal) is not None) == code


@pytest.mark.parametrize("kind", ["raw", "war", "waw"])
def test_the_rules_hold_for_every_kind_of_dependency(kind: str) -> None:
    assert why_not(pair(kind=kind)) is None
    assert why_not(pair(kind=kind, exact=False)) == (
        "overlap",
        "b has overlapping views",
    )


def test_a_number_of_one_lane_fuses_with_any_space() -> None:
    assert why_not(pair(shape=(), producer=(), consumer=(3, 4))) is None


def test_a_shape_of_one_element_is_no_number() -> None:
    assert why_not(pair(shape=(1,), producer=(1,), consumer=(4,))) == (
        "index_space",
        "[1] and [4]",
    )
