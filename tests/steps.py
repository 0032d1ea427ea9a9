"""Optimizers, their eager reference, and how two runs are compared bit for bit.

The reference is the plain optimizer, as it was made. `eager_step` lifts the check by
which torch refuses capturable=True on a CPU, for those that are made so.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fuseopt.backend import fuseopt

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: 0-d, one element, odd, several rows, more than a vector, three dims, more than a
#: chunk of eager's loops, empty.
SHAPES = ((), (1,), (3,), (17, 5), (40,), (3, 4, 5), (181, 193), (0, 3))
CHECKED = "adadelta adam adamax asgd nadam radam rmsprop rprop".split()

T = torch.tensor
#: (optimizer, options): every torch optimizer with a foreach form, all of its options.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("SGD", {"lr": T(0.1), "momentum": 0.9}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"betas": (0.3, 0.9), "maximize": True, "weight_decay": 0.1}),
    ("Adam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("Adam", {"lr": T(0.01), "betas": (T(0.9), T(0.99))}),
    ("AdamW", {"lr": T(0.01)}),
    ("AdamW", {"maximize": True, "amsgrad": True, "weight_decay": 0.0}),
    ("AdamW", {"eps": 1e-3, "lr": 0.05}),
    ("NAdam", {"weight_decay": 0.1, "maximize": True}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("NAdam", {"lr": T(0.01), "momentum_decay": 1e-2}),
    ("RAdam", {"lr": 0.1, "maximize": True}),
    ("RAdam", {"lr": 0.1, "weight_decay": 0.1}),
    ("RAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1, "lr": T(0.01)}),
    ("Adamax", {"weight_decay": 0.1, "maximize": True}),
    ("Adamax", {"lr": T(0.01), "betas": (0.6, 0.9)}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.1}),
    ("Adagrad", {"maximize": True, "initial_accumulator_value": 0.5}),
    ("Adagrad", {"lr": T(0.1)}),
    ("Adadelta", {"weight_decay": 0.1, "maximize": True}),
    ("Adadelta", {"lr": T(0.5), "rho": 0.7}),
    ("RMSprop", {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"maximize": True}),
    ("RMSprop", {"lr": T(0.01), "momentum": 0.5}),
    ("ASGD", {"weight_decay": 0.1, "maximize": True}),
    ("ASGD", {"t0": 2.0, "lambd": 0.1, "alpha": 0.5}),
    ("ASGD", {"lr": T(0.1)}),
    ("Rprop", {"lr": 0.1, "maximize": True}),
    ("Rprop", {"lr": T(0.1), "etas": (0.3, 1.4), "step_sizes": (1e-3, 2.0)}),
]
ELEVEN = sorted({name for name, _ in CASES})


def name_of(case: Any) -> str:
    """A readable id for a case or a dtype."""
    if isinstance(case, torch.dtype):
        return str(case)[6:]
    if not isinstance(case, tuple):
        return str(case)
    options = ",".join(f"{k}={v}" for k, v in case[1].items())
    return f"{case[0]}({options.replace('tensor', 'T').replace(' ', '')})"


def make_params(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype))
        for s in shapes
    ]


def has(name: str, option: str) -> bool:
    return option in inspect.signature(getattr(torch.optim, name)).parameters


def make(
    name: str, params: Any, reference: bool = False, **options: Any
) -> torch.optim.Optimizer:
    """An optimizer, in its foreach form unless told otherwise.

    With a tensor as an option it is capturable: torch refuses it elsewhere. So is the
    reference, which is made the same.
    """
    tensor = any(
        isinstance(x, Tensor)
        for v in options.values()
        for x in (v if isinstance(v, tuple) else (v,))
    )
    if has(name, "capturable") and tensor:
        options = {**options, "capturable": True}
    options = {"foreach": True, **options}
    return getattr(torch.optim, name)(params, **options)


@contextlib.contextmanager
def capturable_on_cpu() -> Iterator[None]:
    """Let eager run capturable steps on a CPU; only a check stands against it."""
    with contextlib.ExitStack() as patches:
        for module in CHECKED:
            patches.enter_context(
                mock.patch.object(
                    # torch takes the names of these modules away from its package
                    importlib.import_module(f"torch.optim.{module}"),
                    "_get_capturable_supported_devices",
                    return_value=["cpu", "cuda", "sim"],
                )
            )
        yield


def eager_step(optimizer: torch.optim.Optimizer) -> None:
    with capturable_on_cpu():
        optimizer.step()


def compiled(optimizer: torch.optim.Optimizer, **options: Any) -> Callable[..., Any]:
    return torch.compile(optimizer.step, backend=fuseopt, options=options or None)


def set_grads(params: Sequence[Any], others: Sequence[Any], seed: int) -> None:
    """Give two runs the same fresh gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p, q in zip(params, others, strict=True):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad, q.grad = grad.clone(), grad.clone()


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Equal to the bit, the sign of zero included; NaN equals NaN."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    if got.is_floating_point() and got.element_size() == 1:
        got, want = got.float(), want.float()
    equal = (got == want) & (torch.signbit(got) == torch.signbit(want))
    return bool((equal | (got.isnan() & want.isnan())).all())


def turned(x: Any) -> Any:
    """The same numbers, with the first dimension as the innermost."""
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x


def differences(
    params: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    others: Sequence[Any],
    other: torch.optim.Optimizer,
) -> list[str]:
    """Names of the parameters and state tensors of two runs that differ."""
    found = []
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        if not same_bits(q.detach(), p.detach()):
            found.append(f"parameter {i} {tuple(p.shape)}")
        mine, theirs = optimizer.state.get(p, {}), other.state.get(q, {})
        if mine.keys() != theirs.keys():
            found.append(f"state keys of {i}: {sorted(mine)} and {sorted(theirs)}")
        for key, value in mine.items():
            if isinstance(value, Tensor) and not same_bits(theirs[key], value):
                found.append(f"{key} of {i} {tuple(p.shape)}")
    return found


class Twins:
    """One optimizer in eager and one compiled, over equal parameters."""

    def __init__(
        self,
        name: str,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        backend_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.eager_params = make_params(shapes, dtype)
        self.params = make_params(shapes, dtype)
        self.eager = make(name, self.eager_params, reference=True, **options)
        self.optimizer = make(name, self.params, **options)
        self.step_function = compiled(self.optimizer, **(backend_options or {}))
        self.seed = 0

    def step(self, grads: bool = True) -> list[str]:
        """Do one step on both; what differs then."""
        if grads:
            self.seed += 1
            set_grads(self.eager_params, self.params, self.seed)
        eager_step(self.eager)
        self.step_function()
        return self.differences()

    def differences(self) -> list[str]:
        return differences(self.eager_params, self.eager, self.params, self.optimizer)

    def both(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return self.eager, self.optimizer
