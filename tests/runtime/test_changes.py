"""What may change between two steps: addresses, strides, dtypes, state, lifetimes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.compiler.session import session
from tests.steps import (
    Twins,
    compiled,
    differences,
    eager_step,
    make,
    make_params,
    set_grads,
)

SHAPES = [(6, 4), (5,), (3, 8, 2)]


def twins(name: str = "AdamW", **options: Any) -> Twins:
    t = Twins(name, SHAPES, **options)
    for _ in range(2):
        assert t.step() == []
    return t


def graphs() -> int:
    return len(fuseopt.reports())


def test_moved_grads_change_only_addresses() -> None:
    t = twins()
    before, builds = graphs(), session.builder.builds
    kept = []
    for _ in range(4):
        for p in [*t.eager_params, *t.params]:
            kept.append(p.grad)  # so that the next one cannot have its address
        assert t.step() == []
    assert (graphs(), session.builder.builds) == (before, builds)


def test_neighbours_of_other_steps_and_other_groups() -> None:
    """A lane takes the numbers of the one before only if it would make the same."""
    shapes = [(3,)] * 10
    t = Twins("AdamW", shapes)
    for optimizer, params in ((t.eager, t.eager_params), (t.optimizer, t.params)):
        optimizer.param_groups[0]["params"] = params[:4]
        for first, betas in ((4, (0.8, 0.9)), (7, (0.9, 0.999))):
            group = {"params": params[first : first + 3], "betas": betas}
            optimizer.add_param_group(group)
    assert t.step() == []
    steps = [3.0, 3.0, 8.0, 8.0, 8.0, 3.0, float("nan"), float("nan"), 3.0, 3.0]
    for _ in range(2):
        for optimizer, params in ((t.eager, t.eager_params), (t.optimizer, t.params)):
            for p, step in zip(params, steps, strict=True):
                optimizer.state[p]["step"].fill_(step)
        assert t.step() == []
    for p, step in zip(t.params, steps, strict=True):
        made = t.optimizer.state[p]["step"].item()
        assert made == step + 1 or step != step


@pytest.mark.family(4)
@pytest.mark.parametrize("which", ["transposed", "strided", "expanded", "offset"])
def test_grads_of_other_strides(which: str) -> None:
    t = twins()
    before, builds = graphs(), session.builder.builds

    def restride(g: torch.Tensor) -> torch.Tensor:
        if which == "transposed" and g.dim() > 1:
            return g.transpose(0, 1).contiguous().transpose(0, 1)
        if which == "strided":
            wide = torch.zeros(*g.shape[:-1], 2 * g.shape[-1])
            wide[..., ::2] = g
            return wide[..., ::2]
        if which == "expanded":
            return g[:1].expand(g.shape)
        flat = torch.zeros(g.numel() + 1)
        flat[1:] = g.reshape(-1)
        return flat[1:].view(g.shape)

    for _ in range(2):
        t.seed += 1
        set_grads(t.eager_params, t.params, t.seed)
        for p in [*t.eager_params, *t.params]:
            assert p.grad is not None
            p.grad = restride(p.grad)
        assert t.step(grads=False) == []
    assert (graphs(), session.builder.builds) == (before, builds)
    assert t.step() == [], "and back again"


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 2, 3, 1)])
def test_parameters_of_any_dense_layout(order: tuple[int, ...]) -> None:
    t = Twins("AdamW", [(2, 3, 4, 5), (7, 2, 2, 2)])
    inverse = [order.index(i) for i in range(4)]
    for p in [*t.eager_params, *t.params]:
        p.data = p.data.permute(order).contiguous().permute(inverse)
    for _ in range(3):
        assert t.step() == []
    assert [r.launches for r in fuseopt.reports()] == [1]


def test_parameters_with_gaps_and_offsets() -> None:
    t = Twins("SGD", [(8, 6), (9,)], lr=0.1, momentum=0.9)
    for params in (t.eager_params, t.params):
        wide, flat = torch.zeros(16, 6), torch.zeros(10)
        wide[::2] = params[0].data
        flat[1:] = params[1].data
        params[0].data, params[1].data = wide[::2], flat[1:]
    for _ in range(3):
        assert t.step() == []
    assert float(t.params[0].data.sum()) == float(t.eager_params[0].data.sum())


def test_grads_that_are_none() -> None:
    t = Twins("AdamW", SHAPES)
    made = []
    for step in range(9):
        t.seed += 1
        set_grads(t.eager_params, t.params, t.seed)
        if step % 2:
            t.eager_params[1].grad = t.params[1].grad = None
        assert t.step(grads=False) == [], f"step {step}"
        made.append(graphs())
    # whole, until gradients are found to come and go; then models of lanes
    assert made[-1] == made[4] <= 4


def test_swapped_data() -> None:
    t = twins()
    before = graphs()
    for params in (t.eager_params, t.params):
        params[0].data = torch.full((6, 4), 0.5)
        params[2].data = params[2].data.clone()
    for _ in range(2):
        assert t.step() == []
    assert graphs() == before


def test_swapped_data_of_the_same_address_and_other_strides() -> None:
    """The address alone does not say that a tensor is what it was."""
    t = Twins("SGD", [(4, 4)], lr=0.1)
    assert t.step() == []
    for p in (t.eager_params[0], t.params[0]):
        p.data = p.data.t()
    assert t.step() == []


def test_grads_of_another_dtype_make_a_new_plan() -> None:
    params = make_params([(6,), (5,)], torch.bfloat16)
    optimizer = make("SGD", params, lr=0.1)
    step = compiled(optimizer)
    set_grads(params, params, 0)
    step()
    expected = [p.detach().clone() for p in params]
    for p in params:
        p.grad = None
        p.grad_dtype = torch.float32  # type: ignore[attr-defined]
        p.grad = torch.ones(p.shape)
    for e in expected:
        e.add_(torch.ones(e.shape), alpha=-0.1)
    step()
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(p.detach(), e)


def test_grads_that_become_views_of_one_flat_buffer() -> None:
    t = twins()
    for params in (t.eager_params, t.params):
        flat = torch.linspace(-1, 1, sum(p.numel() for p in params))
        offset = 0
        for p in params:
            p.grad = flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
    assert t.step(grads=False) == []


def test_grad_that_is_its_own_parameter() -> None:
    """Memory that is read and written as two tensors: eager's order, or no fusion."""
    t = Twins("SGD", [(40,), (5,)], lr=0.1)
    assert t.step() == []
    for params in (t.eager_params, t.params):
        params[0].grad = params[0].data
        params[1].grad = params[0].data[3:8]
    for _ in range(2):
        assert t.step(grads=False) == []


def test_flat_parameters_are_updated_in_place() -> None:
    t = Twins("AdamW", [(4, 3), (5,), (2, 2)])
    for params in (t.eager_params, t.params):
        flat = torch.cat([p.data.reshape(-1) for p in params])
        offset = 0
        for p in params:
            p.data = flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
    for _ in range(3):
        assert t.step() == []
    assert [r.launches for r in fuseopt.reports()] == [1]


def test_load_state_dict_between_steps() -> None:
    t = twins("Adam", amsgrad=True)
    saved = [copy.deepcopy(o.state_dict()) for o in t.both()]
    assert t.step() == []
    for optimizer, state in zip(t.both(), saved, strict=True):
        optimizer.load_state_dict(state)
    for _ in range(2):
        assert t.step() == []


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool) -> None:
    t = twins("SGD", lr=0.1, momentum=0.9)
    for _ in range(3):
        for optimizer in t.both():
            optimizer.zero_grad(set_to_none=to_none)
        if to_none:
            assert t.step() == []
        else:
            assert t.step(grads=False) == []


def test_a_group_added_between_steps() -> None:
    t = twins()
    extra = [make_params([(9, 2)])[0], make_params([(9, 2)])[0]]
    for optimizer, p in zip(t.both(), extra, strict=True):
        optimizer.add_param_group({"params": [p], "lr": 0.5})
    t.eager_params.append(extra[0])
    t.params.append(extra[1])
    for _ in range(2):
        assert t.step() == []


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_the_optimizer_step_alone(how: str) -> None:
    t = twins()
    if how == "deepcopy":
        other = copy.deepcopy(t.optimizer)
    else:
        other = pickle.loads(pickle.dumps(t.optimizer))
    others = [p for g in other.param_groups for p in g["params"]]
    kept = [p.detach().clone() for p in t.params]
    set_grads(t.eager_params, others, 9)
    eager_step(t.eager)
    compiled(other)()
    assert differences(t.eager_params, t.eager, others, other) == []
    assert all(torch.equal(a, b) for a, b in zip(t.params, kept, strict=True))


@pytest.mark.slow
def test_a_dropped_optimizer_is_collected() -> None:
    params = make_params(SHAPES)
    optimizer = make("AdamW", params)
    step = compiled(optimizer)
    for seed in range(2):
        set_grads(params, params, seed)
        step()
    state = weakref.ref(optimizer.state[params[0]]["exp_avg"])
    alive = weakref.ref(optimizer)
    del optimizer, step
    gc.collect()
    assert alive() is None
    assert state() is None, "the compiled step keeps state alive"


@pytest.mark.slow
def test_autograd_sees_the_write() -> None:
    """A backward through weights that a step changed must fail, as in eager."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = make("SGD", [p], lr=0.1)
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    compiled(optimizer)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_same_parameter_object_in_two_optimizers() -> None:
    params = make_params(SHAPES)
    others = make_params(SHAPES)
    pair = [make("SGD", params, lr=0.1), make("AdamW", params)]
    reference = [make("SGD", others, lr=0.1), make("AdamW", others, reference=True)]
    steps = [compiled(o) for o in pair]
    for seed in range(3):
        set_grads(others, params, seed)
        for step, optimizer in zip(steps, reference, strict=True):
            step()
            eager_step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.slow
def test_verify_mode_passes_and_finds_a_wrong_bit() -> None:
    t = Twins("AdamW", SHAPES, backend_options={"verify": True})
    for _ in range(2):
        assert t.step() == []
    made: list[Any] = []

    def broken(gm: Any, inputs: Any) -> Any:
        made.append(backend(gm, inputs, options={"verify": True}))
        return made[-1]

    params = make_params(SHAPES)
    optimizer = make("AdamW", params)
    set_grads(params, params, 0)
    step = torch.compile(optimizer.step, backend=broken)
    step()
    (table,) = made[0].program.bound.tables.every.values()
    table.tables[0].rows[1] *= 1.0001
    with pytest.raises(fuseopt.errors.VerifyError, match="differ from eager"):
        step()


def test_steps_from_two_threads() -> None:
    import threading

    pairs = [Twins("AdamW", SHAPES, lr=0.01 * (i + 1)) for i in range(2)]
    for t in pairs:
        assert t.step() == []
    errors: list[str] = []

    def work(t: Twins) -> None:
        for _ in range(20):
            set_grads(t.params, t.params, 3)
            t.step_function()

    threads = [threading.Thread(target=work, args=(t,)) for t in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for t in pairs:
        for _ in range(20):
            set_grads(t.eager_params, t.eager_params, 3)
            eager_step(t.eager)
        errors += t.differences()
    assert errors == []
