"""Numbers that move, beside complex tensors: as few compilations as for real ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from fuseopt.compiler.session import session
from tests.beside import WAYS
from tests.frozen import bits

DTYPES = (torch.complex64, torch.complex128)
#: What a step does with a parameter, its gradient, and a number that moves.
USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "addcdiv_": lambda p, g, n: p.addcdiv_(g, g.abs() + 1, value=-n),
    "addcdiv_ of complex": lambda p, g, n: p.addcdiv_(g, g * g + 3, value=-n),
    "addcdiv": lambda p, g, n: p.copy_(torch.addcdiv(p, g, g * g + 3, value=-n)),
    "addcmul_": lambda p, g, n: p.addcmul_(g, g.conj(), value=-n),
    "addcmul": lambda p, g, n: p.copy_(torch.addcmul(p, g, g, value=-n)),
    "div": lambda p, g, n: p.sub_(g.div(1 + n)),
    "div_": lambda p, g, n: p.div_(1 + n),
    "truediv": lambda p, g, n: p.sub_(g / (1 + n)),
    "rdiv": lambda p, g, n: p.sub_(n / (g + 3)),
    "true_divide": lambda p, g, n: p.sub_(torch.true_divide(g, 1 + n)),
    "mul": lambda p, g, n: p.sub_(g * n),
    "rmul": lambda p, g, n: p.sub_(n * g),
    "mul_": lambda p, g, n: p.mul_(1 - n),
    "add_": lambda p, g, n: p.add_(g, alpha=-n),
    "add a number": lambda p, g, n: p.add_(n),
    "sub_": lambda p, g, n: p.sub_(g, alpha=n),
    "sub a number": lambda p, g, n: p.copy_(p - n),
    "rsub": lambda p, g, n: p.copy_(n - p),
    "lerp_": lambda p, g, n: p.lerp_(g, n),
    "lerp": lambda p, g, n: p.copy_(torch.lerp(p, g, n)),
    "full_like": lambda p, g, n: p.add_(torch.full_like(p, n)),
    "where": lambda p, g, n: p.copy_(torch.where(g.real > 0, p * n, p)),
    "foreach addcdiv_": lambda p, g, n: torch._foreach_addcdiv_(
        [p], [g], [g * g + 3], value=-n
    ),
    "foreach addcmul_": lambda p, g, n: torch._foreach_addcmul_([p], [g], [g], -n),
    "foreach add_": lambda p, g, n: torch._foreach_add_([p], [g], alpha=-n),
    "foreach mul_": lambda p, g, n: torch._foreach_mul_([p], 1 - n),
    "foreach div_": lambda p, g, n: torch._foreach_div_([p], 1 + n),
    "foreach lerp_": lambda p, g, n: torch._foreach_lerp_([p], [g], n),
    "as real": lambda p, g, n: torch.view_as_real(p).add_(
        torch.view_as_real(g), alpha=-n
    ),
    "real and complex": lambda p, g, n: p.sub_(g.abs() * n + g / (1 + n)),
}


def moving(use: Callable[[Any, Any, Any], Any], of: str) -> type[Optimizer]:
    """An optimizer of one use, of a rate or of a number that it counts."""

    class Moves(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["n"] = state.get("n", 0) + 1
                    number = group["lr"]
                    if of == "counter":
                        number = number / (1 - 0.9 ** state["n"])
                    use(p, p.grad, number)

    return Moves


def train(way: str, n: int, kind: Any, dtype: torch.dtype) -> tuple[list[Any], int]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(3, 4, dtype=dtype)) for _ in range(n)]
    opt = kind(ps)
    step = opt.step if way == "eager" else WAYS[way](opt)
    known, seen = len(session.reports), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for t in range(8):
            opt.param_groups[0]["lr"] = 0.01 / (1 + t)
            for p in ps:
                p.grad = torch.randn(3, 4, dtype=dtype)
            step()
            seen.append([bits(p) for p in ps])
    return seen, len(session.reports) - known


@pytest.mark.family(450)
@pytest.mark.parametrize("n", [4, 18])
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("of", ["rate", "counter"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("use", USES)
def test_a_number_that_moves_compiles_nothing_anew(
    use: str, dtype: torch.dtype, of: str, way: str, n: int
) -> None:
    kind = moving(USES[use], of)
    want, _ = train("eager", n, kind, dtype)
    got, compiled = train(way, n, kind, dtype)
    assert got == want
    assert 1 <= compiled <= 2
