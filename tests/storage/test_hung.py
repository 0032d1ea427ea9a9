"""What users hang beside packed state is kept, and nothing of it is packed."""

from __future__ import annotations

import collections
import copy
import warnings
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.errors import UnsupportedInput
from tests import hung
from tests.storage.reference import (
    Reference,
    assert_same,
    give_grads,
    params_of,
    same_bits,
)

STORAGES = ("split", "8bit/64")


class Pair:
    """AdamW with packed state, compiled and by the reference."""

    def __init__(self, storage: str, n: int) -> None:
        self.theirs, self.mine = params_of(n), params_of(n)
        self.eager = torch.optim.AdamW(self.theirs, lr=1e-2)
        self.compiled = torch.optim.AdamW(self.mine, lr=1e-2)
        self.reference = Reference(self.eager, storage)
        fuseopt.compile(self.compiled, storage=fuseopt.Storage(storage, least=0))
        self.number = 0

    def step(self, times: int = 2) -> None:
        for _ in range(times):
            self.number += 1
            give_grads(self.number, self.theirs, self.mine)
            self.reference.step()
            self.compiled.step()
            for i, (p, q) in enumerate(zip(self.theirs, self.mine, strict=True)):
                assert same_bits(p, q), f"parameter {i} after {self.number} steps"

    def same(self) -> None:
        assert_same(self.reference, self.theirs, self.mine, self.compiled)


@pytest.mark.family(180)
@pytest.mark.parametrize("n", [3, 18])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("value", hung.VALUES)
def test_a_value_beside_the_states_of_parameters(
    value: str, storage: str, n: int
) -> None:
    """Any object under a key that is no parameter, before, after and removed again."""
    pair = Pair(storage, n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step may run in eager
        pair.step()
        kept: list[Any] = []
        for optimizer in (pair.eager, pair.compiled):
            kept.append(hung.VALUES[value](optimizer))
            optimizer.state["hung"] = kept[-1]
        pair.step()
        assert pair.compiled.state["hung"] is kept[-1]
        for optimizer in (pair.eager, pair.compiled):
            del optimizer.state["hung"]
        pair.step()
        pair.same()


@pytest.mark.family(3)
@pytest.mark.parametrize("n", [3, 18])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.defaultdict])
def test_a_state_of_another_type_of_python(kind: Any, storage: str, n: int) -> None:
    """The state stays of this type, with its keys in order, also in a copy."""
    pair = Pair(storage, n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair.step()
        for optimizer, params in (
            (pair.eager, pair.theirs),
            (pair.compiled, pair.mine),
        ):
            state = optimizer.state[params[1]]
            new = kind() if kind is collections.OrderedDict else kind(list)
            new.update(state)
            optimizer.state[params[1]] = new
        pair.step(3)
        pair.same()
        mine = pair.compiled.state[pair.mine[1]]
        assert type(mine) is kind
        assert [*mine] == [*dict(mine)] == [*mine.keys()]
        copied = copy.deepcopy(pair.compiled)
        state = [*copied.state.values()][1]
        assert type(state) is kind
        assert [*state] == [*pair.eager.state[pair.theirs[1]]]


def test_a_state_with_code_of_its_own() -> None:
    """A class of the user's could do anything: refused, with nothing done."""
    pair = Pair("split", 3)
    pair.step()
    state = pair.compiled.state
    state[pair.mine[1]] = hung.OwnDict(state[pair.mine[1]])
    before = [p.detach().clone() for p in pair.mine]
    give_grads(9, pair.mine)
    with pytest.raises(UnsupportedInput, match="the class OwnDict, which may run"):
        pair.compiled.step()
    assert all(map(torch.equal, before, pair.mine))
    state[pair.mine[1]] = dict(state[pair.mine[1]])
    pair.step()
    pair.same()
