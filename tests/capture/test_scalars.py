"""Numbers in every form a step may have them in: the bits of eager, in one kernel.

Each form is a step over two parameters `p`, their gradients `g`, and a dict `c` that
holds a Python counter `t`, a learning rate `lr` (changed by hand between calls), a 0-d
tensor counter `s` and a one-element tensor `one`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from fuseopt.backend import fuseopt as backend
from tests.steps import same_bits
from tests.zoo import leaves

Step = Callable[[list[Tensor], list[Tensor], dict[str, Any]], None]
FORMS: dict[str, Step] = {}
#: Forms that are compiled in more than one way, since their branch differs.
BRANCHES = {"branch", "parity"}
#: Forms whose first call has other text: what is a number handed back as a tensor, or a
#: tensor of symbolic numbers, in later calls is a constant there.
FIRST_DIFFERS = {"float_that_the_step_changes", "tensor_of_numbers"}
#: Both lanes read one number in memory that the step changes, so it comes before them.
SHARED = {"one_element_that_changes", "tensor_counter", "tensor_of_numbers"}


def form(step: Step) -> Step:
    FORMS[step.__name__] = step
    return step


@form
def int_counter(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.mul_(1 - 0.9 ** c["t"]).add_(y, alpha=c["t"])


@form
def bias_corrections(p, g, c):
    c["t"] += 1
    size = c["lr"] * math.sqrt(1 - 0.99 ** c["t"]) / (1 - math.pow(0.9, c["t"]))
    for x, y in zip(p, g, strict=True):
        x.addcdiv_(y, y.abs().add_(1.0), value=-size)


@form
def literals_like_those_that_stand_for_numbers(p, g, c):
    """The rate stood in calls to torch as the first of these."""
    for x, y in zip(p, g, strict=True):
        x.mul_(0.7390851332151607 + 1.0e-9).add_(y, alpha=c["lr"])
        x.sub_(0.7390851332151607 + 2.0e-9)


@form
def float_that_the_step_changes(p, g, c):
    c["lr"] = c["lr"] * 0.9 + 0.001
    for x, y in zip(p, g, strict=True):
        x.sub_(y, alpha=c["lr"])


@form
def least_and_largest(p, g, c):
    c["t"] += 1
    size = max(min(1.0, c["t"] / 3), c["lr"])
    for x, y in zip(p, g, strict=True):
        x.lerp_(y, min(size, 0.7))


@form
def sums_and_wholes(p, g, c):
    c["t"] += 1
    total = sum([c["t"], 2 * c["t"], c["t"] // 2, 7])
    for x, y in zip(p, g, strict=True):
        x.add_(y * (total / 3)).div_(int(c["lr"] * 100) + 1)


@form
def powers_of_numbers(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.mul_(c["t"] ** 0.25).add_(y, alpha=(c["t"] + 1) ** -1).mul_(c["lr"] ** 2)


@form
def signs_of_numbers(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.add_(-c["lr"] * y).sub_(abs(0.05 - c["lr"]) * y).add_(-(c["t"] - 20) * y)


@form
def numbers_from_the_left(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.copy_(c["lr"] - x).add_(c["lr"] / (2 + y.abs())).add_(c["lr"] ** y.abs())


@form
def divided_by_numbers(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.add_(y / c["t"]).div_(1 + c["lr"]).add_(torch.div(y, c["lr"]))


@form
def values_of_calls(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.addcmul_(y, y, value=c["lr"]).addcdiv_(y, y.abs() + 1, value=-c["lr"])
        x.add_(torch.addcmul(y, y, y, value=1 - 0.9 ** c["t"]))


@form
def filled(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.add_(torch.full_like(x, c["lr"])).add_(y.new_full(y.shape, 0.5 / c["t"]))
        y.fill_(c["lr"])


@form
def clamped(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.add_(y.clamp(-c["lr"], c["lr"])).add_(y.clamp(max=c["t"] * 0.1))
        x.clamp_(min=-3 * c["lr"])


@form
def chosen(p, g, c):
    for x, y in zip(p, g, strict=True):
        x.add_(torch.where(y > c["lr"], c["lr"], y)).masked_fill_(y < -1, c["lr"])


@form
def compared(p, g, c):
    for x, y in zip(p, g, strict=True):
        x.mul_(y.gt(c["lr"]).to(x.dtype)).add_((y <= -c["lr"]).float())


@form
def out_argument(p, g, c):
    for x, y in zip(p, g, strict=True):
        torch.mul(x, c["lr"], out=x)
        torch.add(x, y, alpha=c["lr"], out=x)


@form
def list_of_numbers(p, g, c):
    c["t"] += 1
    torch._foreach_mul_(p, [1 - 0.9 ** c["t"], c["lr"]])
    torch._foreach_add_(p, g, alpha=c["lr"])
    torch._foreach_addcdiv_(p, g, [y.abs() + 1 for y in g], [c["lr"], 0.5])


@form
def tensor_of_numbers(p, g, c):
    c["t"] += 1
    a, b = torch.tensor([1 - 0.9 ** c["t"], c["lr"]]).unbind()
    for x, y in zip(p, g, strict=True):
        x.mul_(a).addcmul_(y, b).add_(torch.tensor(c["lr"], dtype=torch.float64))


@form
def tensor_counter(p, g, c):
    c["s"] += 1
    for x, y in zip(p, g, strict=True):
        x.mul_(1 - 0.9 ** c["s"]).add_(y * (c["lr"] / c["s"].sqrt()))


@form
def one_element(p, g, c):
    for x, y in zip(p, g, strict=True):
        x.sub_(y * c["one"]).mul_(1 - c["one"] * c["lr"])


@form
def one_element_that_changes(p, g, c):
    c["one"].mul_(0.9).add_(c["lr"])
    for x, y in zip(p, g, strict=True):
        x.lerp_(y, c["one"].reshape(()).clamp(0, 1))


@form
def branch(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        if c["t"] > 5 and c["lr"] < 1:
            x.sub_(y, alpha=c["lr"])
        else:
            x.mul_(c["lr"])


@form
def parity(p, g, c):
    c["t"] += 1
    for x, y in zip(p, g, strict=True):
        x.add_(y, alpha=c["lr"] if c["t"] % 2 else -c["lr"])


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts how often a tensor's value is read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def make(seed: int) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    p, g = (
        [torch.randn(s, generator=generator) for s in ((4, 5), (7,))] for _ in range(2)
    )
    c = {"t": 2, "lr": 0.3, "s": torch.tensor(0.0), "one": torch.tensor([0.1])}
    return p, g, c


@pytest.mark.family(12)
@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_numbers(name: str) -> None:
    step = FORMS[name]
    fast = torch.compile(step, backend=backend, options={"fallback": "error"})
    p, g, c = make(0)
    q, h, d = make(0)
    graphs = []
    with torch.no_grad():
        for turn in range(8):
            for y, z, new in zip(g, h, make(turn)[1], strict=True):
                y.copy_(new)
                z.copy_(new)
            step(p, g, c)
            fast(q, h, d)
            graphs.append(len(fuseopt.reports()))
            found, wanted = dict(leaves([q, h, d])), dict(leaves([p, g, c]))
            for path, want in wanted.items():
                assert same_bits(found[path], want), f"call {turn + 1}: {path}"
            if turn in (2, 4, 5):
                c["lr"] *= 0.7
                d["lr"] *= 0.7
    assert graphs[-1] == graphs[-3], "changed numbers were compiled anew"
    launches = 2 if name in SHARED else 1
    for report in fuseopt.reports():
        assert report.launches <= launches
        assert {name for name, _ in report.externs} <= {"constant"}
    if name not in BRANCHES | FIRST_DIFFERS:
        sources = [[k.source for k in r.kernels] for r in fuseopt.reports()]
        assert all(s == sources[-1] for s in sources), "the text depends on a value"


@pytest.mark.parametrize("name", ["tensor_counter", "one_element"])
def test_a_tensor_is_not_read_on_the_host(name: str) -> None:
    """Its value goes from memory to the kernel; only Python's numbers are passed."""
    fast = torch.compile(FORMS[name], backend=backend, options={"fallback": "error"})
    p, g, c = make(0)
    with torch.no_grad():
        fast(p, g, c)
        with Reads() as reads:
            fast(p, g, c)
    assert reads.count == 0
