"""All of torch's own list of optimizers and their inputs, as cases to compile.

`optim_db` gives for each optimizer its inputs (options of the constructor); those it
keeps for GPUs, with `capturable`, a tensor as lr or as betas, are taken as well. Each
input comes in each form: foreach, a for-loop, differentiable. To them are added the
first input of each with a tensor as lr.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.testing._internal.common_optimizers import optim_db

import fuseopt
from tests.steps import compiled, differences, eager_step

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
)
REAL = DTYPES[:4]
#: A number, odd, several rows, empty, more than a vector, more than a part of eager's
#: loops.
SHAPES = ((), (3,), (17, 5), (0, 3), (40,), (181, 193))
FEW = ((3,), (17, 5), (181, 193))
#: Those that Dynamo never hands to a backend.
DISABLED = ("LBFGS", "SparseAdam")


#: Those that compare the rate with a number: Dynamo does not trace that of a tensor.
NUMBER_AS_RATE = ("Adafactor",)


def untraceable(case: Case) -> str:
    """Why Dynamo of this version of torch cannot trace a case, with any backend."""
    if case.name == "Adafactor" and case.form == "foreach":
        # torch 2.11 asks for the dtype of a group, which has none while it is traced
        source = inspect.getsource(torch.optim._adafactor)
        if "dtype is needed to compute eps1" in source and (
            case.options.get("eps", (None,))[0] is None
        ):
            return "torch 2.11 raises an AssertionError where it traces this"
    return ""


class Case(NamedTuple):
    """An optimizer, the options it is made with, and what the list calls them."""

    name: str
    form: str
    options: dict[str, Any]
    description: str

    def __repr__(self) -> str:
        text = self.description.replace(" ", "-").replace(",", "").replace("/", "")
        return f"{self.name}-{self.form}-{text}"


def forced(case: Case) -> dict[str, Any]:
    """What an input of the list needs beside its options: with a tensor among them,
    torch takes some only as capturable.
    """
    try:
        getattr(torch.optim, case.name)([torch.ones(1, 1)], **case.options)
    except ValueError as error:
        if "capturable" not in str(error):
            raise
        return {"capturable": True}
    return {}


def _forms(info: Any) -> list[tuple[str, dict[str, Any]]]:
    forms: list[tuple[str, dict[str, Any]]] = []
    if "foreach" in info.supported_impls:
        forms.append(("foreach", {"foreach": True}))
        forms.append(("for-loop", {"foreach": False}))
    else:
        forms.append(("for-loop", {}))
    if "differentiable" in info.supported_impls:
        forms.append(("differentiable", {"differentiable": True, "foreach": False}))
    return forms


def _cases() -> list[Case]:
    cases = []
    for info in optim_db:
        name = info.optim_cls.__name__
        if name in DISABLED:
            continue
        inputs = info.optim_inputs_func(device="cuda", dtype=torch.float32)
        options = [(dict(i.kwargs), i.desc) for i in inputs]
        tensor = any(isinstance(o.get("lr"), Tensor) for o, _ in options)
        if not tensor and name not in NUMBER_AS_RATE:
            options.append(({"lr": torch.tensor(0.01)}, "tensor as lr"))
        for form, more in _forms(info):
            for given, description in options:
                cases.append(Case(name, form, {**given, **more}, description))
    return cases


CASES = _cases()


def make_params(case: Case, shapes: Any, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """A parameter of each shape in each dtype; of a differentiable step they are plain
    tensors, since eager refuses to change a leaf that autograd watches.
    """
    generator = torch.Generator().manual_seed(1)
    made: list[Tensor] = []
    for dtype in dtypes:
        for shape in shapes:
            t = torch.randn(shape, generator=generator, dtype=torch.float32)
            if dtype.is_complex:
                t = torch.complex(t, torch.randn(shape, generator=generator))
            t = t.to(dtype)
            made.append(t if case.form == "differentiable" else torch.nn.Parameter(t))
    return made


def set_grads(params: list[Tensor], others: list[Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for p, q in zip(params, others, strict=True):
        g = torch.randn(p.shape, generator=generator)
        if p.is_complex():
            g = torch.complex(g, torch.randn(p.shape, generator=generator))
        p.grad, q.grad = g.to(p.dtype), g.to(p.dtype)


def run(
    case: Case,
    shapes: Any = SHAPES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    steps: int = 4,
) -> list[fuseopt.Report]:
    """Steps of a case beside eager's: the same bits after each. Returns its reports."""
    mine, theirs = (make_params(case, shapes, dtypes) for _ in range(2))
    kind = getattr(torch.optim, case.name)
    own = {**case.options, **forced(case)}
    optimizer = kind(mine, **copy.deepcopy(own))
    reference = kind(theirs, **copy.deepcopy(own))
    step = compiled(optimizer, fallback="error")
    for number in range(steps):
        set_grads(mine, theirs, number)
        eager_step(reference)
        step()
        found = differences(theirs, reference, mine, optimizer)
        assert found == [], f"step {number}: {found}"
    return fuseopt.reports()
