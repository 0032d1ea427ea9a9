"""Steps of DTensors that are compared in C: any change leaves that way and has eager's
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import Optimizer

from fuseopt.inputs.parts import GRADIENTS, OTHER
from tests.shards import assert_same, local, spread
from tests.shards.steady import (
    AFTER,
    BEFORE,
    SAME,
    STEADY,
    Change,
    Seen,
    adamw,
    another_spec,
    at_the_end,
    first,
    freeze,
    give,
    give_data,
    momentum,
    move_all,
    params_of,
    set_storage,
    state_of,
    swap_part,
    swap_spec,
    walk,
)
from tests.shards.steps import WAYS, parameters, step_of

OF_A_TENSOR: list[Callable[[Any], None]] = [
    swap_part,
    give_data,
    set_storage,
    swap_spec,
]


@pytest.mark.parametrize("way", WAYS)
def test_a_steady_step_is_compared_in_c(mesh: DeviceMesh, seen: Seen, way: str) -> None:
    want, got = walk("", mesh), walk(way, mesh, seen=seen)
    assert_same(got, want)
    assert seen.calls[BEFORE - 1 :] == [STEADY] * (AFTER + 2)


@pytest.mark.family(9)
@pytest.mark.parametrize("of", ["parameter", "state"])
@pytest.mark.parametrize("change", OF_A_TENSOR, ids=lambda f: f.__name__)
def test_a_tensor_changes(mesh: DeviceMesh, seen: Seen, change: Any, of: str) -> None:
    def now(o: Optimizer, m: DeviceMesh) -> None:
        change(first(o) if of == "parameter" else state_of(o))

    want, got = walk("", mesh, now), walk(WAYS[0], mesh, now, seen=seen)
    assert_same(got, want)
    assert seen.calls[BEFORE - 1] == STEADY
    assert seen.calls[BEFORE][0] == [OTHER]
    assert seen.calls[-1] == at_the_end(change is swap_part and of == "state")


@pytest.mark.parametrize("of", ["parameter", "state"])
def test_a_part_moves_within_its_storage(mesh: DeviceMesh, seen: Seen, of: str) -> None:
    ends, starts = [], {BEFORE: 0, 2 * BEFORE: 3}
    for way in ("", WAYS[0]):
        optimizer = adamw(parameters(mesh, 20))
        step = step_of(optimizer, way)
        memory = torch.zeros(local(first(optimizer)).numel() + 3)
        for k in range(3 * BEFORE):
            give(params_of(optimizer), k)
            if k in starts:
                t = first(optimizer) if of == "parameter" else state_of(optimizer)
                content = local(t).detach().clone()
                now = memory[starts[k] :][: content.numel()].view(content.shape)
                local(t).data = now.copy_(content)
            seen.calls.append(([], False))
            step()
            if way and k in starts:
                assert seen.calls[-1][0] == [OTHER]
        ends.append(optimizer)
    assert_same(ends[1], ends[0])
    assert seen.calls[-1] == STEADY


def replace_state(o: Optimizer, mesh: DeviceMesh) -> None:
    old = state_of(o)
    o.state[first(o)]["exp_avg"] = DTensor(
        local(old) * 2, old._spec, requires_grad=False
    )


def replace_dict(o: Optimizer, mesh: DeviceMesh) -> None:
    o.state[first(o)] = dict(o.state[first(o)])


def drop_state(o: Optimizer, mesh: DeviceMesh) -> None:
    del o.state[first(o)]


def clear_state(o: Optimizer, mesh: DeviceMesh) -> None:
    o.state.clear()


def set_rate(o: Optimizer, mesh: DeviceMesh) -> None:
    o.param_groups[0]["lr"] = 0.05


def betas(o: Optimizer, mesh: DeviceMesh) -> None:
    """Numbers, but in a tuple."""
    o.param_groups[0]["betas"] = 0.8, 0.99


def set_option(o: Optimizer, mesh: DeviceMesh) -> None:
    o.param_groups[0]["maximize"] = True


def set_attribute(o: Optimizer, mesh: DeviceMesh) -> None:
    o.note = "another"  # type: ignore[attr-defined]


def other_groups(o: Optimizer, mesh: DeviceMesh) -> None:
    o.param_groups = [dict(group) for group in o.param_groups]


def other_list(o: Optimizer, mesh: DeviceMesh) -> None:
    o.param_groups[0]["params"] = [*o.param_groups[0]["params"]]


def fewer(o: Optimizer, mesh: DeviceMesh) -> None:
    o.state.pop(o.param_groups[0]["params"].pop())


def more(o: Optimizer, mesh: DeviceMesh) -> None:
    new = parameters(mesh, 3)
    o.add_param_group({"params": new, "lr": 0.2})
    give(new, 77)


def load(o: Optimizer, mesh: DeviceMesh) -> None:
    o.load_state_dict(o.state_dict())


def another_parameter(o: Optimizer, mesh: DeviceMesh) -> None:
    """Spread otherwise than the one before."""
    params = o.param_groups[0]["params"]
    o.state.pop(params[0])
    whole = torch.arange(40.0).reshape(8, 5)
    params[0] = torch.nn.Parameter(spread(whole, mesh, [Shard(1)]))
    give(params, 7)


HELD = [replace_state, replace_dict, drop_state, clear_state, freeze]
HELD += [set_attribute, other_groups, other_list, fewer, more, load, another_parameter]
HELD += [move_all, betas, set_option]


@pytest.mark.family(6)
@pytest.mark.parametrize("change", HELD, ids=lambda f: f.__name__)
def test_what_is_held_changes(mesh: DeviceMesh, seen: Seen, change: Change) -> None:
    want = walk("", mesh, change)
    got = walk(WAYS[0], mesh, change, seen=seen)
    assert_same(got, want)
    assert seen.calls[BEFORE - 1] == STEADY
    assert seen.calls[BEFORE][0] in ([OTHER], [])  # begun anew, it has no guard
    assert seen.calls[-1] == at_the_end(change is replace_state)


@pytest.mark.slow
def test_rates_are_followed(mesh: DeviceMesh, seen: Seen) -> None:
    """Numbers that a schedule moves at each call, of groups and of the optimizer."""

    def make(params: list[Any]) -> Optimizer:
        groups = [{"params": params[:9]}, {"params": params[9:], "lr": 0.2}]
        return adamw(groups)

    def call(own: list[Optimizer], step: Callable[[], Any]) -> None:
        for group in own[0].param_groups:
            group["lr"] *= 0.9
        own[0].calls = getattr(own[0], "calls", 0) + 1  # type: ignore[attr-defined]
        step()

    ends = []
    for way in ("", *WAYS):
        own: list[Optimizer] = []

        def made(params: list[Any], own: list[Optimizer] = own) -> Optimizer:
            own.append(make(params))
            return own[0]

        def called(step: Any, _: bool, own: list[Optimizer] = own) -> None:
            call(own, step)

        seen.calls.clear()
        ends.append(walk(way, mesh, make=made, seen=seen, call=called))
        assert not way or seen.calls[-2:] == [STEADY] * 2
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


def test_a_rate_that_moves_once(mesh: DeviceMesh, seen: Seen) -> None:
    want, got = walk("", mesh, set_rate), walk(WAYS[0], mesh, set_rate, seen=seen)
    assert_same(got, want)
    assert [found for found, _ in seen.calls[BEFORE:]] == [[SAME]] * (AFTER + 1)
    assert seen.calls[-1] == STEADY


def no_gradient(o: Optimizer, mesh: DeviceMesh) -> None:
    first(o).grad = None


def no_gradients(o: Optimizer, mesh: DeviceMesh) -> None:
    for p in params_of(o):
        p.grad = None


def alike_spec(o: Optimizer, mesh: DeviceMesh) -> None:
    p = first(o)
    p.grad = DTensor(local(p.grad), another_spec(p), requires_grad=False)


def in_place(o: Optimizer, mesh: DeviceMesh) -> None:
    """The gradient that the last call had, in other memory."""
    p = first(o)
    swap_part(p.grad)


def of_a_subclass(o: Optimizer, mesh: DeviceMesh) -> None:
    p = first(o)
    part = torch.nn.Buffer(local(p.grad).clone())
    p.grad = DTensor(part.as_subclass(Part), p._spec, requires_grad=False)


def of_another_size(o: Optimizer, mesh: DeviceMesh) -> None:
    """The part alone: eager computes with it, but no parameter can have it."""
    p = first(o)
    p.grad = DTensor(local(p.grad)[:1].clone(), p._spec, requires_grad=False)


def strided(o: Optimizer, mesh: DeviceMesh) -> None:
    """A part that lies otherwise: the plan is another one."""
    p = next(p for p in params_of(o) if local(p).dim() == 2 and local(p).numel() > 8)
    part = local(p.grad).t().contiguous().t()
    p.grad = DTensor(part, p._spec, requires_grad=False)


class Part(torch.Tensor):
    """A tensor of another class, with nothing else of its own."""


def to_be_added_up(o: Optimizer, mesh: DeviceMesh) -> None:
    p = next(p for p in params_of(o) if p._spec.placements == (Replicate(),))
    p.grad = DTensor.from_local(local(p.grad), mesh, [Partial()])


def on_all(o: Optimizer, mesh: DeviceMesh) -> None:
    p = params_of(o)[0]
    p.grad = spread(torch.arange(40.0).reshape(8, 5), mesh, [Replicate()])


GIVEN: list[tuple[Change, list[int], bool]] = [
    (no_gradient, [SAME], True),
    (no_gradients, [GRADIENTS], False),
    (alike_spec, [GRADIENTS], False),
    (in_place, [SAME], False),
    (strided, [SAME], True),
]


@pytest.mark.family(5)
@pytest.mark.parametrize(
    ("change", "found", "put"), GIVEN, ids=lambda x: getattr(x, "__name__", "")
)
def test_gradients_change(
    mesh: DeviceMesh, seen: Seen, change: Change, found: list[int], put: bool
) -> None:
    want, got = walk("", mesh, change), walk(WAYS[0], mesh, change, seen=seen)
    assert_same(got, want)
    assert seen.calls[BEFORE - 1] == STEADY
    assert seen.calls[BEFORE] == (found, put)
    assert seen.calls[-1] == STEADY


@pytest.mark.family(4)
@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize(
    "change", [to_be_added_up, on_all, of_a_subclass, of_another_size]
)
def test_gradients_that_only_eager_can_take(
    mesh: DeviceMesh, seen: Seen, change: Change
) -> None:
    want = walk("", mesh, change, momentum)
    got = walk(WAYS[0], mesh, change, momentum, seen)
    assert_same(got, want)
    assert seen.calls[BEFORE - 1] == STEADY
    late = change is of_another_size  # seen where it is compared with the plan's
    assert seen.calls[BEFORE] == (([SAME], True) if late else ([GRADIENTS], False))
    assert seen.calls[-1] == STEADY
