"""What a caller may have set around a step, and optimizers whose steps meet it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt

SHAPE = (8, 8)
#: The race is off: which step runs is not to depend on time.
OPTIONS = {"eager_if_faster": False}


class Passing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def setting(
    get: Callable[[], Any], put: Callable[[Any], Any], value: Any
) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def denormals() -> Any:
    return setting(lambda: False, torch.set_flush_denormal, True)


def precision() -> Any:
    get = torch.get_float32_matmul_precision
    return setting(get, torch.set_float32_matmul_precision, "medium")


STATES: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "no cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "default dtype": lambda: setting(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "device": lambda: torch.device("cpu"),
    "default device": lambda: setting(
        lambda: None, torch.set_default_device, torch.device("cpu")
    ),
    "inference": torch.inference_mode,
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "precision": precision,
    "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "denormals": denormals,
    "function mode": Passing,
    "dispatch mode": Dispatching,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, 1),
}
#: In which of the steps the state is on.
WHEN: dict[str, Callable[[int], bool]] = {
    "at first": lambda t: True,
    "later": lambda t: t > 1,
    "off later": lambda t: t < 2,
}


class Elementwise(Optimizer):
    """New tensors of the default dtype, counters, numbers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if "b" not in s:
                    s["b"], s["n"], s["c"] = torch.zeros_like(p), 0, torch.tensor(0.0)
                s["n"] += 1
                s["c"] += 1
                s["b"].mul_(0.9).add_(p.grad * 0.37, alpha=0.1)
                scale = s["b"].square().sqrt().add(1e-3 * s["n"])
                p.addcdiv_(s["b"], scale, value=-group["lr"])
                p.sub_(torch.full((), 0.1) * s["c"] * 1e-3)


class Products(Optimizer):
    """Products of matrices: of what is computed, of state and of parameters, of which
    autocast keeps the casts though they change.
    """

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if "b" not in s:
                    s["b"], s["n"] = torch.zeros_like(p), 0
                s["n"] += 1
                s["b"].mul_(0.9).add_(p.grad)
                x = s["b"] / (s["b"].norm() + 1e-7)
                y = p @ p.T
                p.mul_(0.99)
                y = torch.cat([y[:4], (p @ p.grad)[4:]])
                x = 1.5 * x - 0.5 * (x @ x.T) @ x + 1e-2 * y
                p.add_(x.to(p.dtype), alpha=-group["lr"] / s["n"])


class OwnContext(Optimizer):
    """A step that is in autocast by itself, whatever is around it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                with torch.autocast("cpu", torch.bfloat16):
                    x = p.grad @ p.grad.T
                with torch.autocast("cpu", enabled=False):
                    y = p.grad @ p.grad
                p.add_(x.to(p.dtype) - y, alpha=-0.01 * group["lr"])


class OwnOfParameters(OwnContext):
    """Autocast keeps what it casts in the step's own context, until that ends."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                with torch.autocast("cpu", torch.bfloat16):
                    p.sub_((p @ p.grad).to(p.dtype), alpha=0.01)
                    p.sub_((p @ p.grad).to(p.dtype), alpha=0.01)


class Orthogonal(OwnContext):
    """Products of what is computed from the momentum (Muon)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                if "b" not in s:
                    s["b"] = torch.zeros_like(p)
                s["b"].mul_(0.9).add_(p.grad)
                x = s["b"] / (s["b"].norm() + 1e-7)
                x = (1.5 * x - 0.5 * (x @ x.T) @ x).to(p.dtype)
                p.add_(x, alpha=-group["lr"])


class OfParameters(OwnContext):
    """A product of parameters, whose casts autocast keeps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p @ p.T @ p.grad, alpha=group["lr"] * 0.01)


SCRIPTS = {"autocast_step": Orthogonal, "autocast_mm": OfParameters}
KINDS: dict[str, type[Optimizer]] = {
    "elementwise": Elementwise,
    "products": Products,
    "tail": Products,
    "tail of AdamW": torch.optim.AdamW,
}
WAYS = ("compile", "torch.compile")


def compiled(kind: str, way: str, params: list[Any], opt: Any) -> Callable[[], Any]:
    """The step of a kind, compiled in one of two ways; way "" is eager."""
    if kind.startswith("tail"):
        if way:
            return fuseopt.tail(opt, clip_grad_norm=1.0, **OPTIONS)

        def trainer() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            opt.step()

        return trainer
    if way == "compile":
        step: Any = fuseopt.compile(opt, **OPTIONS).step
        return step  # type: ignore[no-any-return]
    if way:
        return torch.compile(opt.step, backend="fuseopt", options=OPTIONS)
    return opt.step  # type: ignore[no-any-return]


def held(opt: Optimizer) -> list[Any]:
    """Copies of the parameters and of all that the state holds."""
    params = [p for group in opt.param_groups for p in group["params"]]
    every = [*params, *(x for p in params for x in opt.state.get(p, {}).values())]
    return [x.detach().clone() if isinstance(x, Tensor) else x for x in every]


def alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        x.dtype == y.dtype and torch.equal(x, y)
        if isinstance(x, Tensor)
        else type(x) is type(y) and x == y
        for x, y in zip(one, other, strict=True)
    )


class Twin:
    """An optimizer, compiled in some way, with parameters and gradients of its own."""

    def __init__(self, kind: str, way: str, lanes: int) -> None:
        self.random = torch.Generator().manual_seed(5)
        self.params = [torch.nn.Parameter(self._draw()) for _ in range(lanes)]
        classes = {**SCRIPTS, "own": OwnContext, **KINDS}
        self.opt: Any = classes[kind](self.params, lr=0.1)  # type: ignore[call-arg]
        self.step = compiled(kind, way, self.params, self.opt)

    def _draw(self) -> Tensor:
        return torch.randn(SHAPE, generator=self.random)

    def set_grads(self) -> None:
        for p in self.params:
            p.grad = self._draw()

    def held(self) -> list[Any]:
        return held(self.opt)
