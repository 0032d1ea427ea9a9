"""Steps of DTensors that one call of C repeats, and what changes between two."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fuseopt.replicate.single_call import SingleCall
from tests.replicate.steady_twins import Count
from tests.shards import assert_same, local
from tests.shards.steady import (
    adamw,
    first,
    give,
    momentum,
    params_of,
    state_of,
    swap_part,
)
from tests.shards.steps import WAYS, parameters, step_of
from tests.shards.test_steady import (
    GIVEN,
    HELD,
    OF_A_TENSOR,
    of_a_subclass,
    of_another_size,
    on_all,
    set_rate,
    to_be_added_up,
)

#: Calls before a change and after it.
BEFORE, AFTER = 10, 12
Change = Callable[[Optimizer, DeviceMesh], object]


@pytest.fixture
def single() -> Iterator[list[bool]]:
    """Whether C did each attempt to repeat a step."""
    with Count() as count:
        yield count.launched


def walk(
    way: str,
    mesh: DeviceMesh,
    change: Change,
    make: Callable[[list[Any]], Optimizer],
    single: list[bool],
    made: Callable[[Optimizer, str], Callable[[], Any]] = step_of,
) -> Optimizer:
    """Do steps, and change something before one. C must do the one before it, and the
    last one.
    """
    optimizer = make(parameters(mesh, 20))
    step = made(optimizer, way)
    for k in range(BEFORE + AFTER):
        give(params_of(optimizer), k)
        if k == BEFORE:
            change(optimizer, mesh)
        single.clear()
        step()
        if way and k == BEFORE - 1:
            assert single == [True]
    return optimizer


def nothing(o: Optimizer, mesh: DeviceMesh) -> None:
    """Change nothing."""


def other_grad_mode(o: Optimizer, mesh: DeviceMesh) -> None:
    o.defaults["differentiable"] = False


def hooked(o: Optimizer, mesh: DeviceMesh) -> None:
    """Run a hook once, which steps on other gradients."""
    handle: Any = None

    def hook(*_: Any) -> None:
        give(params_of(o), 99)
        handle.remove()

    handle = o.register_step_pre_hook(hook)


def other_threads(o: Optimizer, mesh: DeviceMesh) -> None:
    torch.set_num_threads(1)


def as_a_view(t: Any) -> None:
    """Its part is a view of larger memory."""
    part = local(t).detach()
    memory = torch.zeros(part.numel() + 5)
    t._local_tensor = memory[3:-2].view(part.shape).copy_(part)


def transposed(t: Any) -> None:
    t._local_tensor = local(t).detach().mT.contiguous().mT


def moved_storage(t: Any) -> None:
    """The same tensor and storage, with other memory."""
    storage = local(t).untyped_storage()
    storage.resize_(64 * storage.nbytes() + 4096)


def on_another_mesh(o: Optimizer, mesh: DeviceMesh) -> None:
    """One parameter, with its gradient and its state."""
    p = first(o)
    other = DeviceMesh("cpu", mesh.mesh.clone())
    held = [x for x in o.state[p].values() if isinstance(x, DTensor)]
    for t in (p, p.grad, *held):
        t._spec = dataclasses.replace(t._spec, mesh=other)


def parts_exchanged(o: Optimizer, mesh: DeviceMesh) -> None:
    """Two DTensors of the state, of one layout."""
    both = [x for x in o.state[first(o)].values() if isinstance(x, DTensor)]
    if len(both) == 2:
        parts = [*map(local, both)]
        both[0]._local_tensor, both[1]._local_tensor = reversed(parts)
        for part in parts:
            part.abs_()  # a root of these is taken


def like_another(o: Optimizer, mesh: DeviceMesh) -> None:
    """A gradient is replaced by one of the same layout."""
    grad = first(o).grad
    first(o).grad = DTensor(local(grad) * 3, grad._spec, requires_grad=False)


OF_A_TENSOR = [*OF_A_TENSOR, as_a_view, moved_storage]
OF_ALL = [on_another_mesh, parts_exchanged, like_another]
OF_STATE = [lambda o, m, change=change: change(state_of(o)) for change in OF_A_TENSOR]
OF_PARAMETER = [lambda o, m, change=change: change(first(o)) for change in OF_A_TENSOR]
CHANGES: dict[str, Change] = {
    "nothing": nothing,
    "grad mode": other_grad_mode,
    "hook": hooked,
    "threads": other_threads,
    "rate": set_rate,
    **{f"held: {change.__name__}": change for change in (*HELD, *OF_ALL)},
    **{f"gradient: {change.__name__}": change for change, _, _ in GIVEN},
    **{f"state: {f.__name__}": g for f, g in zip(OF_A_TENSOR, OF_STATE, strict=True)},
    **{f"own: {f.__name__}": g for f, g in zip(OF_A_TENSOR, OF_PARAMETER, strict=True)},
}


@pytest.mark.family(12)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_change(mesh: DeviceMesh, single: list[bool], make: Any, name: str) -> None:
    if "state" in name or name in ("held: move_all", "held: betas"):
        make = adamw  # it has this state
    threads = torch.get_num_threads()
    try:
        want = walk("", mesh, CHANGES[name], make, single)
        torch.set_num_threads(threads)
        got = walk(WAYS[0], mesh, CHANGES[name], make, single)
    finally:
        torch.set_num_threads(threads)
    assert_same(got, want)


@pytest.mark.family(4)
@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize(
    "change", [to_be_added_up, on_all, of_a_subclass, of_another_size]
)
def test_gradients_that_only_eager_can_take(
    mesh: DeviceMesh, single: list[bool], change: Change
) -> None:
    want = walk("", mesh, change, momentum, single)
    assert_same(walk(WAYS[0], mesh, change, momentum, single), want)


@pytest.mark.parametrize("of", [state_of, first])
def test_transposed_parts_run_in_eager(
    mesh: DeviceMesh, single: list[bool], of: Callable[[Any], Any]
) -> None:
    def change(o: Optimizer, mesh: DeviceMesh) -> None:
        transposed(of(o))

    want = walk("", mesh, change, adamw, single)
    with pytest.warns(RuntimeWarning, match=r"runs in eager.* (layout|laid|size)"):
        got = walk(WAYS[0], mesh, change, adamw, single)
    assert_same(got, want)


@pytest.mark.parametrize("way", WAYS)
def test_it_does_a_call_again_after_a_change(
    mesh: DeviceMesh, single: list[bool], way: str
) -> None:
    for change in (nothing, set_rate):
        walk(way, mesh, change, adamw, single)
        assert single == [True]


def test_versions_are_counted(mesh: DeviceMesh, single: list[bool]) -> None:
    """Of the whole and of its part, but of no parameter without a gradient."""

    def without(o: Optimizer, mesh: DeviceMesh) -> None:
        params_of(o)[2].grad = None

    optimizer = adamw(parameters(mesh, 20))
    step = step_of(optimizer, WAYS[0])
    params = params_of(optimizer)
    for k in range(12):
        give(params, k)
        without(optimizer, mesh)
        single.clear()
        before = [(p._version, local(p)._version) for p in params]
        step()
    assert single == [True]
    after = [(p._version, local(p)._version) for p in params]
    for k, ((whole, part), now) in enumerate(zip(before, after, strict=True)):
        assert now == ((whole, part) if k == 2 else (whole + 1, part + 1))


def test_versions_that_c_cannot_count(
    mesh: DeviceMesh, single: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python counts them then."""
    optimizer = adamw(parameters(mesh, 20))
    step = step_of(optimizer, WAYS[0])
    params = params_of(optimizer)
    made = SingleCall.__init__

    def cannot(self: Any, *args: Any) -> None:
        made(self, *args)
        *self.launches, _ = self.launches
        self.launches.append(functools.partial(int, -1))

    monkeypatch.setattr(SingleCall, "__init__", cannot)
    for k in range(12):
        give(params, k)
        single.clear()
        before = [p._version for p in params]
        step()
    assert single == [True]
    assert [p._version for p in params] == [x + 1 for x in before]


def test_no_reference_is_lost_or_kept(mesh: DeviceMesh, single: list[bool]) -> None:
    optimizer = adamw(parameters(mesh, 20))
    step = step_of(optimizer, WAYS[0])
    params = params_of(optimizer)
    for k in range(12):
        give(params, k)
        step()
    kept: list[Any] = [DTensor, torch.Tensor, vars(optimizer), optimizer.state]
    for p in params:
        kept += [p, local(p), p._spec, p.grad, local(p.grad), optimizer.state[p]]
        kept += list(optimizer.state[p].values())
    single.clear()
    step()
    before = [*map(sys.getrefcount, kept)]
    for _ in range(300):
        step()
    assert [*map(sys.getrefcount, kept)] == before
    assert set(single) == {True}


def test_a_part_of_a_gradient_that_moves(mesh: DeviceMesh, single: list[bool]) -> None:
    """In each call, as after `zero_grad(set_to_none=True)`."""

    def moved(o: Optimizer, mesh: DeviceMesh) -> None:
        for p in params_of(o):
            swap_part(p.grad)

    want = walk("", mesh, moved, adamw, single)
    assert_same(walk(WAYS[0], mesh, moved, adamw, single), want)
    assert single == [True]
