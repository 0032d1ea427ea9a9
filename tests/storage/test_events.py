"""What users do between steps of packed state, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.errors import CaptureError, UnsupportedInput
from fuseopt.storage.formats import FORMATS
from tests.storage.reference import (
    Params,
    Reference,
    assert_same,
    give_grads,
    params_of,
    same_bits,
)


class Pair:
    """A plain optimizer and a compiled one."""

    def __init__(self, make: Any, storage: Any, n: int = 18, **options: Any) -> None:
        self.theirs, self.ours = params_of(n), params_of(n)
        self.reference = Reference(make(self.theirs), storage)
        self.optimizer = fuseopt.compile(make(self.ours), storage=storage, **options)
        self.number = 0

    @property
    def both(self) -> tuple[Any, Any]:
        return self.reference.optimizer, self.optimizer

    def step(self, times: int = 1, missing: int = 0) -> None:
        for _ in range(times):
            give_grads(self.number, self.theirs, self.ours, missing=missing)
            self.number += 1
            self.reference.step()
            self.optimizer.step()
            self.check()

    def check(self) -> None:
        assert_same(self.reference, self.theirs, self.ours, self.optimizer)


def adamw(params: Params) -> Any:
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.slow
def test_a_group_is_added() -> None:
    pair = Pair(adamw, "bf16-stochastic")
    pair.step(3)
    more = params_of(6, seed=1), params_of(6, seed=1)
    for optimizer, new in zip(pair.both, more, strict=True):
        optimizer.add_param_group({"params": new, "lr": 0.1})
    pair.theirs += more[0]
    pair.ours += more[1]
    pair.step(3)


@pytest.mark.slow
def test_a_parameter_is_frozen_and_comes_back() -> None:
    pair = Pair(adamw, "bf16")
    pair.step(3)
    for frozen in (True, False):
        for params in (pair.theirs, pair.ours):
            params[3].requires_grad_(not frozen)
        pair.step(3)


def test_state_that_comes_late() -> None:
    pair = Pair(adamw, "bf16-stochastic", 19)
    for number in range(4):
        give_grads(number, pair.theirs, pair.ours)
        for params in (pair.theirs, pair.ours):
            for p in params[12 + 2 * number :]:
                p.grad = None
        pair.reference.step()
        pair.optimizer.step()
        pair.check()


def test_state_that_is_made_anew() -> None:
    pair = Pair(adamw, "bf16")
    pair.step(3)
    for optimizer, params in zip(pair.both, (pair.theirs, pair.ours), strict=True):
        del optimizer.state[params[2]]
    for key in ("exp_avg", "exp_avg_sq"):
        del pair.reference.packed[pair.theirs[2], key]
    pair.step(3)


def test_a_step_of_packed_state_is_planned_when_it_runs() -> None:
    pair = Pair(adamw, "bf16")
    pair.step(2)
    with pytest.raises(UnsupportedInput, match="packed state"):
        fuseopt.explain(pair.optimizer)


def test_a_step_that_dynamo_may_not_trace() -> None:
    pair = Pair(adamw, "bf16")
    pair.step(2)
    with torch.compiler.set_stance("force_eager"):
        pair.step(2)
    pair.step(1)


def test_a_tensor_of_the_state_is_replaced() -> None:
    pair = Pair(adamw, "bf16")
    pair.step(3)
    new = torch.rand_like(pair.ours[0])
    pair.reference.packed[pair.theirs[0], "exp_avg_sq"] = {"": new.bfloat16()}
    pair.optimizer.state[pair.ours[0]]["exp_avg_sq@bf16"] = new.bfloat16()
    pair.step(2)
    # in float32, as by the plain optimizer: it is packed
    pair.reference.packed[pair.theirs[1], "exp_avg_sq"] = {
        "": torch.ones_like(pair.ours[1]).bfloat16()
    }
    state = pair.optimizer.state[pair.ours[1]]
    state["exp_avg_sq"] = torch.ones_like(pair.ours[1])
    del state["exp_avg_sq@bf16"]
    pair.step(2)


def test_memory_is_moved() -> None:
    pair = Pair(adamw, "bf16-stochastic")
    pair.step(3)
    for params in (pair.theirs, pair.ours):
        for p in params:
            p.data = p.data.clone()
    pair.step(2)


def test_a_closure() -> None:
    pair = Pair(adamw, "bf16")
    pair.step(3)
    give_grads(9, pair.ours)
    grads = [p.grad for p in pair.ours]
    pair.optimizer.zero_grad()

    def closure() -> torch.Tensor:
        for p, grad in zip(pair.ours, grads, strict=True):
            p.grad = grad
        return torch.tensor(1.5)

    assert pair.optimizer.step(closure) == 1.5
    give_grads(9, pair.theirs)
    pair.reference.step()
    pair.check()


class Replaces(torch.optim.SGD):
    """A step that puts another tensor in the place of one of its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"] = 0.9 * state["mean"] + p.grad
                p.add_(state["mean"], alpha=-group["lr"])


class LooksAtAll(torch.optim.SGD):
    """A step in which the sum over all parameters scales each."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [
            p for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        total = torch.stack([p.grad.norm() for p in params]).norm()  # type: ignore
        for p in params:
            state = self.state[p]
            if "mean" not in state:
                state["mean"] = torch.zeros_like(p)
            state["mean"].lerp_(p.grad / (1 + total), 0.5)  # type: ignore[operator]
            p.add_(state["mean"], alpha=-0.1)


@pytest.mark.parametrize("kind", [Replaces, LooksAtAll])
def test_what_cannot_be_packed_in_a_kernel_runs_in_eager(kind: Any) -> None:
    pair = Pair(lambda params: kind(params, lr=0.1), "bf16")
    with pytest.warns(RuntimeWarning, match="runs in eager"):
        pair.step(4)
    strict = Pair(lambda p: kind(p, lr=0.1), "bf16", fallback="error")
    strict.step(1)
    give_grads(1, strict.ours)
    with pytest.raises(CaptureError, match="cannot be compiled"):
        strict.optimizer.step()


class Fails(torch.optim.SGD):
    """A step that raises where it is told to."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].add_(p.grad)
                if self.fails:
                    raise KeyError("told to")


def test_state_is_packed_after_an_error() -> None:
    params = params_of(18)
    optimizer = fuseopt.compile(Fails(params, lr=0.1), storage="bf16")
    for step in range(3):
        give_grads(step, params)
        optimizer.step()
    optimizer.fails = True
    for _ in range(2):
        give_grads(3, params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(KeyError):
                optimizer.step()
        assert all([*state] == ["mean@bf16"] for state in optimizer.state.values())
    optimizer.fails = False
    give_grads(4, params)
    optimizer.step()


def test_other_types_stay_as_they_are() -> None:
    ours = [p.to(torch.float64) for p in params_of(6)]
    params = [torch.nn.Parameter(p.detach()) for p in ours] + params_of(6)
    optimizer = fuseopt.compile(torch.optim.AdamW(params), storage="bf16")
    for step in range(3):
        give_grads(step, params)
        optimizer.step()
    assert "exp_avg" in optimizer.state[params[0]]
    assert "exp_avg@bf16" in optimizer.state[params[6]]


def test_a_named_key_that_cannot_be_packed_is_an_error() -> None:
    params = params_of(4)
    optimizer = fuseopt.compile(torch.optim.AdamW(params), storage={"step": "bf16"})
    give_grads(0, params)
    with pytest.raises(UnsupportedInput, match="'step'"):
        optimizer.step()


def test_an_unknown_key_is_warned_of() -> None:
    params = params_of(4)
    optimizer = fuseopt.compile(torch.optim.AdamW(params), storage={"mean": "bf16"})
    give_grads(0, params)
    with pytest.warns(RuntimeWarning, match="mean, which no state has"):
        optimizer.step()


@pytest.mark.parametrize("wrong", ["int8", 3, {"a": "b"}, {1: "bf16"}])
def test_a_wrong_option_is_an_error(wrong: Any) -> None:
    with pytest.raises(UnsupportedInput, match="storage"):
        fuseopt.compile(torch.optim.AdamW(params_of(2)), storage=wrong)


def test_in_backward_refuses() -> None:
    def make(params: Any) -> Any:
        return fuseopt.compile(adamw(params), storage="bf16")

    with pytest.raises(UnsupportedInput, match="packed"):
        fuseopt.in_backward(params_of(4), make)


def test_a_clip_is_left_to_the_step() -> None:
    """The step's kernel scales: the gradients stay as they were in memory."""
    theirs, ours = params_of(18), params_of(18)
    reference = Reference(adamw(theirs), "bf16")
    optimizer = fuseopt.compile(adamw(ours), storage="bf16")
    for step in range(4):
        if step == 3:  # what was made for a clip before has the other format no more
            fuseopt.compile(optimizer)
            reference.formats = {}
            for (p, key), parts in reference.packed.items():
                wide = FORMATS["bf16"].unpack(parts)
                reference.optimizer.state[p][key] = wide
            reference.packed.clear()
        give_grads(step, theirs, ours)
        grads = [p.grad.clone() for p in ours if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        reference.step()
        fuseopt.clip_grad_norm_(ours, 1.0, defer="unsafe")
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)
        unwritten = all(map(same_bits, grads, [p.grad for p in ours]))
        assert unwritten == (step > 0), step  # the first step makes the state, in eager
