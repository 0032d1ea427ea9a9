"""State dicts of packed state: they come back as they were, or in float32."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fuseopt
from tests.storage.reference import (
    Params,
    Reference,
    assert_same,
    give_grads,
    params_of,
    same_bits,
)

FORMATS = ("bf16", "fp16", "bf16-stochastic")


def stepped(
    storage: Any, steps: int = 3, n: int = 18
) -> tuple[Reference, Params, Params, Any]:
    theirs, ours = params_of(n), params_of(n)
    reference = Reference(torch.optim.AdamW(theirs), storage)
    optimizer = fuseopt.compile(torch.optim.AdamW(ours), storage=storage)
    for step in range(steps):
        give_grads(step, theirs, ours)
        reference.step()
        optimizer.step()
    return reference, theirs, ours, optimizer


def through_a_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("storage", FORMATS)
def test_a_run_goes_on_from_a_file(storage: str) -> None:
    reference, theirs, ours, optimizer = stepped(storage)
    saved = through_a_file(optimizer.state_dict())
    again = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    resumed = fuseopt.compile(torch.optim.AdamW(again), storage=storage)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        give_grads(step, theirs, again)
        reference.step()
        resumed.step()
        assert_same(reference, theirs, again, resumed)


@pytest.mark.parametrize("storage", FORMATS)
def test_loading_goes_on_in_the_same_optimizer(storage: str) -> None:
    reference, theirs, ours, optimizer = stepped(storage)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        give_grads(step, theirs, ours)
        reference.step()
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)


def test_the_plain_optimizer_loads_full_precision() -> None:
    *_, ours, optimizer = stepped("bf16")
    plain = torch.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in ours])
    plain.load_state_dict(fuseopt.full_precision(optimizer.state_dict()))
    for p, q in zip(ours, plain.param_groups[0]["params"], strict=True):
        assert [*plain.state[q]] == ["step", "exp_avg", "exp_avg_sq"]
        packed = optimizer.state[p]["exp_avg@bf16"]
        assert same_bits(plain.state[q]["exp_avg"], packed.float())
    give_grads(7, plain.param_groups[0]["params"])
    plain.step()


def test_a_plain_state_dict_is_packed() -> None:
    theirs, ours = params_of(18), params_of(18)
    plain = torch.optim.AdamW(theirs)
    give_grads(0, theirs)
    plain.step()
    with torch.no_grad():
        for p, q in zip(theirs, ours, strict=True):
            q.copy_(p)
    optimizer = fuseopt.compile(torch.optim.AdamW(ours), storage="bf16")
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    reference = Reference(plain, "bf16")
    for step in range(1, 4):
        give_grads(step, theirs, ours)
        reference.step()
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)


def test_state_of_another_format_is_packed_anew() -> None:
    *_, ours, optimizer = stepped("fp16")
    saved = optimizer.state_dict()
    other = fuseopt.compile(torch.optim.AdamW(ours), storage="bf16-stochastic")
    other.load_state_dict(saved)
    give_grads(3, ours)
    other.step()
    (first, *_) = other.state.values()
    assert {key for key in first if "@" in key} == {
        f"{key}@bf16-stochastic{part}"
        for key in ("exp_avg", "exp_avg_sq")
        for part in ("", ".draw")
    }


def test_torchs_distributed_checkpoints() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(9)))
    make = torch.optim.AdamW
    optimizer = fuseopt.compile(make(model.parameters()), storage="bf16-stochastic")
    params = [*model.parameters()]
    for step in range(3):
        give_grads(step, params)
        optimizer.step()
    saved = through_a_file(get_optimizer_state_dict(model, optimizer))
    before = {k: v.clone() for k, v in optimizer.state[params[0]].items()}
    give_grads(3, params)
    optimizer.step()
    set_optimizer_state_dict(model, optimizer, saved)
    for key, value in before.items():
        assert same_bits(optimizer.state[params[0]][key], value)


def test_a_copy_is_a_plain_optimizer_with_packed_state() -> None:
    *_, optimizer = stepped("bf16")
    twin = copy.deepcopy(optimizer)
    assert twin.step.__func__ is torch.optim.AdamW.step
    fuseopt.compile(twin, storage="bf16")
    give_grads(4, twin.param_groups[0]["params"])
    twin.step()


def test_without_storage_the_state_is_unpacked() -> None:
    *_, ours, optimizer = stepped("bf16")
    before = optimizer.state[ours[0]]["exp_avg@bf16"].float()
    fuseopt.compile(optimizer)
    assert [*optimizer.state[ours[0]]] == ["step", "exp_avg", "exp_avg_sq"]
    assert same_bits(optimizer.state[ours[0]]["exp_avg"], before)
    give_grads(4, ours)
    optimizer.step()
