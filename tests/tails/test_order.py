"""The order in which a total norm is added up: torch's, where the user says it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import fuseopt
from tests.tails.test_tail import MAKES, last_report
from tests.tails.twins import Side, call, differences, same, tail_of


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(9, 9) for _ in range(6)])


def sorted_groups(m: nn.Module) -> list[dict[str, Any]]:
    """Weights that decay first, then the others, as trainers have them."""
    every = [*m.parameters()]
    return [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]


def give(m: nn.Module, seed: int, without: int = -1) -> None:
    g = torch.Generator().manual_seed(seed)
    for k, p in enumerate(m.parameters()):
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
        if k == without:
            p.grad = None


def trained(m: nn.Module, clip: Any, steps: int, half: bool = False) -> list[Any]:
    """Norms and parameters. `clip`: what `tail` is given; None: eager's own."""
    if half:
        for p in [*m.parameters()][::3]:
            p.data = p.data.bfloat16()
    opt = AdamW(sorted_groups(m), lr=0.1)
    tail = None
    if clip is not None:
        given = {"clip_grad_norm": 0.1, **clip}
        tail = fuseopt.tail(opt, zero_grad=True, **given)
    found = []
    for k in range(steps):
        give(m, k, without=k - 4)
        if tail is None:
            found.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1))
            opt.step()
            opt.zero_grad()
        else:
            found.append(tail().norm)
    return [*found, *m.parameters()]


@pytest.mark.family(3)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("by", ["module", "parameters"])
def test_bits_of_a_clip_over_the_model(by: str, half: bool) -> None:
    want = trained(model(), None, 8, half)
    m = model()
    given = m if by == "module" else m.parameters()
    # each set of gradients has a graph then
    got = trained(m, {"clip_parameters": given, "fallback": "error"}, 8, half)
    assert all(map(same, got, want))
    report = fuseopt.reports()[-1]
    assert not report.fallback
    # ATen stacks norms of two dtypes, and a launch before the step adds them up
    assert report.launches == 2 + half
    assert [name for name, _ in report.externs] == ["aten.stack.default"] * half


def test_the_order_matters_here() -> None:
    """Without it the last bits differ, so that the test above can fail."""
    want, got = trained(model(), None, 4), trained(model(), {}, 4)
    assert not all(map(same, got, want))


def test_in_pieces_too() -> None:
    """With hooks around the step."""
    want = trained(model(), None, 4)
    m = model()
    opt = AdamW(sorted_groups(m), lr=0.1)
    opt.register_step_pre_hook(lambda *_: None)
    given = {"clip_grad_norm": 0.1, "zero_grad": True, "clip_parameters": m}
    tail = fuseopt.tail(opt, **given)
    got = []
    for k in range(4):
        give(m, k, without=k - 4)
        got.append(tail().norm)
    assert all(map(same, [*got, *m.parameters()], want))


@pytest.mark.slow
def test_a_model_of_which_a_part_is_trained() -> None:
    """What has no gradient may be of no optimizer; what has one may not."""
    m = model()
    parts = [*m.parameters()]
    tail = fuseopt.tail(SGD(parts[:6], lr=0.1), clip_grad_norm=0.1, clip_parameters=m)
    for _ in range(3):
        give(m, 0)
        for p in parts[6:]:
            p.grad = None
        tail()
    before = [p.detach().clone() for p in parts]
    give(m, 1)
    with pytest.raises(ValueError, match="no optimizer of the tail steps"):
        tail()
    assert all(map(torch.equal, parts, before))


def test_what_is_refused() -> None:
    m = model()
    parts = [*m.parameters()]
    opt = SGD(parts, lr=0.1)
    with pytest.raises(ValueError, match="twice"):
        fuseopt.tail(opt, clip_grad_norm=0.1, clip_parameters=[*parts, parts[0]])
    with pytest.raises(TypeError, match="a str among"):
        fuseopt.tail(opt, clip_grad_norm=0.1, clip_parameters=["weight"])
    tail = fuseopt.tail(opt, clip_grad_norm=0.1, clip_parameters=parts[1:])
    give(m, 0)
    with pytest.raises(ValueError, match=r"\[9, 9\] is not in clip_parameters"):
        tail()


@pytest.mark.family(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("name", ["adamw", "trust"])
def test_other_numbers_of_threads(
    name: str, norm_type: float, dtype: torch.dtype
) -> None:
    """Norms and steps are those of eager with as many, on which some of eager's own
    bits depend; their number may change between the calls of one tail.
    """
    sizes = [(40000,), (301, 403), (33,), (), (2**18 + 5,)]
    one, other = (Side(MAKES[name], sizes, dtype) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, norm_type=norm_type)
    before = torch.get_num_threads()
    try:
        for n, threads in enumerate([1, 2, 4, 3, 1, 2]):
            for side in (one, other):
                side.set_grads(n)
            torch.set_num_threads(threads)
            norm = one.eager(1.0, norm_type=norm_type)
            assert same(call(other, tail).norm, norm)
            assert differences(one, other) == []
    finally:
        torch.set_num_threads(before)
    assert last_report().launches == (3 if name == "trust" else 2)
