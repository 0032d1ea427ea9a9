"""Run a compiled optimizer beside the plain one, and compare all bits after each step.

A run that finds no difference must be able to find one. At its end, the run moves one
tensor of the compiled optimizer by one ulp, and does another step with both. If the
comparison then reports no difference, the result is "proves nothing".
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compiler.session import session
from ..errors import UnsupportedInput
from ..isolate.compile import compile
from .compare import differences, nudge, parameters
from .course import EVENTS, LEAST, RATES, Course, give_gradients, rates, seed
from .subject import SHAPES, NotRepeatable, Subject

#: The default number of steps of a run.
STEPS = 12
#: How many differences a Result lists.
LISTED = 8
#: The prefix of a launch's name in a profile.
LAUNCH = "fuseopt::"


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    `outcome`: "equal", "differs", "eager" (the step ran in eager, so that nothing was
    compared), "refused", "raises", "proves nothing" or "not run". `reason`: of it, or
    "". `launches`: kernels of a step, as a profiler counts them. `shapes`:
    the key of SHAPES for a class, or "its own". `done`: the events of the course;
    `left_out`: the other events, each with the reason. `control`: the comparison after
    one tensor was moved by an ulp. `warnings`: warnings of fuseopt.
    """

    target: str
    dtype: str
    device: str
    torch: str
    outcome: str
    reason: str = ""
    steps: int = 0
    parameters: int = 0
    elements: int = 0
    shapes: str = ""
    launches: int | None = None
    externs: int = 0
    done: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    differences: tuple[str, ...] = ()
    control: str = ""
    warnings: tuple[str, ...] = ()


class Side:
    """One of the two optimizers of a run, with its step."""

    def __init__(
        self, subject: Subject, course: Course, how: Callable[[Optimizer], Any]
    ) -> None:
        self.subject, self.course, self.how = subject, course, how
        self.optimizer = subject.optimizer()
        self._step = how(self.optimizer)

    def step(self, number: int) -> None:
        """Apply the events of the course before this step, and run the step."""
        ready = self.course.before(self.subject, self.optimizer, number)
        if ready is not self.optimizer:
            self.optimizer, self._step = ready, self.how(ready)
        self._run(number)

    def extra(self, number: int) -> None:
        """Run a step with fresh gradients, without events."""
        give_gradients(self.optimizer, number)
        self._run(number)

    def _run(self, number: int) -> None:
        seed(number)
        if _needs_closure(self.optimizer):
            self._step(_same_loss)
        else:
            self._step()


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _same_loss() -> float:
    """A closure that leaves the gradients as they are."""
    return 0.0


def plain(optimizer: Optimizer) -> Any:
    """Return the step unchanged."""
    return optimizer.step


def compiled(optimizer: Optimizer) -> Any:
    """Return the step as fuseopt compiles it."""
    return compile(optimizer, eager_if_faster=False, fallback="eager").step


def dynamo_alone(optimizer: Optimizer) -> Any:
    """Return the step as Dynamo traces it, without a compiler."""
    return torch.compile(optimizer.step, backend="eager")


def verify(subject: Subject, steps: int = STEPS) -> Result:
    """Run a subject and return the Result. Raises NotRepeatable."""
    steps = max(steps, LEAST)
    made = Result(
        target=subject.name,
        dtype=str(subject.dtype).removeprefix("torch."),
        device=subject.device,
        torch=torch.__version__,
        outcome="not run",
        steps=steps,
    )
    subject, shapes, reason = _runnable(subject)
    made = dataclasses.replace(made, shapes=shapes)
    if reason:
        return dataclasses.replace(made, reason=f"eager raises {reason}")
    every = _same_each_time(subject)
    left_out = _left_out(subject, steps)
    course = Course(steps, tuple(x for x in EVENTS if x not in left_out))
    made = dataclasses.replace(
        made,
        parameters=len(every),
        elements=sum(p.numel() for p in every),
        dtype=", ".join(sorted({str(p.dtype)[6:] for p in every})),
        device=", ".join(sorted({str(p.device) for p in every})),
        done=course.events,
        left_out=tuple(left_out.items()),
    )
    with _fuseopt_warnings() as caught:
        made = _run(subject, course, made)
    texts = tuple(dict.fromkeys(caught))
    reason = made.reason
    if made.outcome == "eager" and texts:
        reason = reason or texts[0]
    return dataclasses.replace(made, reason=reason, warnings=texts)


def _run(subject: Subject, course: Course, made: Result) -> Result:
    want = Side(subject, course, plain)
    begun = len(session.reports)
    try:
        got = Side(subject, course, compiled)
    except UnsupportedInput as error:
        return dataclasses.replace(made, outcome="refused", reason=_first_line(error))
    for number in range(course.steps):
        want.step(number)
        try:
            got.step(number)
        except Exception as error:
            reason = f"step {number + 1}: {type(error).__name__}: {_first_line(error)}"
            return dataclasses.replace(made, outcome="raises", reason=reason)
        found = differences(want.optimizer, got.optimizer)
        if found:
            listed = tuple(map(str, found[:LISTED]))
            reason = f"step {number + 1}" + _of_others(subject, course)
            outcome = "not run" if reason.endswith("itself") else "differs"
            return dataclasses.replace(
                made, outcome=outcome, reason=reason, differences=listed
            )
    control, seen = _control(want, got, course.steps)
    launches = _launches(got, course.steps + 100)
    made = dataclasses.replace(
        made,
        control=control,
        launches=launches,
        externs=sum(len(x.externs) for x in session.reports[begun:][-1:]),
    )
    if not launches:
        reason = session.eager.get(got.optimizer, "") or "; ".join(
            dict.fromkeys(x.fallback for x in session.reports[begun:] if x.fallback)
        )
        return dataclasses.replace(made, outcome="eager", reason=reason)
    if not seen:
        reason = "the comparison did not see a tensor that was moved by an ulp"
        return dataclasses.replace(made, outcome="proves nothing", reason=reason)
    return dataclasses.replace(made, outcome="equal")


def _control(want: Side, got: Side, number: int) -> tuple[str, bool]:
    """Move a tensor of the compiled optimizer by an ulp, and do a step with both.

    Returns the difference as text, and whether the comparison reported one. The tensor
    is the largest parameter. Some steps compute the parameter from its state alone,
    which discards the ulp; then the tensors of that state take turns.
    """
    every = parameters(got.optimizer)
    largest = max(range(len(every)), key=lambda i: every[i].numel())
    name = f"parameter {largest}"
    state = got.optimizer.state.get(every[largest], {})
    tensors = {name: every[largest].detach()}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            tensors[f"{key} of {name}"] = value
    for turn, (moved, tensor) in enumerate(tensors.items()):
        nudge(tensor)
        want.extra(number + turn)
        got.extra(number + turn)
        for found in differences(want.optimizer, got.optimizer):
            if found.where.endswith(name):
                return f"{moved} moved; {found}", True
    return f"{', '.join(tensors)} moved; no difference", False


def _launches(side: Side, number: int) -> int:
    """Count the kernels that one more step launches."""
    activity = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        side.extra(number)
    return sum(_kernels(x.name) for x in profile.events() or ())


def _kernels(name: str) -> int:
    if not name.startswith(LAUNCH):
        return 0
    words = name.removeprefix(LAUNCH).split()
    return int(words[2]) if words[0] == "replay" else words[0].count("+") + 1


def _of_others(subject: Subject, course: Course) -> str:
    """Run eager twice, then Dynamo without a compiler; report the first difference.

    Returns "" if neither differs from eager.
    """
    for how, text in (
        (plain, ", but eager differs from itself"),
        (dynamo_alone, "; Dynamo without a compiler differs from eager as well"),
    ):
        try:
            one, other = Side(subject, course, plain), Side(subject, course, how)
            for number in range(course.steps):
                one.step(number)
                other.step(number)
                if differences(one.optimizer, other.optimizer):
                    return text
        except Exception:  # an error here gives no evidence about the compiled step
            continue
    return ""


def _runnable(subject: Subject) -> tuple[Subject, str, str]:
    """Return the subject with shapes that its optimizer takes, their name, and an
    error.

    The error is "" if there are such shapes.
    """
    if not subject.takes_parameters:
        return subject, "its own", _eager(subject, Course(LEAST, ()))
    first = ""
    for name, shapes in SHAPES.items():
        tried = dataclasses.replace(subject, shapes=shapes)
        reason = _eager(tried, Course(LEAST, ()))
        if not reason:
            return tried, name, ""
        first = first or reason
    return subject, "", first


def _same_each_time(subject: Subject) -> list[Tensor]:
    """Check that each call makes new parameters with the same contents; return them.

    Raises NotRepeatable.
    """
    first, second = (subject.optimizer() for _ in range(2))
    every = parameters(first)
    if {id(p) for p in every} & {id(p) for p in parameters(second)}:
        raise NotRepeatable(
            f"{subject.name} returns optimizers of the same parameters at each call. "
            "Make the model inside the function, so that each optimizer has new "
            "parameters"
        )
    found = differences(first, second)
    if found:
        raise NotRepeatable(
            f"{subject.name} starts with different numbers at each call ({found[0]}). "
            "Set a seed inside the function, or load its initial numbers there"
        )
    return every


def _left_out(subject: Subject, steps: int) -> dict[str, str]:
    """Return the events that eager cannot run, each with the reason."""
    found = {}
    for event in EVENTS:
        reason = _eager(subject, Course(steps, (event,)))
        if reason:
            found[event] = f"eager raises {reason}"
    if not any(rates(subject.optimizer())):
        found[RATES] = "its groups have no rate"
    return found


def _eager(subject: Subject, course: Course) -> str:
    """Run the plain optimizer; return the error that ends the run, or ""."""
    try:
        side = Side(subject, course, plain)
        for number in range(course.steps):
            side.step(number)
    except NotRepeatable:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


@contextmanager
def _fuseopt_warnings() -> Iterator[list[str]]:
    """Collect the warnings of fuseopt; the list is complete after the `with` block."""
    caught: list[str] = []
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        yield caught
    texts = [str(w.message) for w in recorded]
    caught += [text for text in texts if text.startswith("fuseopt:")]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]
