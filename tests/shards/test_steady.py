"""Steps of DTensors that are compared in C: any change leaves that way and has eager's
bits.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import SGD, AdamW, Optimizer
from torch.overrides import BaseTorchFunctionMode

import fuseopt
from fuseopt import compat
from fuseopt.runtime.commit import Pending
from fuseopt.runtime.guards.given import Given
from fuseopt.runtime.guards.parts import GRADIENTS, OTHER, UNASKED, PartGuard
from fuseopt.shadow.lanes import Lanes
from fuseopt.shards.local import LocalOptimizer
from fuseopt.shards.watch import Watch
from tests.shards import assert_same, local, spread
from tests.shards.steps import WAYS, parameters, step_of

#: What a look in C found of a steady step.
SAME = 0
#: Calls after which a step is steady, and those that follow a change.
BEFORE, AFTER = 5, 4
Change = Callable[[Optimizer, DeviceMesh], object]


class Seen:
    """By call: what the looks in C found, and whether parameters got gradients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list[int], bool]] = []
        look, put = PartGuard.look, Given.put

        def looked(guard: PartGuard, *args: Any) -> Any:
            grads = look(guard, *args)
            self.calls[-1][0].append(guard.found)
            return grads

        def given(own: Given) -> None:
            if own.grads is not None and self.calls:
                self.calls[-1] = self.calls[-1][0], True
            put(own)

        monkeypatch.setattr(PartGuard, "look", looked)
        monkeypatch.setattr(Given, "put", given)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


STEADY = [SAME], False


def at_the_end(replaced: bool) -> tuple[list[int], bool]:
    """What is seen of a later call. Lanes that were given other tensors in their state
    are compared from Python, and so are their gradients.
    """
    return [SAME], replaced


def give(params: Sequence[Any], seed: int) -> None:
    """Gradients of now, with the specs of the parameters, as FSDP makes them."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        part = torch.randn(local(p).shape, generator=generator)
        p.grad = DTensor(part, p._spec, requires_grad=False)


def params_of(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def adamw(params: list[Any]) -> Optimizer:
    return AdamW(params, lr=0.1)


def momentum(params: list[Any]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def walk(
    way: str,
    mesh: DeviceMesh,
    change: Change = lambda o, m: None,
    make: Callable[[list[Any]], Optimizer] = adamw,
    seen: Seen | None = None,
    call: Callable[[Callable[[], Any], bool], None] = lambda step, _: step(),
) -> Optimizer:
    """Steps, and one before which something changes. `call(step, now)` does one, and
    knows when that is.
    """
    optimizer = make(parameters(mesh, 20))
    step = step_of(optimizer, way)
    for k in range(BEFORE + 1 + AFTER):
        give(params_of(optimizer), k)
        if k == BEFORE:
            change(optimizer, mesh)
        if way and seen is not None:
            seen.calls.append(([], False))
        call(step, k == BEFORE)
    return optimizer


def first(optimizer: Optimizer) -> Any:
    """A parameter that has elements here."""
    return next(p for p in params_of(optimizer) if local(p).numel())


def state_of(optimizer: Optimizer, name: str = "exp_avg") -> Any:
    return optimizer.state[first(optimizer)][name]


def another_spec(t: Any) -> Any:
    return dataclasses.replace(t._spec)


def swap_part(t: Any) -> None:
    t._local_tensor = t._local_tensor.clone()


def give_data(t: Any) -> None:
    t._local_tensor.data = t._local_tensor.data.clone()


def set_storage(t: Any) -> None:
    with torch.no_grad():
        t._local_tensor.set_(t._local_tensor.clone())


def swap_spec(t: Any) -> None:
    t._spec = another_spec(t)


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


def freeze(o: Optimizer, mesh: DeviceMesh) -> None:
    first(o).requires_grad_(False)


def set_rate(o: Optimizer, mesh: DeviceMesh) -> None:
    o.param_groups[0]["lr"] = 0.05


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


def move_all(o: Optimizer, mesh: DeviceMesh) -> None:
    for p in params_of(o):
        give_data(p)
        for x in o.state[p].values():
            if isinstance(x, DTensor):
                swap_part(x)


HELD = [replace_state, replace_dict, drop_state, clear_state, freeze, set_rate]
HELD += [set_attribute, other_groups, other_list, fewer, more, load, another_parameter]
HELD += [move_all]


@pytest.mark.parametrize("change", HELD, ids=lambda f: f.__name__)
def test_what_is_held_changes(mesh: DeviceMesh, seen: Seen, change: Change) -> None:
    want = walk("", mesh, change)
    got = walk(WAYS[0], mesh, change, seen=seen)
    assert_same(got, want)
    assert seen.calls[BEFORE - 1] == STEADY
    assert seen.calls[BEFORE][0] in ([OTHER], [])  # begun anew, it has no guard
    assert seen.calls[-1] == at_the_end(change is replace_state)


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


@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize("change", [to_be_added_up, on_all, of_a_subclass])
def test_gradients_that_only_eager_can_take(
    mesh: DeviceMesh, seen: Seen, change: Change
) -> None:
    want = walk("", mesh, change, momentum)
    got = walk(WAYS[0], mesh, change, momentum, seen)
    assert_same(got, want)
    assert seen.calls[BEFORE - 1] == STEADY
    assert seen.calls[BEFORE] == ([GRADIENTS], False)
    assert seen.calls[-1] == STEADY


def test_a_mode_is_asked(mesh: DeviceMesh, seen: Seen) -> None:
    def call(step: Callable[[], Any], now: bool) -> None:
        if not now:
            return step()
        with BaseTorchFunctionMode():
            step()

    want = walk("", mesh, make=momentum)
    got = walk(WAYS[0], mesh, make=momentum, seen=seen, call=call)
    assert_same(got, want)
    assert seen.calls[BEFORE][0] == [UNASKED]
    assert seen.calls[-1] == STEADY


PLACES: list[tuple[Any, str, bool]] = [
    (Watch, "look", False),
    (Lanes, "look", False),
    (Pending, "finish", False),
    (Given, "drop", True),
    (LocalOptimizer, "settle", True),
    (Watch, "count_up", True),
]


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize(
    ("kind", "name", "done"), PLACES, ids=lambda x: getattr(x, "__name__", x)
)
def test_an_interrupt(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    name: str,
    done: bool,
    after: bool,
) -> None:
    """The step is done or not begun, and nothing is taken for known."""
    inner = getattr(kind, name)
    now: list[bool] = []

    def cut(*args: Any, **kwargs: Any) -> Any:
        if not now:
            return inner(*args, **kwargs)
        now.clear()
        if after:
            inner(*args, **kwargs)
        raise KeyboardInterrupt

    def call(step: Callable[[], Any], is_now: bool) -> None:
        if not is_now:
            return step()
        now.append(True)
        with pytest.raises(KeyboardInterrupt):
            step()

    done = done or (after and name == "finish")
    skip: Any = (lambda step, now: None if now else step()) if not done else None
    want = walk("", mesh, **({"call": skip} if skip else {}))
    monkeypatch.setattr(kind, name, cut)
    assert_same(walk(WAYS[0], mesh, call=call), want)


def test_versions_are_counted(mesh: DeviceMesh, seen: Seen) -> None:
    """Of what a steady step has changed, whole and part; of nothing else."""
    optimizer = walk(WAYS[0], mesh, freeze, seen=seen)
    params = params_of(optimizer)
    params[2].grad = None
    for _ in range(3):
        optimizer.step()
    before = [(p._version, local(p)._version) for p in params]
    seen.calls.append(([], False))
    optimizer.step()
    assert seen.calls[-1] == STEADY
    for k, (p, (whole, part)) in enumerate(zip(params, before, strict=True)):
        assert (p._version - whole, local(p)._version - part) == (
            (0, 0) if k == 2 else (1, 1)
        )


def test_no_reference_is_lost_or_kept(mesh: DeviceMesh, seen: Seen) -> None:
    optimizer = walk(WAYS[0], mesh, seen=seen)
    params = params_of(optimizer)
    kept: list[Any] = [DTensor, torch.Tensor, vars(optimizer), optimizer.state]
    for p in params:
        kept += [p, local(p), p._spec, p.grad, local(p.grad), optimizer.state[p]]
        kept += [x for x in optimizer.state[p].values()]
    step = optimizer.step
    seen.calls.append(([], False))
    step()
    before = [*map(sys.getrefcount, kept)]
    for _ in range(1000):
        step()
    assert [*map(sys.getrefcount, kept)] == before
    assert set(seen.calls[-1][0]) == {SAME}
    assert not seen.calls[-1][1]


@pytest.mark.parametrize(
    "missing",
    ["part_places", "version_functions", "gradient_functions"],
)
def test_where_torch_lacks_something(
    mesh: DeviceMesh, seen: Seen, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(compat, missing, lambda: None)
    want = walk("", mesh, move_all)
    assert_same(walk(WAYS[0], mesh, move_all, seen=seen), want)
    assert not any(found for found, _ in seen.calls)


def test_memory_is_not_read_where_it_must_not_be(mesh: DeviceMesh, seen: Seen) -> None:
    optimizer = adamw(parameters(mesh, 20))
    fuseopt.compile(optimizer, raw_fields=False)
    seen.calls.append(([], False))
    for k in range(BEFORE):
        give(params_of(optimizer), k)
        optimizer.step()
    assert not seen.calls[-1][0]


def test_what_is_read_of_a_dtensor_is_found_in_this_torch(mesh: DeviceMesh) -> None:
    places = compat.part_places()
    assert places is not None
    p: Any = parameters(mesh, 1)[0]
    import ctypes

    words = [ctypes.c_uint64.from_address(id(p) + at).value for at in places]
    assert words == [id(p._local_tensor), id(p._spec)]
    assert compat.version_functions() is not None
