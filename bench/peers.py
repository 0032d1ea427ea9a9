"""In: an optimizer's name and parameters. Out: the step of another package's own.

None of these packages is needed. One that is not installed, does not have the optimizer
or does not run on the device raises Unavailable, whose message is the reason. Seen to
step on a CPU: DeepSpeed 0.19.8, heavyball 3.2.1, bitsandbytes 0.50.2, torchao 0.18.0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

Step = Callable[[], object]


class Unavailable(Exception):
    """A contender cannot run. The message says why, in a few words."""


def _module(name: str) -> Any:
    package = name.split(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Unavailable(f"{package} is not installed") from error
    except Exception as error:
        # packages of kernels fail to import in as many ways as there are machines
        raise Unavailable(f"{package} cannot be imported: {error}") from error


def _one_of(
    module: str, known: dict[str, tuple[str, dict[str, Any]]], name: str
) -> Any:
    """The class of an optimizer and its arguments."""
    loaded = _module(module)
    if name not in known:
        raise Unavailable(f"{module.split('.')[0]} has no {name} of this kind")
    kind, arguments = known[name]
    if not hasattr(loaded, kind):
        raise Unavailable(f"{module} has no {kind} in the version installed")
    return getattr(loaded, kind), arguments


def deepspeed(name: str, params: list[Tensor], device: str) -> Step:
    """DeepSpeed's CPUAdam: C++ with vector instructions, built at first use."""
    if device != "cpu":
        raise Unavailable("CPUAdam steps parameters on the CPU")
    known = {"AdamW": ("DeepSpeedCPUAdam", {"lr": 1e-3, "weight_decay": 0.01})}
    kind, arguments = _one_of("deepspeed.ops.adam", known, name)
    return kind(params, adamw_mode=True, **arguments).step


def heavyball(name: str, params: list[Tensor], device: str) -> Step:
    """heavyball: foreach steps compiled by Inductor."""
    known = {
        "AdamW": ("AdamW", {"lr": 1e-3, "weight_decay": 0.01}),
        "SGD": ("SGD", {"lr": 1e-3, "beta": 0.9}),
        "AdEMAMix": ("AdEMAMix", {"lr": 1e-3, "weight_decay": 0.01}),
    }
    kind, arguments = _one_of("heavyball", known, name)
    grads = [p.grad for p in params]
    optimizer = kind(params, **arguments)

    def step() -> None:
        optimizer.step()
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad  # a step of heavyball takes the gradients away

    return step


def bitsandbytes(name: str, params: list[Tensor], device: str) -> Step:
    """The 32-bit optimizers of bitsandbytes: a kernel for each tensor."""
    known = {
        "AdamW": ("AdamW32bit", {"lr": 1e-3, "weight_decay": 0.01}),
        "SGD": ("SGD32bit", {"lr": 1e-3, "momentum": 0.9}),
        "Lion": ("Lion32bit", {"lr": 1e-4, "weight_decay": 0.01}),
        "LAMB": ("LAMB32bit", {"lr": 1e-3, "weight_decay": 0.01}),
        "AdEMAMix": ("AdEMAMix32bit", {"lr": 1e-3, "weight_decay": 0.01}),
    }
    kind, arguments = _one_of("bitsandbytes.optim", known, name)
    return kind(params, **arguments).step


def apex(name: str, params: list[Tensor], device: str) -> Step:
    """apex's multi-tensor kernels."""
    if device == "cpu":
        _module("apex")
        raise Unavailable("apex has kernels for GPUs only")
    known = {
        "AdamW": ("FusedAdam", {"lr": 1e-3, "weight_decay": 0.01, "adam_w_mode": True}),
        "SGD": ("FusedSGD", {"lr": 1e-3, "momentum": 0.9}),
        "LAMB": ("FusedLAMB", {"lr": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.0}),
    }
    kind, arguments = _one_of("apex.optimizers", known, name)
    return kind(params, **arguments).step


def torchao(name: str, params: list[Tensor], device: str) -> Step:
    """torchao's AdamW with plain state: each tensor's step compiled by Inductor."""
    known = {"AdamW": ("_AdamW", {"lr": 1e-3, "weight_decay": 0.01})}
    kind, arguments = _one_of("torchao.optim", known, name)
    return kind(params, **arguments).step


def bitsandbytes_8bit(name: str, params: list[Tensor]) -> Step:
    """bitsandbytes' optimizers with state in blocks of 8 bits."""
    known = {
        "AdamW": ("AdamW8bit", {"lr": 1e-3, "weight_decay": 0.01}),
        "SGD": ("SGD8bit", {"lr": 1e-3, "momentum": 0.9}),
        "Lion": ("Lion8bit", {"lr": 1e-4, "weight_decay": 0.01}),
        "AdEMAMix": ("AdEMAMix8bit", {"lr": 1e-3, "weight_decay": 0.01}),
    }
    kind, arguments = _one_of("bitsandbytes.optim", known, name)
    return kind(params, **arguments).step


def torchao_8bit(name: str, params: list[Tensor]) -> Step:
    """torchao's AdamW with state in blocks of 8 bits, compiled by Inductor."""
    known = {"AdamW": ("AdamW8bit", {"lr": 1e-3, "weight_decay": 0.01})}
    kind, arguments = _one_of("torchao.optim", known, name)
    return kind(params, **arguments).step


PEERS: dict[str, Callable[[str, list[Tensor], str], Step]] = {
    "deepspeed": deepspeed,
    "heavyball": heavyball,
    "bitsandbytes": bitsandbytes,
    "apex": apex,
    "torchao": torchao,
}
