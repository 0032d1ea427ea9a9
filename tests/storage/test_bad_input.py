"""Bad input of packed state and masters: a test for each kind, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from fuseopt import Storage
from fuseopt.errors import UnsupportedInput
from fuseopt.offload import MasterOptimizer
from tests.storage.reference import Params, give_grads, params_of, same_bits

EIGHT = Storage("8bit/64", least=0)


def momentum(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def refusal(storage: Any) -> str:
    with pytest.raises(UnsupportedInput) as caught:
        fuseopt.compile(torch.optim.AdamW(params_of(2)), storage=storage)
    return str(caught.value)


@pytest.mark.parametrize("name", ["fp32-stochastic", "fp16-stochastic", "stochastic"])
def test_stochastic_rounding_of_fp32(name: str) -> None:
    """Nothing is rounded there: the error names the format that is."""
    assert "bf16-stochastic" in refusal(name)


class Keeps(torch.optim.SGD):
    """Has a tensor of some dtype in its state."""

    dtype = torch.int32

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "kept" not in state:
                state["kept"] = torch.zeros_like(p, dtype=self.dtype)
            state["kept"].add_(1)
        return super().step(closure)


DTYPES = [torch.int32, torch.int64, torch.uint8, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["8bit/64", "fp8-e4m3", "bf16-stochastic", "split"])
def test_8_bits_of_integers_and_of_other_dtypes(name: str, dtype: Any) -> None:
    params = params_of(2)
    optimizer = Keeps(params, 0.1)
    optimizer.dtype = dtype
    fuseopt.compile(optimizer, storage={"kept": name} if "8bit" not in name else EIGHT)
    give_grads(0, params)
    if "8bit" in name:  # chosen by no key: it stays as it is
        optimizer.step()
        assert all(optimizer.state[p]["kept"].dtype == dtype for p in params)
        fuseopt.compile(optimizer, storage=Storage(name, keys="kept", least=0))
    with pytest.raises(
        UnsupportedInput, match=r"'kept'.*only torch\.float32 is packed"
    ):
        optimizer.step()
    assert all(optimizer.state[p]["kept"].dtype == dtype for p in params)


def test_unknown_keys_of_the_state() -> None:
    """Warned of once, with the keys that there are; what is known is packed."""
    params = params_of(4)
    storage = {"exp_avgs": "8bit/64", "exp_avg_sq": "bf16"}
    optimizer = fuseopt.compile(torch.optim.AdamW(params), storage=storage)
    give_grads(0, params)
    with pytest.warns(RuntimeWarning, match="exp_avgs, which no state has; .*exp_avg"):
        optimizer.step()
    assert all("exp_avg_sq@bf16" in state for state in optimizer.state.values())
    optimizer.step()


SIZES = ["0", "-64", "63", "8192", "64.0", "", "256/64", " 256"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["8bit", "8bit-signed", "fp8-e4m3"])
def test_a_block_size_that_does_not_fit(kind: str, size: str) -> None:
    assert "blocks have 64, 128, 256" in refusal(f"{kind}/{size}")


@pytest.mark.parametrize("name", ["bf16/256", "split/64", "8 bit", "", b"8bit"])
def test_a_format_that_has_no_blocks(name: Any) -> None:
    assert "storage" in refusal(name)


@pytest.mark.family(9)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["8bit/64", "8bit-unsigned/64", "fp8-e5m2/64"])
def test_state_that_is_not_finite(name: str, value: float) -> None:
    """A block that has such a number is spoilt, and no other one."""
    params = [torch.nn.Parameter(torch.ones(4, 64))]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    fuseopt.compile(optimizer, storage=Storage(name, least=0))
    params[0].grad = torch.ones(4, 64)
    params[0].grad[1, 3] = value
    for _ in range(3):
        optimizer.step()
        state = fuseopt.full_precision(optimizer.state_dict())["state"][0]
        finite = state["momentum_buffer"].isfinite().all(1)
        assert finite.tolist() == [True, False, True, True]
    assert params[0][[0, 2, 3]].isfinite().all()


# ---------------------------------------------------------------- other state dicts


def packed(storage: Any, params: Params) -> Any:
    optimizer = fuseopt.compile(momentum(params), storage=storage)
    give_grads(0, params)
    optimizer.step()
    return optimizer


@pytest.mark.slow
def test_packed_state_is_loaded_by_a_step_without_storage() -> None:
    """It is unpacked. A momentum would begin anew if packed keys were left there."""
    saved = packed(EIGHT, params_of(4)).state_dict()
    params = params_of(4)
    optimizer = fuseopt.compile(momentum(params))
    optimizer.load_state_dict(saved)
    wide = fuseopt.full_precision(saved)["state"]
    for i, p in enumerate(params):
        assert [*optimizer.state[p]] == ["momentum_buffer"]
        have = optimizer.state[p]["momentum_buffer"]
        assert same_bits(have, wide[i]["momentum_buffer"])
    assert [*saved["state"][0]] == [
        "momentum_buffer@8bit/64",
        *[*saved["state"][0]][1:],
    ]


def test_packed_state_is_loaded_by_masters_without_storage() -> None:
    saved = packed(EIGHT, params_of(4)).state_dict()
    params = params_of(4, dtype=torch.bfloat16)
    optimizer = MasterOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer.load_state_dict(saved)
    give_grads(1, params)
    optimizer.step()
    assert all([*s] == ["momentum_buffer"] for s in optimizer.state.values())


def test_state_of_other_sizes() -> None:
    """A state dict of a model of other sizes: torch's error, and nothing is lost."""
    saved = packed(EIGHT, params_of(3)).state_dict()
    params = [torch.nn.Parameter(torch.ones(7)) for _ in range(3)]
    optimizer = fuseopt.compile(momentum(params), storage=EIGHT)
    optimizer.load_state_dict(saved)
    for p in params:
        p.grad = torch.ones(7)
    with (
        pytest.warns(RuntimeWarning, match="runs in eager"),
        pytest.raises(RuntimeError, match="size"),
    ):
        optimizer.step()
    for i, p in enumerate(params):
        assert [*optimizer.state[p]] == [*saved["state"][i]]


def test_state_that_lacks_a_part() -> None:
    """Codes without their scales."""
    saved = packed(EIGHT, params_of(3)).state_dict()
    for state in saved["state"].values():
        del state["momentum_buffer@8bit/64.scale"]
    params = params_of(3)
    optimizer = fuseopt.compile(momentum(params), storage=EIGHT)
    with pytest.raises(UnsupportedInput, match="scale"):
        optimizer.load_state_dict(saved)
    with pytest.raises(UnsupportedInput, match="scale"):
        fuseopt.full_precision(saved)


# ---------------------------------------------------------------- steps and hooks


@pytest.mark.parametrize("storage", [EIGHT, "bf16"])
def test_a_step_is_done_twice_with_the_same_gradients(storage: Any) -> None:
    """As by a plain optimizer: the gradients count twice."""
    theirs, ours = (params_of(4, dtype=torch.bfloat16) for _ in range(2))
    several = [
        MasterOptimizer(x, torch.optim.SGD, storage=storage, lr=0.1, momentum=0.9)
        for x in (theirs, ours)
    ]
    for step in range(3):
        give_grads(step, theirs, ours)
        for _ in range(2):
            several[1].step()
            with torch.compiler.set_stance("force_eager"):
                several[0].step()
        assert all(map(same_bits, theirs, ours))


def test_gradients_come_after_the_optimizer_is_gone() -> None:
    """See also tests/offload/on_device.py, where hooks copy gradients."""
    params = params_of(4)
    optimizer = packed(EIGHT, params)
    step = optimizer.step
    del optimizer
    for p in params:
        p.grad = None
        (p * 2).sum().backward()
        assert torch.equal(p.grad, torch.full_like(p, 2))
    del step
