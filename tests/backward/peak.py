"""Bytes that are alive at the peak of a training step of a small GPT-2.

    python -m tests.backward.peak       what each way takes

What torch's allocator has given is counted by its own profiler: the same number in each
run. (A mode that sees calls of ATen would change it: where one is on, the engine adds
up gradients in tensors of their own.)
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fuseopt
from bench.allocations import Allocations

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
    """GPT-2 without dropout; the embedding is the matrix of the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(TOKENS, WIDTH)
        self.places = torch.nn.Embedding(16, WIDTH)
        self.layers = torch.nn.ModuleList([Layer(WIDTH) for _ in range(LAYERS)])
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Peaks(NamedTuple):
    """Bytes at the peaks of a step: of gradients of parameters, and of all tensors."""

    gradients: int
    all: int


class Gradients:
    """The most bytes that gradients of parameters had, asked as each of them comes."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.most = 0
        # before the optimizer's own hooks: the moment at which a bucket is full
        for p in params:
            p.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, _: Tensor) -> None:
        sizes = [p.grad.nbytes for p in self.params if p.grad is not None]
        self.most = max(self.most, sum(sizes))


def peaks(begin: Callable[[torch.nn.Module], Callable[[Tensor], None]]) -> Peaks:
    """The peaks of a training step, after three that make state and kernels.

    `begin(model)` gives a training step.
    """
    torch.manual_seed(0)
    with Allocations() as counted:
        model = GPT()
        gradients = Gradients([*model.parameters()])
        step = begin(model)
        ids = torch.randint(0, TOKENS, (1, 4))
        for _ in range(3):
            step(ids)
        gc.collect()
        gradients.most = 0
        with counted.region("step"):
            step(ids)
    return Peaks(gradients.most, counted.peaks("step")[0])


def losses(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """The loss of next tokens."""
    out = model(ids)[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(out, ids[:, 1:].flatten())


def adamw(params: Any, **form: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-3, **form)


def momentum(params: Any, **form: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 1e-3, momentum=0.9, **form)


def plainly(build: Any = adamw, compiled: bool = False, **form: Any) -> Peaks:
    """The peaks of a step after the backward, in eager or compiled."""

    def begin(model: torch.nn.Module) -> Any:
        opt = build([*model.parameters()], **form)
        if compiled:
            opt = fuseopt.compile(opt)

        def step(ids: Tensor) -> None:
            losses(model, ids).backward()
            opt.step()
            opt.zero_grad()

        return step

    return peaks(begin)


def in_backward(build: Any = adamw, buckets: Any = "layer") -> Peaks:
    """The peaks where each bucket is stepped in the backward."""

    def begin(model: torch.nn.Module) -> Any:
        opt = fuseopt.in_backward(model, build, buckets=buckets)

        def step(ids: Tensor) -> None:
            losses(model, ids).backward()
            opt.zero_grad()

        return step

    return peaks(begin)


def main() -> None:
    """Print what each way takes."""
    for build in (adamw, momentum):
        for name, got in (
            ("for-loop", plainly(build, foreach=False)),
            ("foreach", plainly(build, foreach=True)),
            ("compiled", plainly(build, compiled=True)),
            ("in backward, 1 MiB", in_backward(build, 1 << 20)),
            ("in backward, layer", in_backward(build)),
        ):
            print(
                f"{build.__name__:10}{name:20}"
                f"gradients {got.gradients / 2**20:6.2f} MiB"
                f"  all {got.all / 2**20:6.2f} MiB"
            )


if __name__ == "__main__":
    main()
