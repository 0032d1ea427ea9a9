"""What the tests of the Triton target share: optimizers to run, and how to run them.

`steps(case, target)` trains clones of the same parameters with the optimizer of a case,
its step compiled for "cpp" or "triton", and returns every number it left behind.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fuseopt.capture import capture
from fuseopt.codegen import CppTarget
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.compiler.alone import ReadyKernels
from fuseopt.compiler.dispatch import EagerCalls
from fuseopt.config import Config
from fuseopt.ir.graph import Instr, Kernel, Schedule, Variant
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.cpp.table import CppTable, TableFactory
from fuseopt.runtime.executor import DirectExecutor, Program
from fuseopt.runtime.plan import Built, Plan
from fuseopt.runtime.source import GraphTensors
from fuseopt.runtime.step import CompiledStep
from fuseopt.runtime.triton.build import TritonBuilder
from fuseopt.runtime.triton.table import triton_factory
from fuseopt.scheduler import schedule

#: 0-d, one element, odd, groups, chunks with and without a rest, empty.
SHAPES = ((), (1,), (3,), (17, 5), (40,), (129, 33), (64, 64), (0, 3))

Make = Callable[[], list[torch.nn.Parameter]]
Grads = Callable[[Sequence[torch.nn.Parameter]], list[torch.Tensor]]


def parameters(
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[torch.nn.Parameter]:
    """The same parameters at each call: all shapes in all dtypes."""
    torch.manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape).to(dtype))
        for dtype in dtypes
        for shape in shapes
    ]


def plain_grads(params: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Grads laid out as their parameters."""
    return [torch.randn(p.shape).to(p.dtype) for p in params]


def strided_grads(params: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Grads with gaps, transposed, or starting off a 16-byte boundary."""
    grads = []
    for k, p in enumerate(params):
        if k % 3 == 0:
            base = torch.randn(p.numel() + 1).to(p.dtype)
            grads.append(base[1:].view(p.shape))
        elif k % 3 == 1 and p.dim() == 2:
            grads.append(torch.randn(p.shape[::-1]).to(p.dtype).t())
        else:
            base = torch.randn((*p.shape, 2)).to(p.dtype)
            grads.append(base[..., 0])
    return grads


@dataclass(frozen=True)
class Case:
    """An optimizer with its options, its parameters and its grads."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    make: Make = parameters
    grads: Grads = plain_grads
    steps: int = 3

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{k}" for k in self.options)])


def options(**kwargs: Any) -> dict[str, Any]:
    """Options by name."""
    return kwargs


#: Every foreach optimizer of torch.
CASES = (
    Case("SGD", options(lr=0.1)),
    Case("SGD", options(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1)),
    Case("SGD", options(lr=0.1, momentum=0.9, nesterov=True, maximize=True)),
    Case("Adam"),
    Case("Adam", options(amsgrad=True, weight_decay=0.1)),
    Case("Adam", options(betas=(0.3, 0.9), maximize=True)),
    Case("AdamW", options(lr=torch.tensor(0.01), capturable=True)),
    Case("AdamW", options(amsgrad=True, maximize=True)),
    Case("NAdam", options(weight_decay=0.1, decoupled_weight_decay=True)),
    Case("RAdam", options(lr=0.1)),
    Case("Adamax", options(weight_decay=0.1)),
    Case("Adagrad", options(lr_decay=0.1, weight_decay=0.1)),
    Case("Adadelta", options(weight_decay=0.1)),
    Case("RMSprop", options(centered=True, momentum=0.9)),
    Case("ASGD", options(weight_decay=0.1)),
    Case("Rprop"),
)


def without_tails(plan: Schedule) -> Schedule:
    """A plan whose kernels treat all elements alike, as a GPU does.

    On a CPU eager rounds what its vector loop leaves over in another way.
    """

    def plainly(v: Variant) -> Variant:
        tails = {i for i, x in enumerate(v.instrs) if x.op == "tail"}
        never = Instr("const", (), "b8", 0)
        return replace(
            v,
            instrs=tuple(never if i in tails else x for i, x in enumerate(v.instrs)),
            lane_code=tuple(sorted({*v.lane_code, *tails})),
            code=tuple(i for i in v.code if i not in tails),
        )

    steps = []
    for step in plan.steps:
        if isinstance(step, Kernel):
            step = replace(step, variants=tuple(map(plainly, step.variants)))
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def planned(gm: torch.fx.GraphModule, args: Sequence[Any]) -> tuple[Any, Schedule]:
    """Graph and schedule, with roots as IEEE and not as a CPU's library rounds them."""
    captured = capture(gm, args, vector_library=False)
    return captured, without_tails(schedule(captured.graph))


def kernels(case: Case, calls: int = 2) -> list[Kernel]:
    """The kernels of the last of some steps, run in eager."""
    found: list[Kernel] = []

    def backend(gm: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
        _, plan = planned(gm, args)
        found[:] = [step for step in plan.steps if isinstance(step, Kernel)]
        return gm

    train(case, backend, calls)
    return found


class Compilers:
    """The backends of both targets, with the folder that holds what they build."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.cpp = Builder()
        self.triton = TritonBuilder()

    def factory(self, target: str, kernel: Kernel) -> TableFactory:
        if target == "triton":
            source = TritonTarget().render(kernel)
            return triton_factory(source, self.folder, "cpu", self.triton, True)
        source = CppTarget().render(kernel)
        library = self.cpp.load(source, self.folder, False)
        entry = getattr(library, source.entry)
        entry.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        entry.restype = None
        # nothing in these bodies asks for a vector library
        return functools.partial(CppTable, entry, 0)

    def backend(self, target: str) -> Callable[..., Any]:
        def program(gm: torch.fx.GraphModule, args: Sequence[Any]) -> Program:
            captured, made = planned(gm, args)
            factories = {
                step.name: self.factory(target, step)
                for step in made.steps
                if isinstance(step, Kernel)
            }
            assert len(factories) == 1
            return Program(
                Plan(captured, made, ReadyKernels(Built(factories))), DirectExecutor()
            )

        def step(gm: torch.fx.GraphModule, args: Sequence[Any]) -> CompiledStep:
            replan = functools.partial(program, gm)
            first = replan(args)
            source = GraphTensors(gm, first.plan.captured.tensor_args)
            policy = EagerCalls(gm, Config(), lambda report: None)
            return CompiledStep(source, first, replan, policy)

        return step


def train(
    case: Case, backend: Callable[..., Any], steps: int | None = None
) -> list[torch.Tensor]:
    """Parameters and state after a case's steps, under a backend."""
    torch._dynamo.reset()
    params = case.make()
    options = {
        k: v.clone() if isinstance(v, torch.Tensor) else v
        for k, v in case.options.items()
    }
    optimizer = getattr(torch.optim, case.name)(params, foreach=True, **options)
    step = torch.compile(optimizer.step, backend=backend)
    torch.manual_seed(2)
    for _ in range(case.steps if steps is None else steps):
        for p, g in zip(params, case.grads(params), strict=True):
            p.grad = g
        step()
    left: list[torch.Tensor] = []
    for p in params:
        left.append(p.detach())
        state = optimizer.state.get(p, {})
        left += [state[k] for k in sorted(state) if isinstance(state[k], torch.Tensor)]
    return left


def bits(t: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, NaNs made equal."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = torch.where(t.isnan(), torch.full_like(t, torch.nan), t)
    return plain.contiguous().view(kinds[t.element_size()])
