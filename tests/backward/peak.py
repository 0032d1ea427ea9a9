"""Bytes that are alive at the peak of a training step, counted as tensors come and go.

    python -m tests.backward.peak       the table of docs/backward.md

A mode sees every call of ATen and counts each storage from when it is first seen until
it is freed: the same number in each run. Where a mode is on, Dynamo lets steps run as
they are; so it is off while they run, which make no tensors once they are compiled.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import fuseopt

WIDTH, LAYERS, TOKENS = 128, 4, 2000


class Attention(torch.nn.Module):
    """Causal attention with 4 heads, as in GPT-2."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(n, 3 * n)
        self.out = torch.nn.Linear(n, n)

    def forward(self, x: Tensor) -> Tensor:
        b, t, n = x.shape
        q, k, v = (
            y.view(b, t, 4, n // 4).transpose(1, 2) for y in self.qkv(x).split(n, dim=2)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, n))


class Layer(torch.nn.Module):
    """A layer of GPT-2."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(n), torch.nn.LayerNorm(n)
        self.attention = Attention(n)
        self.wide, self.narrow = torch.nn.Linear(n, 4 * n), torch.nn.Linear(4 * n, n)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.second(x))))


class GPT(torch.nn.Module):
    """GPT-2 without dropout; the embedding is the last matrix as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(TOKENS, WIDTH)
        self.places = torch.nn.Embedding(16, WIDTH)
        self.layers = torch.nn.ModuleList([Layer(WIDTH) for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.tokens.weight.T


class Peaks(NamedTuple):
    """Bytes at the peaks of a step: of gradients of parameters, and of all tensors."""

    gradients: int
    all: int


class Counter(TorchDispatchMode):
    """Counts the storages that are alive, and of them those of gradients."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__()
        self.params = params
        self.sizes: dict[int, int] = {}
        self.now = self.peak = self.grads = 0

    def begin(self, alive: list[Tensor]) -> None:
        """Count from now on, when these are alive."""
        for t in alive:
            self._see(t)
        self.peak, self.grads = self.now, 0

    def _see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        weakref.finalize(storage, self._gone, key)
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._see(t)
        self.measure()
        return out

    def measure(self) -> None:
        """How much do gradients take now?"""
        grads = {
            p.grad.untyped_storage()._cdata: p.grad.untyped_storage().nbytes()
            for p in self.params
            if p.grad is not None
        }
        self.grads = max(self.grads, sum(grads.values()))


def peaks(
    model: torch.nn.Module, begin: Callable[[], tuple[Any, Callable[[Any], None]]]
) -> Peaks:
    """The peaks of a training step, after two that make state and kernels.

    `begin()` gives the optimizer of a model, and a training step.
    """
    torch.manual_seed(1)
    ids = torch.randint(0, TOKENS, (2, 16))
    params = [*model.parameters()]
    counter = Counter(params)
    # before the optimizer's own hooks: the moment at which a bucket is full
    for p in params:
        p.register_post_accumulate_grad_hook(lambda _: counter.measure())
    opt, step = begin()
    for _ in range(3):
        step(ids)
    gc.collect()
    state = [x for own in opt.state.values() for x in own.values()]
    counter.begin([*params, *(x for x in state if isinstance(x, Tensor))])
    with counter:
        step(ids)
    return Peaks(counter.grads, counter.peak)


def losses(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """The loss of next tokens."""
    out = model(ids)[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(out, ids[:, 1:].flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-3)


def plainly() -> Peaks:
    """The peaks of a step after the backward."""
    torch.manual_seed(0)
    model = GPT()

    def begin() -> Any:
        opt = fuseopt.compile(adamw([*model.parameters()]))

        def step(ids: Tensor) -> None:
            losses(model, ids).backward()
            with _disable_current_modes():
                opt.step()
            opt.zero_grad()

        return opt, step

    return peaks(model, begin)


def in_backward(buckets: Any) -> Peaks:
    """The peaks where each bucket is stepped in the backward."""
    torch.manual_seed(0)
    model = GPT()

    def begin() -> Any:
        opt = fuseopt.in_backward(model, adamw, buckets=buckets)
        step = opt._stepper.step

        def unseen(params: Any) -> None:
            with _disable_current_modes():
                step(params)

        opt._stepper.step = unseen  # type: ignore[method-assign]
        return opt, lambda ids: losses(model, ids).backward()

    return peaks(model, begin)


def table() -> list[str]:
    """The rows of docs/backward.md."""
    plain = plainly()
    rows = ["| | gradients | all tensors |", "|---|---|---|"]
    for name, got in (
        ("`backward(); step(); zero_grad()`", plain),
        ("`buckets=1 << 20`", in_backward(1 << 20)),
        ('`buckets="layer"`', in_backward("layer")),
    ):
        rows.append(
            f"| {name} | {_said(got[0], plain[0])} | {_said(got[1], plain[1])} |"
        )
    return rows


def _said(n: int, of: int) -> str:
    share = "" if n == of else f" ({round(100 * n / of)}%)"
    return f"{n / 2**20:.2f} MiB{share}"


if __name__ == "__main__":
    print("\n".join(table()))
