"""Warnings and errors for steps, or parts of steps, that Dynamo leaves to eager."""

from __future__ import annotations

import torch

from .. import compat
from ..capture.fx.inputs import check_freed, check_tensor
from ..errors import UnsupportedInput
from .report import Report
from .session import COMPILED, session
from .untraceable import untraceable

#: Numbers of calls without a trace after which fuseopt traces a bound step anew that
#: hit Dynamo's recompile limit.
AFTER = (16, 128, 1024)


def refuse_untraceable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedInput for a step that Dynamo would silently run in eager."""
    reason = compat.never_compiled(optimizer)
    if reason:
        raise UnsupportedInput(reason)
    if optimizer in session.hollow:
        session.allocate(optimizer)
        return
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            name = f"parameter {position} of group {number}"
            check_freed(name, p)
            if p.grad is not None:
                check_tensor(f"the gradient of {name}", p.grad)
                check_freed(f"the gradient of {name}", p.grad)


def shared_state(optimizer: torch.optim.Optimizer) -> str:
    """Return why Dynamo must not trace a step that shares its state; "" if it may.

    The optimizer then holds another one with the same state. Dynamo keeps two records
    of a dict that two optimizers hold, and loses the writes of one. The reason is
    reported.
    """
    for name, value in vars(optimizer).items():
        members = value if isinstance(value, (list, tuple)) else [value]
        for other in members:
            if isinstance(other, torch.optim.Optimizer) and _share(optimizer, other):
                why = (
                    f"{type(optimizer).__name__} shares its state with its {name!r}, a "
                    f"{type(other).__name__}, and Dynamo loses the writes of one of "
                    "two such optimizers"
                )
                session.warn_once(
                    f"fuseopt: {why}. {type(optimizer).__name__}.step runs in eager; "
                    "the step of the other is compiled."
                )
                session.reports.append(Report(fallback=f"It runs in eager: {why}"))
                return why
    return ""


def kept_from_dynamo(optimizer: torch.optim.Optimizer) -> str:
    """Report and return the reason why a step runs in eager; "" if Dynamo traces it."""
    why = compat.refusal_of(optimizer) or compat.unsound(optimizer)
    why = why or untraceable(optimizer)
    why = why or _odd_gradient_of(optimizer)
    if not why:
        return shared_state(optimizer)
    warn_of_step(optimizer, why)
    return why


def warn_of_step(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Report that a step runs in eager: once for each optimizer and reason."""
    if optimizer in session.isolated or session.eager.get(optimizer) == why:
        return  # a shadow: the optimizer itself is reported
    session.eager[optimizer] = why
    session.reports.append(Report(fallback=f"It runs in eager: {why}"))
    warn_of_lacks()
    name = type(optimizer).__name__
    session.warn_once(f"fuseopt: {name}.step runs in eager: {why}.")


def warn_of_lacks() -> None:
    """Warn once that torch lacks a capability that the user has not switched off."""
    lacking = [x for x in compat.lacking() if not x.off]
    if lacking:
        names = ", ".join(x.name for x in lacking)
        every = len(compat.switches.table)
        session.warn_once(
            f"fuseopt: torch {torch.__version__} lacks {len(lacking)} of the {every} "
            f"private parts that fuseopt uses: {names}. `python -m fuseopt doctor` "
            "lists what each costs.",
            "what torch lacks",
        )


def _share(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Do two optimizers have state in common?"""
    if one is other:
        return False
    states = {id(state) for state in one.state.values() if isinstance(state, dict)}
    return one.state is other.state or any(
        id(state) in states for state in other.state.values()
    )


def untraceable_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Does a parameter have a gradient that only eager can take? Reports it."""
    why = _odd_gradient_of(optimizer)
    if why:
        warn_of_step(optimizer, why)
    return bool(why)


def _odd_gradient_of(optimizer: torch.optim.Optimizer) -> str:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if odd_gradient(p):
                return (
                    f"a parameter of {p.dtype} has a gradient of {p.grad.dtype}, which "
                    "Dynamo cannot trace"
                )
    return ""


def odd_gradient(p: torch.Tensor) -> bool:
    """Does a gradient have a different dtype than its parameter?

    The parameter's `.data` may have changed its dtype, or its `grad_dtype` allows it.
    Dynamo assigns a fake gradient to a fake parameter, which then fails.
    """
    return p.grad is not None and p.grad.dtype != p.dtype


def _is_isolated(optimizer: torch.optim.Optimizer) -> bool:
    """Did fuseopt.compile compile its step?"""
    return optimizer in session.isolated or hasattr(optimizer.step, COMPILED)


def warn_of_limit(
    function: str, optimizer: torch.optim.Optimizer | None, guard: str = ""
) -> None:
    """Warn that a function runs in eager from now on, which Dynamo only logs.

    `guard`: the guard that failed last.
    """
    limit = "torch hit its recompile limit for {}, and runs in eager "
    if optimizer is None:
        what, why = function, "any call that does not match a compilation."
    elif _is_isolated(optimizer) or optimizer in session.bound:
        what = f"the step of one {type(optimizer).__name__}"
        why = (
            "any call that does not match a compilation. Dynamo traces it "
            f"{len(AFTER)} more times, after {', '.join(map(str, AFTER))} calls "
            "without a trace."
        )
    else:
        what = f"{type(optimizer).__name__}.step"
        why = (
            "any optimizer that does not match a compilation, including this one. All "
            "optimizers of a class share one step; fuseopt.compile(optimizer) compiles "
            "each separately."
        )
    last = f" The guard that failed last: `{guard}`." if guard else ""
    session.warn_once(
        f"fuseopt: {limit.format(what)}{why}{last} TORCH_LOGS=recompiles shows the "
        "differences.",
        f"limit of {what}",
    )


def warn_of_graph_break(
    place: str, reason: str, optimizer: torch.optim.Optimizer
) -> None:
    """Warn that Dynamo breaks the graph of a step."""
    session.cut.add(optimizer)
    if _is_isolated(optimizer):
        then = (
            "fuseopt compiles the code before and after it separately, but not a loop "
            "around it."
        )
    else:
        then = (
            "Dynamo then often runs the whole step in eager. "
            "fuseopt.compile(optimizer) compiles the code before and after the line, "
            "unless a loop contains it."
        )
    session.warn_once(
        f"fuseopt: Dynamo breaks the graph of {type(optimizer).__name__}.step at "
        f"{place} ({reason}). {then} Write a branch on a tensor's value as "
        "torch.where. TORCH_LOGS=graph_breaks has details.",
        place,
    )


def warn_of_failure(
    function: str, reason: str, optimizer: torch.optim.Optimizer | None
) -> None:
    """Warn that Dynamo itself fails on code, which runs in eager."""
    if optimizer is not None and optimizer in session.isolated:
        return  # a shadow: fuseopt tries the optimizer itself next
    what = function if optimizer is None else f"{type(optimizer).__name__}: {function}"
    why = f"Dynamo fails on it: {reason}"
    session.reports.append(Report(fallback=f"{what} runs in eager: {why}"))
    session.warn_once(f"fuseopt: {what} runs in eager: {why}")
