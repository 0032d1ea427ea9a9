"""What users change between the steps of a run, in every kind of format.

After each change the bits are those of unpack, step, pack.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt import Storage
from fuseopt.compiler.session import COMPILED
from fuseopt.storage.formats import FORMATS
from tests.storage.reference import (
    Params,
    Reference,
    assert_same,
    give_grads,
    params_of,
    same_bits,
)

#: One of each kind: a cast, a count of draws, two parts, codes with scales and without.
KINDS = ("bf16", "bf16-stochastic", "split", "8bit/64", "fp8-e4m3", "fp8-e5m2/128")
slow = pytest.mark.slow
FEW = [x if x == "8bit/64" else pytest.param(x, marks=slow) for x in KINDS]


def stored(optimizer: Any, name: str) -> Any:
    return fuseopt.compile(optimizer, storage=Storage(name, least=0))


def momentum(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Run:
    """The meaning of packed state in eager, and a compiled run."""

    def __init__(
        self, name: str, make: Callable[[Any], Any] = torch.optim.AdamW, n: int = 9
    ) -> None:
        self.name, self.number = name, 0
        self.lists = params_of(n), params_of(n)
        self.reference = Reference(make([*self.lists[0]]), name)
        self.mine = stored(make([*self.lists[1]]), name)
        self.step(3)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.reference.optimizer, self.mine

    def step(self, times: int = 1, missing: int = 0) -> None:
        for _ in range(times):
            give_grads(self.number, *self.lists, missing=missing)
            self.number += 1
            self.reference.step()
            self.mine.step()
            self.check()

    def check(self) -> None:
        assert_same(self.reference, *self.lists, self.mine)
        # the state of no parameter is left that the plain run has not
        assert len(self.mine.state) == len(self.reference.optimizer.state)

    def forget(self, number: int) -> None:
        """Delete the state of a parameter in both."""
        for of, params in zip(self.both, self.lists, strict=True):
            of.state.pop(params[number], None)
        gone = self.lists[0][number]
        for key in [key for key in self.reference.packed if key[0] is gone]:
            del self.reference.packed[key]


# ---------------------------------------------------------------- events


@pytest.mark.parametrize("name", FEW)
def test_parameters_come_and_go(name: str) -> None:
    run = Run(name)
    more = params_of(3, seed=1), params_of(3, seed=1)
    for of, params, new in zip(run.both, run.lists, more, strict=True):
        of.param_groups[0]["params"] += new[:1]
        of.add_param_group({"params": new[1:], "lr": 0.5})
        params += new
    run.step(2)
    for at in (10, 4):  # of the second group and of the first, with their state
        run.forget(at)
        for of, params in zip(run.both, run.lists, strict=True):
            gone = params.pop(at)
            for group in of.param_groups:
                group["params"] = [p for p in group["params"] if p is not gone]
        run.step(2)


def test_a_parameter_leaves_and_its_state_stays() -> None:
    run = Run("8bit/64")
    for of in run.both:
        of.param_groups[0]["params"].pop(2)
    with pytest.warns(RuntimeWarning, match="state of something besides"):
        run.step(2)
    run.forget(2)
    for params in run.lists:
        params.pop(2)
    run.step(2)
    assert getattr(run.mine.step, COMPILED).packed_step.leader.refusal == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_groups_are_changed(name: str) -> None:
    run = Run(name, n=8)
    for of in run.both:
        of.param_groups[0].update(lr=0.3, weight_decay=0.2)
    run.step(2)
    for of, params in zip(run.both, run.lists, strict=True):
        of.param_groups[0]["params"] = params[::2]
        of.add_param_group({"params": params[1::2], "maximize": True})
    run.step(2)
    for of in run.both:  # the order of both groups, and a parameter's group
        of.param_groups.reverse()
        of.param_groups[0]["params"].append(of.param_groups[1]["params"].pop(0))
        of.param_groups[0]["betas"] = 0.7, 0.9
    run.step(2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_all_gradients_are_missing_once(name: str) -> None:
    run = Run(name)
    for of in run.both:
        of.zero_grad()
    run.reference.step()
    run.mine.step()
    run.check()
    run.step(6, missing=2)


def test_a_gradient_is_missing_from_the_first_step_on() -> None:
    run = Run("8bit/64", momentum)
    other = Run.__new__(Run)
    other.number, other.name = 0, "8bit/64"
    other.lists = params_of(9), params_of(9)
    other.reference = Reference(momentum([*other.lists[0]]), "8bit/64")
    other.mine = stored(momentum([*other.lists[1]]), "8bit/64")
    other.step(8, missing=3)
    run.step(1)


@pytest.mark.parametrize("name", FEW)
def test_state_is_cleared(name: str) -> None:
    run = Run(name)
    for k in range(9):
        run.forget(k)
    run.step(2)


@pytest.mark.parametrize("name", FEW)
def test_a_step_in_eager_between_others(name: str) -> None:
    run = Run(name)
    with torch.compiler.set_stance("force_eager"):
        run.step(2, missing=2)
    run.step(2)


@pytest.mark.parametrize("name", FEW)
def test_what_is_not_finite(name: str) -> None:
    """The step has the bits of eager: NaNs stay in their elements or blocks."""
    run = Run(name)
    for value in (torch.inf, -torch.inf, torch.nan):
        give_grads(run.number, *run.lists)
        run.number += 1
        for params in run.lists:
            grad = params[0].grad
            assert grad is not None
            grad[0, 0] = value
        run.reference.step()
        run.mine.step()
        for p, q in zip(*run.lists, strict=True):
            assert torch.equal(p.isnan(), q.isnan())
            assert torch.equal(p.nan_to_num(), q.nan_to_num())
    assert all(q.isfinite().all() for q in run.lists[1][1:])


# ---------------------------------------------------------------- formats in turns

WIDE = "fp32"


def check_packed(
    value: torch.Tensor, name: str, like: dict[str, Any], key: str, number: int
) -> None:
    """Is a tensor of a state what a format makes of a value?"""
    if name == WIDE:
        assert same_bits(like[key], value)
        return
    parts = FORMATS[name].empty(value, number)
    FORMATS[name].pack(value, parts)
    for part, t in parts.items():
        found = like[f"{key}@{name}" + (f".{part}" if part else "")]
        assert same_bits(found, t)


def wide_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = fuseopt.full_precision({"state": {0: state}})["state"][0]
    return {k: v for k, v in found.items() if k != "step"}


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    """A state dict of each format, and of the plain optimizer. The first step of packed
    state runs in eager, so that this compiles nothing.
    """
    found: dict[str, Any] = {}
    for name in (*KINDS, WIDE):
        params = params_of(5)
        make = torch.optim.AdamW(params)
        optimizer = make if name == WIDE else stored(make, name)
        give_grads(0, params)
        optimizer.step()
        found[name] = optimizer.state_dict()
    return found


@pytest.mark.family(3)
@pytest.mark.parametrize("target", [*KINDS, WIDE])
@pytest.mark.parametrize("source", [*KINDS, WIDE])
def test_each_format_is_loaded_into_each(source: str, target: str, saved: Any) -> None:
    """Also by an optimizer that fuseopt compiles without storage."""
    state_dict = copy.deepcopy(saved[source])
    params = params_of(5)
    make = torch.optim.AdamW(params)
    optimizer = fuseopt.compile(make) if target == WIDE else stored(make, target)
    optimizer.load_state_dict(state_dict)
    for p in params:
        p.grad = None
    optimizer.step()  # without gradients: state is packed, and nothing else
    number = 0
    for i, p in enumerate(params):
        state, theirs = optimizer.state[p], saved[source]["state"][i]
        if source == target:
            assert [*state] == [*theirs]
            assert all(same_bits(state[k], v) for k, v in theirs.items())
            continue
        for key, value in wide_of(theirs).items():
            check_packed(value, target, state, key, number)
            number += 1


def test_a_state_dict_of_another_format_is_left_as_it_is(saved: Any) -> None:
    """Nothing writes to it later. One of the same format is shared, as torch does."""
    before = copy.deepcopy(saved["8bit/64"])
    params = params_of(5)
    optimizer = stored(torch.optim.AdamW(params), "fp8-e4m3")
    optimizer.load_state_dict(saved["8bit/64"])
    give_grads(0, params)
    optimizer.step()
    for i, state in before["state"].items():
        for key in (x for x in state if "@" in x):
            assert same_bits(saved["8bit/64"]["state"][i][key], state[key])


def test_storage_is_switched_in_a_run() -> None:
    """On, to another one, off, and on again; a step of each."""
    theirs, ours = params_of(9), params_of(9)
    plain = torch.optim.AdamW(theirs)
    mine = fuseopt.compile(torch.optim.AdamW(ours))
    number = 0
    for name in (WIDE, "8bit/64", "fp8-e4m3", WIDE, "split"):
        reference = plain if name == WIDE else Reference(plain, name)
        mine = fuseopt.compile(mine) if name == WIDE else stored(mine, name)
        for _ in range(2):
            give_grads(number, theirs, ours)
            number += 1
            reference.step()
            mine.step()
            if isinstance(reference, Reference):
                assert_same(reference, theirs, ours, mine)
            else:
                assert all(map(same_bits, theirs, ours))
        if isinstance(reference, Reference):
            for (p, key), parts in reference.packed.items():
                plain.state[p][key] = FORMATS[name].unpack(parts)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("make", [momentum, torch.optim.AdamW])
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_a_copy_is_a_plain_optimizer(name: str, make: Any, copied: Any) -> None:
    """It has its state in float32, which fuseopt packs again."""
    run = Run(name, make)
    wide = [wide_of(run.mine.state[p]) for p in run.lists[1]]
    twins = [copied(run.mine) for _ in range(2)]
    assert twins[0].step.__func__ is type(run.mine).step
    params = [twin.param_groups[0]["params"] for twin in twins]
    for p, want in zip(params[0], wide, strict=True):
        have = {k: v for k, v in twins[0].state[p].items() if k != "step"}
        assert [*have] == [*want]
        assert all(same_bits(have[k], v) for k, v in want.items())
    give_grads(run.number, *params)
    plain = make([torch.nn.Parameter(p.detach().clone()) for p in params[0]])
    theirs = plain.param_groups[0]["params"]
    for p, q in zip(theirs, params[0], strict=True):
        p.grad = q.grad
        plain.state[p] = copy.deepcopy(twins[0].state[q])
    plain.step()
    twins[0].step()
    assert all(map(same_bits, theirs, params[0]))
    # a block of 8 bits may get another scale, and draws begin anew
    if name not in ("8bit/64", "bf16-stochastic"):
        again = stored(twins[1], name)
        again.step()
        run.step()
        assert all(map(same_bits, run.lists[1], params[1]))


def test_a_copy_is_plain_once_storage_is_off() -> None:
    run = Run("8bit/64")
    mine = fuseopt.compile(run.mine)
    assert "__getstate__" not in vars(mine)
    twin = copy.deepcopy(mine)
    assert [*twin.state[twin.param_groups[0]["params"][0]]][1:] == [
        "exp_avg",
        "exp_avg_sq",
    ]


def test_nothing_holds_an_optimizer_with_packed_state() -> None:
    params: Params = params_of(6)
    optimizer = stored(torch.optim.AdamW(params), "8bit/64")
    for step in range(3):
        give_grads(step, params)
        optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
