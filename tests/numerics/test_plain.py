"""A compiled step is the plain optimizer's, as its user configured it: its bits, its
state, its groups; capturable or not, by lists or in a loop.

The rate begins at 0, as in every warm-up, an element of each gradient is 0, and one
parameter misses a gradient now and then.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_optimizers import optim_db

import fuseopt
from tests.steps import capturable_on_cpu, same_bits

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    torch.complex64,
)
#: Odd, several rows, a number, more than a vector.
SHAPES = ((5,), (3, 4), (), (33,))
#: Dynamo does not hand these to a backend.
DISABLED = ("LBFGS", "SparseAdam")
#: Those that torch refuses complex parameters for, and those without lists.
REAL = ("Adafactor",)
FORMS = {"default": {}, "for-loop": {"foreach": False}, "foreach": {"foreach": True}}
WAYS = ("step", "optimizer")
INFOS = {
    info.optim_cls.__name__: info
    for info in optim_db
    if info.optim_cls.__name__ not in DISABLED
}
#: Torch's optimizers, but for Muon, whose matrices are another test's.
NAMES = sorted(name for name in INFOS if name != "Muon")


def inputs(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The options of torch's own list, each with its name; those for GPUs too."""
    found = INFOS[name].optim_inputs_func(device="cuda", dtype=torch.float32)
    return [(i.desc, dict(i.kwargs)) for i in found]


def refused(name: str, options: dict[str, Any]) -> bool:
    """Does torch refuse these unless the step is capturable?"""
    try:
        getattr(torch.optim, name)([torch.ones(1)], **options)
    except ValueError as error:
        if "capturable" not in str(error):
            raise
        return True
    return False


def compiled(optimizer: torch.optim.Optimizer, way: str) -> Callable[[], Any]:
    if way == "optimizer":
        return fuseopt.compile(optimizer, fallback="error").step
    return torch.compile(
        optimizer.step, backend="fuseopt", options={"fallback": "error"}
    )


def held(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    """All that a state dict holds, flat, by name."""
    found: list[tuple[str, Any]] = []
    whole = optimizer.state_dict()
    for i, state in whole["state"].items():
        found += [(f"state {i} {k}", v) for k, v in state.items()]
    for i, group in enumerate(whole["param_groups"]):
        found += [(f"group {i} {k}", v) for k, v in group.items()]
    return found


def differences(
    mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer
) -> list[str]:
    """What differs between two optimizers: keys, types, devices, bits."""
    own = [(f"parameter {i}", p) for i, p in enumerate(parameters(mine))] + held(mine)
    plain = [(f"parameter {i}", p) for i, p in enumerate(parameters(theirs))]
    plain += held(theirs)
    if [k for k, _ in own] != [k for k, _ in plain]:
        return [f"{[k for k, _ in own]} is not {[k for k, _ in plain]}"]
    found = []
    for (name, x), (_, y) in zip(own, plain, strict=True):
        if isinstance(y, Tensor):
            same = isinstance(x, Tensor) and (x.dtype, x.device) == (y.dtype, y.device)
            same = same and alike(x, y)
        else:
            same = type(x) is type(y) and repr(x) == repr(y)
        found += [] if same else [name]
    return found


def alike(x: Tensor, y: Tensor) -> bool:
    """The same bits; of complex numbers but for the sign of a part that is zero
    (docs/numerics.md: eager's own depends on where in a vector loop the number lies).
    """
    x, y = x.detach(), y.detach()
    if x.is_complex():  # x + 0 has a positive zero
        x, y = (torch.view_as_real(t) + 0 for t in (x, y))
    return same_bits(x, y)


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def numbers(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    made = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        other = torch.randn(shape, generator=generator, dtype=torch.float64)
        made = torch.complex(made, other)
    return made.to(dtype)


def run(
    name: str,
    options: dict[str, Any],
    way: str,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    steps: int = 6,
) -> None:
    """Steps beside the plain optimizer's: everything equal after each."""
    kind = getattr(torch.optim, name)
    generator = torch.Generator().manual_seed(1)
    start = [numbers(s, d, generator) for d in dtypes for s in shapes]
    mine, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    optimizer = kind(mine, **copy.deepcopy(options))
    plain = kind(theirs, **copy.deepcopy(options))
    rate = optimizer.param_groups[0]["lr"]
    step = compiled(optimizer, way)
    for k in range(steps):
        for i, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            grad = numbers(tuple(p.shape), p.dtype, generator)
            grad.view(-1)[0] = 0
            missing = k % 3 == 1 and i % 2 == 1
            p.grad, q.grad = (None, None) if missing else (grad, grad.clone())
        for group in (*optimizer.param_groups, *plain.param_groups):
            if isinstance(rate, Tensor):
                group["lr"].fill_(k * rate.item() if k < 2 else group["lr"].item())
            elif name != "Adafactor":  # of which 0 is no rate
                group["lr"] = rate * k / 4
        with capturable_on_cpu():
            plain.step()
        step()
        assert differences(optimizer, plain) == [], f"step {k}"


@pytest.mark.family(60)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_the_plain_optimizers(name: str, form: str, way: str) -> None:
    run(name, FORMS[form], way, (torch.float32, torch.float64), SHAPES[:2])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_all_options(name: str, form: str, way: str, dtype: torch.dtype) -> None:
    if dtype.is_complex and name in REAL:
        with pytest.raises(RuntimeError, match="complex"):
            run(name, FORMS[form], way, (dtype,))
        return
    for described, options in inputs(name):
        torch._dynamo.reset()
        given = {**options, **FORMS[form]}
        if refused(name, given):
            given["capturable"] = True
        try:
            run(name, given, way, (dtype,))
        except AssertionError as error:
            raise AssertionError(f"{described}: {error}") from error


@pytest.mark.family(20)
@pytest.mark.parametrize("form", ["for-loop", "foreach"])
@pytest.mark.parametrize("name", NAMES)
def test_led_lanes_are_the_plain_optimizers(name: str, form: str) -> None:
    run(name, FORMS[form], "optimizer", (torch.float32,), ((5,), (3, 4)) * 9)
    assert any("they stand for the others" in r.traced for r in fuseopt.reports())


# ---------------------------------------------------------------- warm-ups


def warm_up(name: str, form: str, way: str, **options: Any) -> Tensor:
    """The weights after a step at rate 0 whose gradient has zeros; eager's if `way` is
    "".
    """
    p = torch.nn.Parameter(torch.ones(8))
    p.grad = torch.tensor([0.0, 1.0] * 4)
    made = getattr(torch.optim, name)([p], **FORMS[form], **options)
    made.param_groups[0]["lr"] = 0.0
    with capturable_on_cpu():
        (compiled(made, way) if way else made.step)()
    return p.detach()


@pytest.mark.family(30)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [n for n in NAMES if n != "Adafactor"])
def test_no_nan_where_the_rate_is_0(name: str, form: str, way: str) -> None:
    """0 / 0, where the rate divides what has no size: as capturable steps do."""
    got = warm_up(name, form, way)
    assert not got.isnan().any()
    assert same_bits(got, warm_up(name, form, ""))


@pytest.mark.family(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_capturable_step_has_the_nan_of_its_own(name: str, way: str) -> None:
    """As in eager, on a device that takes such a step."""
    want = warm_up(name, "for-loop", "", capturable=True)
    assert want.isnan().any()
    assert same_bits(warm_up(name, "for-loop", way, capturable=True), want)


CAPTURABLE = [
    name
    for name in NAMES
    if "capturable" in inspect.signature(getattr(torch.optim, name)).parameters
]


@pytest.mark.family(20)
@pytest.mark.parametrize("form", ["for-loop", "foreach"])
@pytest.mark.parametrize("name", CAPTURABLE)
def test_capturable_keeps_its_own_bits(name: str, form: str) -> None:
    options = {**FORMS[form], "capturable": True}
    run(name, options, "step", (torch.float32, torch.float64), SHAPES[:2])


# ---------------------------------------------------------------- other backends


@pytest.mark.slow
def test_other_backends_get_what_dynamo_gives_them() -> None:
    seen: list[torch.fx.GraphModule] = []

    def other(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.append(gm)
        return gm.forward

    for backend in ("fuseopt", other):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        torch.compile(torch.optim.Adam([p]).step, backend=backend)()
    (gm,) = seen
    targets = {str(n.target) for n in gm.graph.nodes}
    assert "item" not in targets  # the bias corrections are tensors


# ---------------------------------------------------------------- branches on numbers


class Branching(torch.optim.Optimizer):
    """Branches on its counter in most of the ways there are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(float(i))
                    state["mean"] = torch.zeros_like(p)
                step, mean = state["step"], state["mean"]
                step += 1
                t = step.item()
                scale = 0.5 if t > 3 else 1.0
                if t < 2:
                    mean.copy_(p.grad)
                elif t < 5:
                    mean.mul_(0.9).add_(p.grad, alpha=scale)
                    scale = scale * t
                else:
                    view = mean.view(-1)
                    view.add_(p.grad.view(-1))
                if t == 4:
                    p.mul_(0.5)
                p.add_(mean, alpha=-group["lr"] * scale)
                if t >= 6:
                    p.neg_()


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "way"), [(2, "step"), (20, "optimizer")])
def test_both_ways_of_a_branch_on_a_number(lanes: int, way: str) -> None:
    """One graph, whatever the counters are, and each lane goes its own way."""
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(7, generator=generator) for _ in range(lanes)]
    mine, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    optimizer, plain = Branching(mine), Branching(theirs)
    step = compiled(optimizer, way)
    for _ in range(8):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn(7, generator=generator)
            q.grad = p.grad.clone()
        plain.step()
        step()
        assert differences(optimizer, plain) == []
    assert {r.launches for r in fuseopt.reports()} == {1}
    assert len(fuseopt.reports()) <= 2  # state is made, and then there


class Counting(torch.optim.Optimizer):
    """What it does in one branch is no arithmetic."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.large: list[int] = []

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                size = p.sum().item()
                if size > 1:
                    self.large.append(1)
                p.mul_(0.5)


def test_a_branch_that_changes_python_is_left_to_eager() -> None:
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    mine, plain = Counting([p]), Counting([q])
    step = torch.compile(mine.step, backend="fuseopt")
    with pytest.warns(RuntimeWarning, match="breaks the graph"):
        step()
    plain.step()
    for _ in range(3):
        step()
        plain.step()
    assert mine.large == plain.large == [1, 1]
    assert torch.equal(p, q)


def test_the_power_of_a_counter_is_pythons() -> None:
    """Of each counter that a training has, for rates that are used."""

    def power(x: Tensor, t: Tensor) -> None:
        x.copy_(torch.as_tensor(0.999 ** t.item(), dtype=torch.float64))

    step = torch.compile(power, backend="fuseopt", fullgraph=True)
    for t in (*range(1, 50), 1000, 123456, 2**24):
        x = torch.zeros((), dtype=torch.float64)
        step(x, torch.tensor(float(t)))
        assert x.item() == 0.999 ** float(t) == math.pow(0.999, t)
