"""Numbers of each parameter, from the same graph: torch's own, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from tests.tails.test_tail import MAKES, last_report
from tests.tails.twins import SHAPES, Side, call, differences, same, tail_of


def stepped(side: Side, max_norm: float | None) -> torch.Tensor:
    """What eager does, one vector_norm for each number."""
    if side.scaler is not None:
        side.scaler.unscale_(side.opt)
    rows = []
    for p in side.params:
        if p.grad is None:
            rows.append([torch.zeros(()), torch.zeros(())])
        else:
            bad = (~p.grad.isfinite()).sum()
            rows.append([torch.linalg.vector_norm(p.grad), bad])
    were = [p.detach().clone() for p in side.params]
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(side.params, max_norm)
    if side.scaler is None:
        side.opt.step()
    else:
        side.scaler.step(side.opt)
        side.scaler.update()
    table = []
    for p, was, (norm, bad) in zip(side.params, were, rows, strict=True):
        size = torch.linalg.vector_norm(p.detach())
        change = torch.linalg.vector_norm(p.detach() - was)
        table.append(torch.stack([x.float() for x in (norm, size, change, bad)]))
    return torch.stack(table)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["adamw", "counting"])
def test_torchs_own_norms(name: str, scaled: bool, dtype: torch.dtype) -> None:
    """In the launches that there are anyway; also of steps that are skipped."""
    one, other = (Side(MAKES[name], dtype=dtype, scaled=scaled) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, zero_grad=True, stats=True)
    for n in range(6):
        for side in (one, other):
            side.set_grads(n, scaled and n in (0, 3))
        table = stepped(one, 1.0)
        out = call(other, tail)
        assert same(out.stats, table)
        assert differences(one, other) == []
    assert tail.stats_names == ("grad_norm", "param_norm", "update_norm", "nonfinite")
    assert last_report().launches == 2


def test_large_parameters_without_a_clip() -> None:
    """Registers, leftovers, threads: eager's order of sums at any size."""
    shapes = [(40000,), (257, 129), (33,), (0,), (3, 5, 7)]
    one, other = Side(MAKES["sgd"], shapes), Side(MAKES["sgd"], shapes)
    tail = tail_of(other, stats=True)
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
        assert same(call(other, tail).stats, stepped(one, None))
        assert differences(one, other, grads=True) == []
    assert last_report().launches == 1


#: As many lanes as are led, of five sizes: registers, leftovers, threads.
MANY = [(40000,), (257, 13), (33,), (0,), ()] * 4


@pytest.mark.family(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["adamw", "counting"])
def test_of_many_lanes_a_few_are_traced(
    name: str, scaled: bool, dtype: torch.dtype
) -> None:
    """Also where other gradients are None in each call, and others again."""
    one, other = (Side(MAKES[name], MANY, dtype, scaled) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, zero_grad=True, stats=True)
    for n in range(10):
        for side in (one, other):
            side.set_grads(n, scaled and n in (0, 5))
            for k in {4: [2, 7], 5: [7, 8], 6: [2, 7]}.get(n, []):
                side.params[k].grad = None
        table = stepped(one, 1.0)
        out = call(other, tail)
        assert same(out.stats, table)
        assert differences(one, other) == []
        if n == 2:
            kept, known = out.stats, table
    assert same(kept, known)
    assert last_report().launches == 2
    assert "10 of 20 lanes; they stand for the others" in last_report().traced


def test_they_come_and_go() -> None:
    """Each is a form of its own; nobody's table is another's."""
    one, other = (Side(MAKES["sgd"], [(5, 3), (7,)] * 10) for _ in range(2))
    tail = tail_of(other)
    for n in range(9):
        tail.stats = n % 3 > 0
        if n == 6:
            more = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
            for side, p in zip((one, other), more, strict=True):
                side.params.append(p)
                side.ema.append(p.detach().clone())
                side.opt.add_param_group({"params": [p]})
        for side in (one, other):
            side.set_grads(n)
        table = stepped(one, None)
        out = call(other, tail)
        assert same(out.stats, table) if n % 3 else out.stats is None
        assert differences(one, other, grads=True) == []


def test_nothing_is_read_twice_for_them() -> None:
    side = Side(MAKES["adamw"], [(4096,)] * 4, scaled=True)
    tail = tail_of(side, clip_grad_norm=1.0, zero_grad=True, stats=True)
    for n in range(3):
        side.set_grads(n)
        call(side, tail)
    report = last_report()
    moved = sum(k.bytes_per_element * k.elements for k in report.kernels)
    assert moved / (4 * 4096) < 32.2


@pytest.mark.slow
def test_switched_on_and_off() -> None:
    """A second graph, compiled once; nothing is left of it where it is off."""
    one, other = Side(MAKES["adamw"]), Side(MAKES["adamw"])
    tail = tail_of(other, clip_grad_norm=1.0)
    known = 0
    for n in range(10):
        for side in (one, other):
            side.set_grads(n)
        tail.stats = n % 3 == 2
        table = stepped(one, 1.0)
        out = call(other, tail)
        assert same(out.stats, table) if tail.stats else out.stats is None
        if n == 5:
            known = len(fuseopt.reports())
    assert len(fuseopt.reports()) == known
    assert differences(one, other) == []


def test_gradients_that_are_missing_and_several_optimizers() -> None:
    a, b = Side(MAKES["adamw"]), Side(MAKES["sgd"], SHAPES[:2])
    c, d = Side(MAKES["adamw"]), Side(MAKES["sgd"], SHAPES[:2])
    tail = fuseopt.tail([c.opt, d.opt], stats=True, fallback="error", check=True)
    for n in range(4):
        for side in (a, b, c, d):
            side.set_grads(n)
        for side in (a, c):
            side.params[2].grad = None
        table = torch.cat([stepped(a, None), stepped(b, None)])
        assert same(tail().stats, table)
    assert table[2, 0] == table[2, 2] == table[2, 3] == 0 < table[2, 1]


def test_in_pieces() -> None:
    one, other = (Side(MAKES["adamw"], scaled=True) for _ in range(2))
    seen: list[Any] = []
    other.opt.register_step_pre_hook(lambda *args: seen.append(args))
    tail = fuseopt.tail(other.opt, scaler=other.scaler, clip_grad_norm=1.0, stats=True)
    for n in range(4):
        for side in (one, other):
            side.set_grads(n, n == 2)
        table = stepped(one, 1.0)
        assert same(call(other, tail).stats, table)
    assert seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(dtype: torch.dtype) -> None:
    """The table was made of it, and all lanes were traced for that."""
    side = Side(MAKES["adamw"], SHAPES * 4)
    tail = tail_of(side, clip_grad_norm=1.0, stats=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for n in range(3):
            side.set_grads(n)
            for p in side.params:
                p.grad = p.grad.to(p.dtype)  # type: ignore[union-attr]
            out = call(side, tail)
    finally:
        torch.set_default_dtype(before)
    assert out.stats is not None
    assert out.stats.dtype == torch.float32
    assert "they stand for the others" in last_report().traced


def test_names_of_rows() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    tail = fuseopt.tail(opt, stats=True, names=net)
    assert tail.stats_rows == ["0.weight", "0.bias", "1.weight", "1.bias"]
    tail.names = ["first"]
    assert tail.stats_rows == ["first", "1", "2", "3"]
