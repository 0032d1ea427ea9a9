"""torch swaps no tensor that has a weak reference: a clip leaves none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler.session import session


@pytest.fixture(autouse=True)
def swaps() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])


#: Arguments of a clip, besides the parameters.
CLIPS: dict[str, dict[str, Any]] = {
    "plain": {"max_norm": 1.0},
    "raises": {"max_norm": 1.0, "error_if_nonfinite": True},
    "infinite": {"max_norm": 1.0, "norm_type": float("inf")},
    "one by one": {"max_norm": 1.0, "foreach": False},
    "absolute": {"max_norm": 1.0, "norm_type": 1.0},
}


def backward(m: torch.nn.Module) -> None:
    drawn = torch.randn(2, 4, dtype=torch.float64)
    m(drawn.to(next(m.parameters()).dtype)).square().sum().backward()


@pytest.mark.family(4)
@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_leaves_no_reference(name: str, clears: bool) -> None:
    """Neither to parameters nor to gradients, which are swapped too if there are any;
    not in its first call, and not in later ones with other dtypes.
    """
    ms = model(), model()
    clips: tuple[Any, Any] = torch.nn.utils.clip_grad_norm_, fuseopt.clip_grad_norm_
    for dtype in (torch.float64, torch.float32, torch.float64):
        for m, clip in zip(ms, clips, strict=True):
            torch.manual_seed(1)
            for _ in range(2):
                backward(m)
                clip(m.parameters(), **CLIPS[name])
            for p in m.parameters():
                assert not weakref.getweakrefs(p)
                assert p.grad is not None
                assert not weakref.getweakrefs(p.grad)
            if clears:
                m.zero_grad()
            m.to(dtype)
        for p, q in zip(ms[0].parameters(), ms[1].parameters(), strict=True):
            assert torch.equal(p, q)
            assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["step", "tail"])
def test_a_step_that_few_parameters_lead_leaves_no_reference(way: str) -> None:
    ps = [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(18)]
    opt = torch.optim.SGD(ps, momentum=0.9)
    if way == "step":
        step: Any = fuseopt.compile(opt).step
    else:
        step = fuseopt.tail(opt, clip_grad_norm=1.0)
    for _ in range(3):
        for p in ps:
            p.grad = torch.randn(3, 4)
        step()
    assert not any(map(weakref.getweakrefs, ps))


def test_a_state_dict_is_swapped_in() -> None:
    m, other = model(), model()
    backward(m)
    fuseopt.clip_grad_norm_(m.parameters(), 1.0)
    m.load_state_dict(other.state_dict())
    one, two = m[0].weight, other[0].weight
    torch.utils.swap_tensors(one, two)


@pytest.mark.slow
def test_clips_end_with_their_parameters() -> None:
    """Though nothing refers to these: by their memory, when others are clipped."""

    def used() -> None:
        m = model()
        backward(m)
        fuseopt.clip_grad_norm_(m.parameters(), 1.0)

    session.clips.clear()
    for _ in range(3):
        used()
        gc.collect()
    assert len(session.clips) == 1


def test_parameters_with_the_ids_of_others() -> None:
    """A clip is found by ids; what it was compiled for is compared."""
    kinds = (torch.float32, (3, 4)), (torch.float64, (5,)), (torch.float32, (2, 2))
    for n in range(12):
        dtype, shape = kinds[n % 3]
        p = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        p.grad = torch.full(shape, float(n + 1), dtype=dtype)
        q = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        q.grad = p.grad.clone()
        session.clips = {id(p): x for x in session.clips.values()}
        for clips in session.clips.values():
            clips.of = {(False, False, id(p)): x for x in clips.of.values()}
        norm = fuseopt.clip_grad_norm_([p], 1.0)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_([q], 1.0))
        assert torch.equal(p.grad, q.grad)
