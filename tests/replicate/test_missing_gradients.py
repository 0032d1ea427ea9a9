"""Which gradients are None may be another set in every call: bits and state of eager,
and nothing is traced or built for it.

What is counted: traces, the times that Dynamo begins to trace; kernels, the different
texts that a compiler is given. Kinds of lanes are what there may be a trace for: those
at their first step, those after it, each with or without a gradient.
"""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import fuseopt
from fuseopt.compiler import pipeline
from tests import ROOT
from tests.counts import Counts
from tests.papers.adaptive import AdaBelief
from tests.papers.reducing import LAMB
from tests.steps import same_bits

SHAPES = [(3, 4), (6,)]


def compiled(optimizer: Optimizer) -> Callable[[], Any]:
    fuseopt.compile(optimizer)
    return optimizer.step


def bound(optimizer: Optimizer) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend="fuseopt")


class Pair:
    """An optimizer in eager and one that is compiled, over equal parameters."""

    def __init__(
        self,
        build: Callable[[Any], Optimizer],
        n: int = 64,
        way: Callable[[Optimizer], Callable[[], Any]] = compiled,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.theirs = [
            torch.nn.Parameter(torch.randn(SHAPES[i % 2], generator=generator))
            for i in range(n)
        ]
        self.mine = [torch.nn.Parameter(p.detach().clone()) for p in self.theirs]
        self.plain, self.opt = build(self.theirs), build(self.mine)
        self.run = way(self.opt)
        self.random = random.Random(3)
        self.generator = generator

    def give(self, has: Callable[[int], bool]) -> None:
        """Give those parameters gradients for which `has(i)`, and the others none."""
        for i, (p, q) in enumerate(zip(self.theirs, self.mine, strict=True)):
            p.grad = q.grad = None
            if has(i):
                p.grad = torch.randn(p.shape, generator=self.generator).to(p.dtype)
                q.grad = p.grad.clone()

    def step(self, has: Callable[[int], bool]) -> None:
        self.give(has)
        before = [q._version for q in self.mine]
        self.plain.step()
        self.run()
        for q, version in zip(self.mine, before, strict=True):
            assert (q._version > version) == (q.grad is not None)

    def random_step(self, share: float = 0.5) -> None:
        self.step(lambda _: self.random.random() < share)

    def check(self) -> None:
        """The bits of eager in all that is held, in the same order."""
        place = {id(p): i for i, p in enumerate(self.theirs)}
        own = {id(p): i for i, p in enumerate(self.mine)}
        theirs, mine = self.plain.state, self.opt.state
        assert [place[id(p)] for p in theirs] == [own[id(p)] for p in mine]
        for p, q in zip(self.theirs, self.mine, strict=True):
            assert same_bits(q.detach(), p.detach())
            a, b = theirs.get(p, {}), mine.get(q, {})
            assert list(a) == list(b)
            for key, value in a.items():
                assert type(value) is type(b[key]), key
                if isinstance(value, Tensor):
                    assert same_bits(b[key], value), key
                else:
                    assert value == b[key], key


def adamw(params: Any) -> Optimizer:
    return AdamW(params, 1e-2)


def momentum(params: Any) -> Optimizer:
    return SGD(params, 1e-2, momentum=0.9, weight_decay=0.01)


EVERY = [adamw, momentum, LAMB, AdaBelief]


@pytest.mark.family(6)
@pytest.mark.parametrize(
    ("way", "steps"),
    [
        pytest.param(compiled, 40, id="compile"),
        pytest.param(bound, 40, id="bound"),
        pytest.param(compiled, 500, id="compile-500", marks=pytest.mark.slow),
        pytest.param(bound, 500, id="bound-500", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("build", EVERY)
def test_random_sets(build: Any, way: Any, steps: int, counts: Counts) -> None:
    """Another set of gradients in each step."""
    pair = Pair(build, way=way)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            pair.random_step()
            pair.check()
        after_two = counts.traces
        for k in range(2, steps):
            pair.random_step()
            if k < 20 or k % 20 == 0:
                pair.check()
    pair.check()
    # lanes at their first step, and those after it
    assert counts.traces == after_two
    assert len(fuseopt.reports()) == 2
    assert {r.fallback for r in fuseopt.reports()} == {""}
    assert all("of 64 lanes" in r.traced for r in fuseopt.reports())
    # those at their first step, both, those after it, and those without gradients
    assert len(counts.texts) <= 4


def on_another_target() -> None:
    """Momentum alone: a kernel of a GPU takes powers and norms from other libraries."""
    made = Pair(momentum, 18, lambda o: fuseopt.compile(o, target="triton").step)
    for _ in range(4):
        made.random_step()
        made.check()
    assert len(fuseopt.reports()) == 2


@pytest.mark.slow
def test_on_another_target() -> None:
    """In Triton's interpreter, which a process has from its start or not at all."""
    code = f"from {__name__} import on_another_target; on_another_target()"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=250)


def test_what_is_written_down(tmp_path: Any) -> None:
    """A folder for each trace, not for each set of gradients."""
    made = str(tmp_path)
    pair = Pair(adamw, 18, lambda opt: fuseopt.compile(opt, dump_dir=made).step)
    for _ in range(6):
        pair.random_step()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.family(4)
@pytest.mark.parametrize("build", EVERY)
def test_none_and_all(build: Any, counts: Counts) -> None:
    """Calls without any gradient, before there was one and after."""
    pair = Pair(build, 24)
    for has in [False, True, True, False, True, False, False, True]:
        pair.step(lambda _, has=has: has)
        pair.check()
    assert {r.fallback for r in fuseopt.reports()} <= {""}
    before = counts.traces
    for k in range(10):
        pair.step(lambda i, k=k: i % 3 != k % 3)
        pair.check()
    assert counts.traces <= before + 1
    assert all("lanes" in r.traced for r in fuseopt.reports())


@pytest.mark.family(4)
@pytest.mark.parametrize("build", EVERY)
def test_two_sets_in_turn_plan_nothing(
    build: Any, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator and its critic, which share an optimizer."""
    pair = Pair(build, 24)
    for k in range(6):
        pair.step(lambda i, k=k: i % 2 == k % 2)
    pair.check()
    planned: list[int] = []
    plan = pipeline.plan_graph

    def counted(*args: Any, **kwargs: Any) -> Any:
        planned.append(1)
        return plan(*args, **kwargs)

    monkeypatch.setattr(pipeline, "plan_graph", counted)
    for k in range(6):
        pair.step(lambda i, k=k: i % 2 == k % 2)
    pair.check()
    assert planned == []


@pytest.mark.family(3)
@pytest.mark.parametrize("build", EVERY)
def test_a_late_first_gradient(build: Any) -> None:
    """Its counter begins when it comes, in the state and in the bias corrections."""
    pair = Pair(build, 24)
    for k in range(12):
        pair.step(lambda i, k=k: i < 12 + k)
        pair.check()
    assert len(fuseopt.reports()) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("build", EVERY)
def test_a_call_that_fails_leaves_no_first_state(build: Any) -> None:
    """State that late lanes would get is not the optimizer's before all is launched."""
    pair = Pair(build, 24)
    for _ in range(3):
        pair.step(lambda i: i < 12)
    pair.give(lambda _: True)
    grad = pair.mine[20].grad
    assert grad is not None
    memory = grad.untyped_storage()
    content = memory.clone()
    memory.resize_(0)
    before = copy.deepcopy([*pair.opt.state.values()])
    with pytest.raises(RuntimeError):
        pair.run()
    assert [*map(id, pair.opt.state)] == [*map(id, pair.mine[:12])]
    after = [*pair.opt.state.values()]
    for old, new in zip(before, after, strict=True):
        assert list(old) == list(new)
        for key, value in old.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(new[key]))
    memory.resize_(content.nbytes())
    memory.copy_(content)
    pair.plain.step()
    pair.run()
    pair.check()
    pair.random_step()
    pair.check()


@pytest.mark.family(4)
@pytest.mark.parametrize("build", EVERY)
def test_gradients_side_by_side_in_one_storage(build: Any) -> None:
    """As in the buckets of DistributedDataParallel, and some of them are missing."""
    pair = Pair(build, 24)
    for k in range(6):
        pair.give(lambda i, k=k: k < 2 or i % 3 != k % 3)
        given = [p.grad for p in pair.mine if p.grad is not None]
        bucket = torch.cat([g.flatten() for g in given])
        parts = iter(bucket.split([g.numel() for g in given]))
        for p in pair.mine:
            if p.grad is not None:
                p.grad = next(parts).view(p.shape)
        pair.plain.step()
        pair.run()
        pair.check()


class Change:
    """What may be done to an optimizer between two steps."""

    @staticmethod
    def freeze(opt: Optimizer, params: list[Any]) -> None:
        for p in params[:5]:
            p.requires_grad_(False)
            p.grad = None

    @staticmethod
    def add_group(opt: Optimizer, params: list[Any]) -> None:
        more = torch.nn.Parameter(torch.ones(3, 4))
        params.append(more)
        opt.add_param_group({"params": [more], "lr": 0.02})

    @staticmethod
    def move(opt: Optimizer, params: list[Any]) -> None:
        moved = opt.param_groups[0]["params"].pop(7)
        opt.param_groups[1]["params"].append(moved)

    @staticmethod
    def replace_state(opt: Optimizer, params: list[Any]) -> None:
        state = opt.state[params[4]]
        for key, value in state.items():
            state[key] = value.clone() if isinstance(value, Tensor) else value + 3

    @staticmethod
    def drop_state(opt: Optimizer, params: list[Any]) -> None:
        del opt.state[params[4]]

    @staticmethod
    def reload(opt: Optimizer, params: list[Any]) -> None:
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))

    @staticmethod
    def widen_state(opt: Optimizer, params: list[Any]) -> None:
        for state in opt.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = value.double()


@pytest.mark.family(30)
@pytest.mark.parametrize("build", EVERY)
@pytest.mark.parametrize("change", [x for x in vars(Change) if not x.startswith("_")])
def test_what_changes_between_steps(build: Any, change: str, counts: Counts) -> None:
    """At most one trace more, and one for what follows where states are made anew; of a
    lane that is new, one for each kind that it comes to be of.
    """

    def grouped(params: Any) -> Optimizer:
        return build([{"params": params[:16]}, {"params": params[16:], "lr": 0.003}])

    pair = Pair(grouped, 32)
    for _ in range(5):
        pair.random_step(0.7)
    pair.check()
    before = counts.traces
    for opt, params in ((pair.plain, pair.theirs), (pair.opt, pair.mine)):
        getattr(Change, change)(opt, params)
    frozen = {i for i, p in enumerate(pair.mine) if not p.requires_grad}
    try:
        for _ in range(5):
            pair.step(lambda i: i not in frozen and pair.random.random() < 0.7)
    except RuntimeError:
        if change != "widen_state":
            raise
        return  # eager refuses as well
    pair.check()
    assert {r.fallback for r in fuseopt.reports()} == {""}
    assert counts.traces <= before + (3 if change == "add_group" else 2)


@pytest.mark.family(4)
@pytest.mark.parametrize("build", EVERY)
def test_few_lanes_are_led_once_gradients_come_and_go(
    build: Any, counts: Counts
) -> None:
    """At first they are traced whole, and then with the first set that is another."""
    pair = Pair(build, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            pair.random_step()
            pair.check()
        before = counts.traces
        for _ in range(20):
            pair.random_step()
            pair.check()
    assert counts.traces <= before + 1
    assert {r.fallback for r in fuseopt.reports()} == {""}
    assert "of 8 lanes" in fuseopt.reports()[-1].traced
