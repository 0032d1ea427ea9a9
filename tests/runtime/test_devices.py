"""Parameters, counters and hyperparameters on several devices; devices that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.errors import FuseoptError, LaunchError
from tests.steps import same_bits

pytest.importorskip("triton")

#: Lengths that no loop of eager leaves a rest of: there a CPU rounds otherwise.
SHAPES = ((64,), (4, 32), (2, 3, 64))
FOREACH = ("Adam", "Adamax", "NAdam", "RAdam", "Rprop")


class Counting(torch.optim.Optimizer):
    """A step counter on the CPU, and numbers of it beside tensors of a device."""

    def __init__(self, params: Any, lr: float | Tensor = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["mean"] = torch.zeros_like(p)
                step, mean = state["step"], state["mean"]
                # the device reads the counter before it changes, and after
                mean.mul_(0.9).add_(p.grad * step)
                step.add_(1)
                p.mul_(1 - group["lr"] / step).sub_(mean * (0.5**step) * group["lr"])


class Both:
    """The same optimizer in eager and compiled, on the same devices."""

    def __init__(
        self,
        make: Callable[[list[Any]], torch.optim.Optimizer],
        devices: Sequence[str] = ("sim",) * 3,
        dtype: torch.dtype = torch.float32,
        reference: Callable[[torch.optim.Optimizer], None] = lambda x: x.step(),
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        **options: Any,
    ) -> None:
        self.generator = torch.Generator().manual_seed(1)
        start = [torch.randn(s, generator=self.generator).to(dtype) for s in shapes]
        self.sides = [
            [torch.nn.Parameter(t.to(d)) for t, d in zip(start, devices, strict=True)]
            for _ in range(2)
        ]
        self.eager, self.optimizer = map(make, self.sides)
        # a graph of one launch, too
        fuseopt.compile(self.optimizer, **{"cudagraphs": True, **options})
        self.reference = reference

    def set_grads(self) -> None:
        for p, q in zip(*self.sides, strict=True):
            grad = torch.randn(p.shape, generator=self.generator).to(p.dtype)
            p.grad, q.grad = grad.to(p.device), grad.to(q.device)

    def step(self) -> None:
        self.set_grads()
        self.reference(self.eager)
        self.optimizer.step()

    def differences(self) -> list[str]:
        """What differs in a bit, or lies elsewhere."""
        found = []
        for i, (p, q) in enumerate(zip(*self.sides, strict=True)):
            pairs: dict[str, tuple[Any, Any]] = {"parameter": (p.detach(), q.detach())}
            mine, theirs = self.eager.state[p], self.optimizer.state[q]
            assert mine.keys() == theirs.keys()
            pairs |= {k: (mine[k], theirs[k]) for k in mine}
            for name, (want, got) in pairs.items():
                if not isinstance(want, Tensor):
                    same = want == got
                else:
                    same = want.device == got.device
                    same = same and same_bits(got.cpu(), want.cpu())
                found += [f"{name} of {i}"] * (not same)
        return found


# ------------------------------------------------------------ counters of the CPU


@pytest.mark.family(4)
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_counters_of_the_cpu_beside_parameters_of_a_device(
    sim: ModuleType, dtype: torch.dtype, graphs: bool
) -> None:
    both = Both(Counting, dtype=dtype, cudagraphs=graphs)
    for _ in range(5):
        both.step()
        assert both.differences() == []
    assert both.optimizer.state[both.sides[1][0]]["step"].device.type == "cpu"


class Begun(torch.optim.Optimizer):
    """Its state is begun by `torch.tensor`, on a device or on the default one."""

    def __init__(self, params: Any, data: Any, device: str | None) -> None:
        super().__init__(params, {})
        self.data, self.device = data, device

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["scale"] = torch.tensor(self.data, device=self.device)
                    state["sizes"] = torch.full((), 2.0, device=self.device)
                state["scale"].mul_(0.5)
                if self.device is not None:
                    p.sub_(p.grad * state["scale"].sum() * state["sizes"])


@pytest.mark.family(6)
@pytest.mark.parametrize("device", ["sim:0", "sim", None])
@pytest.mark.parametrize("data", [0.25, [0.5, 0.25]], ids=str)
def test_what_a_step_makes_lies_where_it_is_asked_to(
    sim: ModuleType, data: Any, device: str | None
) -> None:
    both = Both(lambda ps: Begun(ps, data, device))
    for _ in range(4):
        both.step()
        assert both.differences() == []


def test_lanes_that_share_a_program_have_counters_of_their_own(
    sim: ModuleType,
) -> None:
    """Small lanes are put in order of size: their cells go with them."""
    both = Both(Counting, shapes=((128,), (64,), (96,)))
    for side, optimizer in zip(both.sides, (both.eager, both.optimizer), strict=True):
        for i, p in enumerate(side):
            optimizer.state[p]["step"] = torch.tensor(float(3 * i))
            optimizer.state[p]["mean"] = torch.zeros_like(p)
    for _ in range(4):
        both.step()
        assert both.differences() == []


def test_numbers_of_the_cpu_come_over_in_one_copy_and_without_a_wait(
    sim: ModuleType,
) -> None:
    both = Both(Counting)
    for _ in range(3):
        both.step()
    with sim.counting() as seen:
        both.optimizer.step()
    assert (seen.replays, seen.launches, seen.h2d, seen.syncs) == (1, 0, 1, 0)
    # three lanes with some numbers each, and no parameter
    assert seen.h2d_bytes <= 3 * 8 * 8
    assert seen.ops == {}


@pytest.mark.family(2)
@pytest.mark.parametrize("name", FOREACH)
def test_the_counters_of_torch_optim(sim: ModuleType, name: str) -> None:
    """As eager leaves them by default: on the CPU."""

    def make(params: list[Any]) -> torch.optim.Optimizer:
        made = getattr(torch.optim, name)(params, lr=0.1, foreach=True)
        assert isinstance(made, torch.optim.Optimizer)
        return made

    both = Both(make)
    for _ in range(3):
        both.step()
        assert both.differences() == []
    kernels = fuseopt.reports()[-1].kernels
    assert [k.target for k in kernels].count("triton") == 1


@pytest.mark.family(10)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", FOREACH)
def test_bias_corrections_come_over_in_one_copy_and_without_a_wait(
    sim: ModuleType, name: str, foreach: bool
) -> None:
    """What is computed of counters on the CPU is read by the graph that is replayed."""

    def make(params: list[Any]) -> torch.optim.Optimizer:
        made = getattr(torch.optim, name)(params, lr=0.1, foreach=foreach)
        assert isinstance(made, torch.optim.Optimizer)
        return made

    both = Both(make)
    for _ in range(7):  # beyond where RAdam's branch takes the other way
        both.step()
        assert both.differences() == []
    both.set_grads()
    with sim.counting() as seen:
        both.optimizer.step()
    assert (seen.replays, seen.launches, seen.syncs) == (1, 0, 0)
    assert seen.h2d <= 1
    assert seen.ops == {}


@pytest.mark.parametrize("loaded", [False, True])
def test_counters_that_an_eager_step_left_on_the_cpu(
    sim: ModuleType, loaded: bool
) -> None:
    """There they stay, though Dynamo would move them to the device of the weights."""

    def make(params: list[Any]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(params, lr=0.1, foreach=True)
        for p in params:
            p.grad = torch.ones_like(p)
        made.step()
        return made

    both = Both(make)
    if loaded:
        kept = [x.state_dict() for x in (both.eager, both.optimizer)]
        both.step()
        for optimizer, state in zip((both.eager, both.optimizer), kept, strict=True):
            optimizer.load_state_dict(state)
    for _ in range(3):
        both.step()
        assert both.differences() == []
    state = both.optimizer.state[both.sides[1][0]]
    assert state["step"].device.type == "cpu"
    targets = [k.target for k in fuseopt.reports()[-1].kernels]
    assert targets.count("triton") == 1


@pytest.mark.family(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_learning_rate_on_the_cpu_is_live(
    sim: ModuleType, dtype: torch.dtype
) -> None:
    both = Both(lambda params: Counting(params, torch.tensor(0.1, dtype=dtype)))
    for k in range(5):
        for optimizer in (both.eager, both.optimizer):
            optimizer.param_groups[0]["lr"].fill_(0.1 / (k + 1))
        both.step()
        assert both.differences() == []
    with sim.counting() as seen:
        both.step()
    assert seen.replays == 1


class Scaled(torch.optim.Optimizer):
    """One number of the CPU, read with .item(), and one that is not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1, dtype=torch.float64)})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            scale = (group["lr"] * 0.3).item()
            for p in group["params"]:
                p.add_(p.grad, alpha=-scale).mul_(group["lr"])


def test_a_number_read_from_the_cpu(sim: ModuleType) -> None:
    both = Both(Scaled)
    for k in range(4):
        for optimizer in (both.eager, both.optimizer):
            optimizer.param_groups[0]["lr"].fill_(0.1 + k)
        both.step()
        assert both.differences() == []


class Shrinking(torch.optim.Optimizer):
    """Takes a number of the CPU and computes none there."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5)})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(group["lr"])


def test_a_graph_of_the_users_keeps_the_numbers_of_its_call(sim: ModuleType) -> None:
    p = torch.nn.Parameter(torch.ones(64, device="sim"))
    optimizer = fuseopt.compile(Shrinking([p]))
    optimizer.step()
    graph = sim.Graph()
    with sim.graph(graph):
        optimizer.step()
    assert p.tolist() == [0.5] * 64
    optimizer.param_groups[0]["lr"].fill_(3.0)
    optimizer.step()
    assert p.tolist() == [1.5] * 64
    graph.replay()
    graph.replay()
    assert p.tolist() == [0.375] * 64
    optimizer.step()
    assert p.tolist() == [1.125] * 64


def test_counters_of_the_cpu_are_not_for_a_graph_of_the_users(sim: ModuleType) -> None:
    both = Both(Counting)
    for _ in range(3):
        both.step()
    graph = sim.Graph()
    with (
        pytest.raises(LaunchError, match="changes tensors on the CPU"),
        sim.graph(graph),
    ):
        both.optimizer.step()
    assert both.differences() == []
    both.step()
    assert both.differences() == []


# ------------------------------------------------------------- several devices


@pytest.mark.parametrize(
    "devices", [("sim:0", "sim:1", "sim:1"), ("cpu", "sim", "cpu")]
)
def test_each_device_has_one_kernel(sim: ModuleType, devices: tuple[str, ...]) -> None:
    def make(params: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)

    both = Both(make, devices)
    for _ in range(4):
        both.step()
        assert both.differences() == []
    report = fuseopt.reports()[-1]
    assert report.launches == 2
    with sim.counting() as seen:
        both.step()
    assert seen.replays == len(set(devices) - {"cpu"})
    assert seen.launches == 0


# -------------------------------------------------------------------- bad input


def sgd(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)


def state_of(both: Both) -> list[Tensor]:
    found = []
    for p in both.sides[1]:
        found.append(p.detach().cpu().clone())
        found += [
            t.cpu().clone()
            for t in both.optimizer.state[p].values()
            if isinstance(t, Tensor)
        ]
    return found


@pytest.mark.family(4)
@pytest.mark.parametrize("other", ["cpu", "sim:1"])
@pytest.mark.parametrize("late", [False, True], ids=["first", "later"])
def test_a_grad_on_another_device_is_an_error_as_in_eager(
    sim: ModuleType, other: str, late: bool
) -> None:
    both = Both(sgd)
    if late:
        for _ in range(3):
            both.step()
    both.set_grads()
    before = state_of(both)
    p = both.sides[1][1]
    own = p.grad
    # Tensor.grad refuses another device; .data does not
    p.grad.data = p.grad.data.to(other)
    # at first it is Dynamo that fails, which a warning says, and eager runs
    told = nullcontext() if late else pytest.warns(RuntimeWarning, match="in eager")
    with told, pytest.raises((FuseoptError, RuntimeError), match="device"):
        both.optimizer.step()
    if late:
        for got, want in zip(state_of(both), before, strict=True):
            assert torch.equal(got, want)
    else:  # what eager writes before it raises
        theirs = both.sides[0][1].grad
        theirs.data = theirs.data.to(other)
        with pytest.raises(RuntimeError):
            both.reference(both.eager)
        theirs.data = theirs.data.to("sim:0")
    own.data = own.data.to("sim:0")
    both.reference(both.eager)
    both.optimizer.step()
    assert both.differences() == []


def test_parameters_that_moved_to_the_cpu_are_followed(sim: ModuleType) -> None:
    both = Both(sgd)
    for _ in range(3):
        both.step()
    for optimizer, params in zip((both.eager, both.optimizer), both.sides, strict=True):
        for p in params:
            p.data = p.data.cpu()
            p.grad = None
            for key, value in optimizer.state[p].items():
                optimizer.state[p][key] = value.cpu()
    for _ in range(2):
        both.step()
        assert both.differences() == []
    assert fuseopt.reports()[-1].kernels[0].target == "cpp"
    for optimizer, params in zip((both.eager, both.optimizer), both.sides, strict=True):
        for p in params:
            p.data = p.data.to("sim")
            p.grad = None
            for key, value in optimizer.state[p].items():
                optimizer.state[p][key] = value.to("sim")
    for _ in range(3):
        both.step()
        assert both.differences() == []


@pytest.mark.parametrize("nth", [1, 5])
def test_out_of_memory_while_tables_are_made(sim: ModuleType, nth: int) -> None:
    both = Both(sgd)
    both.step()
    both.set_grads()
    # other shapes: other tables
    for p, q in zip(*both.sides, strict=True):
        for x, optimizer in ((p, both.eager), (q, both.optimizer)):
            x.grad = None
            x.data = x.data.reshape(-1)[::2]
            optimizer.state[x]["momentum_buffer"] = torch.zeros_like(x)
    both.set_grads()
    before = state_of(both)
    sim.fail_allocation(nth)
    with pytest.raises(torch.OutOfMemoryError, match="tables of kernel0 on sim:0"):
        both.optimizer.step()
    for got, want in zip(state_of(both), before, strict=True):
        assert torch.equal(got, want)
    both.optimizer.step()
    both.reference(both.eager)
    assert both.differences() == []
    both.step()
    assert both.differences() == []


@pytest.mark.parametrize("graphs", [True, False])
def test_a_launch_that_fails_names_its_kernel(sim: ModuleType, graphs: bool) -> None:
    both = Both(sgd, cudagraphs=graphs)
    for _ in range(3 if not graphs else 0):
        both.step()
    both.set_grads()
    before = state_of(both)
    sim.fail_launch()
    with pytest.raises(LaunchError, match=r"kernel0 failed on sim:0 \(.*\.py\)"):
        both.optimizer.step()
    for got, want in zip(state_of(both), before, strict=True):
        assert torch.equal(got, want)
    both.reference(both.eager)
    both.optimizer.step()
    assert both.differences() == []
