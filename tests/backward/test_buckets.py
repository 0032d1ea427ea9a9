"""The default buckets, what a bucket costs, and changes between two backwards."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.backward.buckets import buckets_of
from tests.frames import lines
from tests.steps import same_bits

#: Lines of fuseopt that a bucket of two parameters runs, with its hooks.
LINES = 430


def sizes(wanted: int, *elements: int) -> list[list[int]]:
    """Elements of the parameters of each bucket, of bytes `wanted`."""
    params = [torch.empty(n) for n in elements]
    return [[p.numel() for p in b] for b in buckets_of(wanted, None, params)]


def test_a_small_bucket_takes_one_more_parameter() -> None:
    # of 4 * 100 bytes: a bias does not fill an eighth, whatever comes next
    assert sizes(400, 300, 10, 300, 10) == [[10, 300], [10, 300]]
    assert sizes(400, 1000, 10, 1000, 10) == [[10, 1000], [10, 1000]]
    # 13 of 100 are more than an eighth, 12 are less
    assert sizes(400, 99, 13) == [[13], [99]]
    assert sizes(400, 99, 12) == [[12, 99]]
    assert sizes(400, 30, 30, 40, 50) == [[50, 40], [30, 30]]
    # what is larger than a bucket is alone with what came before
    assert sizes(400, 50, 500, 50) == [[50], [500], [50]]


class Pair:
    """A chain of layers in eager, and the same one that steps in the backward."""

    def __init__(self, kind: Any, layers: int = 4, **options: Any) -> None:
        torch.manual_seed(0)
        nets = [
            torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(layers)])
            for _ in range(2)
        ]
        nets[1].load_state_dict(nets[0].state_dict())
        self.theirs, self.mine = nets

        def make(params: Any) -> torch.optim.Optimizer:
            params = [*params]
            half = len(params) // 2
            groups = [{"params": params[:half], "lr": 0.1}, {"params": params[half:]}]
            built: torch.optim.Optimizer = kind(groups, lr=0.01, **options)
            return built

        self.plain = make(self.theirs.parameters())
        self.held = fuseopt.in_backward(self.mine, make, buckets="layer")
        self.turn = 0

    def step(self) -> None:
        self.turn += 1
        given = torch.randn(2, 4, generator=torch.Generator().manual_seed(self.turn))
        self.theirs(given).square().sum().backward()
        self.plain.step()
        self.plain.zero_grad()
        self.mine(given).square().sum().backward()
        self.check()

    def check(self) -> None:
        pairs = zip(self.theirs.parameters(), self.mine.parameters(), strict=True)
        for i, (p, q) in enumerate(pairs):
            assert same_bits(p, q), f"turn {self.turn}, parameter {i}"
            own, other = self.plain.state.get(p), self.held.state.get(q)
            assert (own is None) == (other is None)
            for key, value in (own or {}).items():
                assert other is not None
                assert same_bits(value, other[key]), (i, key)


def moved_to_another_group(opt: Any) -> None:
    first, second = (group["params"] for group in opt.param_groups)
    second.append(first.pop(0))


def in_another_order(opt: Any) -> None:
    opt.param_groups[0]["params"].reverse()


def another_state_dict(opt: Any) -> None:
    p = opt.param_groups[0]["params"][0]
    opt.state[p] = {key: x.clone() for key, x in opt.state[p].items()}


def other_states_exchanged(opt: Any) -> None:
    p, q = (group["params"][0] for group in opt.param_groups)
    opt.state[p], opt.state[q] = opt.state[q], opt.state[p]


def a_state_gone(opt: Any) -> None:
    del opt.state[opt.param_groups[1]["params"][1]]


def all_states_gone(opt: Any) -> None:
    opt.state.clear()


def groups_exchanged(opt: Any) -> None:
    opt.param_groups.reverse()


def loaded(opt: Any) -> None:
    opt.load_state_dict(opt.state_dict())


CHANGES = (
    moved_to_another_group,
    in_another_order,
    another_state_dict,
    other_states_exchanged,
    a_state_gone,
    all_states_gone,
    groups_exchanged,
    loaded,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_changes_between_backwards(kind: Any, change: Callable[[Any], None]) -> None:
    """What was found out about a bucket does not outlive a change."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    pair = Pair(kind, **options)
    for _ in range(4):
        pair.step()
    for _ in range(2):
        change(pair.plain)
        change(pair.held.optimizer)
        for _ in range(3):
            pair.step()


def test_a_state_that_was_replaced_is_freed() -> None:
    pair = Pair(torch.optim.AdamW)
    for _ in range(4):
        pair.step()
    old = [weakref.ref(x["exp_avg"]) for x in pair.held.state.values()]
    pair.held.load_state_dict(copy.deepcopy(pair.held.state_dict()))
    pair.step()
    gc.collect()
    assert [x() for x in old] == [None] * len(old)


def test_lines_of_a_bucket() -> None:
    """A bucket runs a bounded number of lines; further buckets add few to it."""
    each = []
    for layers in (4, 12):
        pair = Pair(torch.optim.AdamW, layers)
        for _ in range(6):
            pair.step()
        given = torch.ones(2, 4)

        def call(pair: Pair = pair, given: torch.Tensor = given) -> None:
            pair.mine(given).sum().backward()

        counted = lines(call)
        ours = sum(n for (file, _), n in counted.items() if "/fuseopt/" in file)
        each.append(ours / layers)
    assert max(each) < LINES
    assert each[1] < each[0] + 60
