"""Dynamo's private API: hooks on when a trace starts, ends a graph, fails, gives up."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from .contexts import scalar_outputs, within_copy
from .gc_pause import collector_paused
from .gradients import Apart
from .tracing import leave, settle, tracing
from .watched import watched

#: The attribute of a class whose objects are traced in an optimizer's stead, and step
#: all their `optimizers`.
STEPS = "_fuseopt_steps"


def never_compiled(optimizer: torch.optim.Optimizer) -> str:
    """Why Dynamo would not hand this optimizer's step to any backend; "" if it would.

    Relies on what torch disables: the functions behind `fused=True`, and whole steps.
    """
    if any(group.get("fused") for group in optimizer.param_groups):
        return (
            f"{type(optimizer).__name__} was made with fused=True: Dynamo does not "
            "trace torch's fused steps, so no backend is ever called. Pass "
            "foreach=True (or leave both out), or use fuseopt.compile(optimizer)."
        )
    return disabled(optimizer)


def disabled(optimizer: torch.optim.Optimizer) -> str:
    """Why Dynamo leaves this optimizer's whole step alone; "" if it does not.

    Relies on the attribute that `torch.compiler.disable` sets. torch marks steps of
    its own with it when the first function of a process is compiled.
    """
    _compile_once()
    step = type(optimizer).step
    if getattr(step, "_torchdynamo_disable", False) or getattr(
        inspect.unwrap(step), "_torchdynamo_disable", False
    ):
        return (
            f"{type(optimizer).__name__}.step is disabled under Dynamo, so no backend "
            "is ever called; leave this optimizer uncompiled."
        )
    return ""


@functools.cache
def _compile_once() -> None:
    torch.compile(disabled, backend="eager")


def on_trace(
    backend: Callable[..., Any],
    check: Callable[[torch.optim.Optimizer], None],
    keep: Callable[[torch.optim.Optimizer], str] = lambda optimizer: "",
) -> None:
    """Call `check(optimizer)` when Dynamo starts to trace a step for `backend`.

    An exception from `check` reaches the caller of the step before anything ran. Code
    that holds an optimizer of which `keep(optimizer)` gives a reason runs in eager, and
    Dynamo goes on with what that code calls. While Dynamo traces code that holds an
    optimizer, or that one calls, `.item()` becomes part of its graph, in this thread;
    without that it would end the graph. No garbage is collected meanwhile.
    Relies on Dynamo's compile callbacks and on local names of the frames that trace;
    where they are others, nothing is checked and Dynamo keeps to its own settings.
    """
    try:
        import torch._dynamo
        from torch._dynamo.callback import callback_handler
    except ImportError:
        return

    def started(_: Any) -> None:
        frame = sys._getframe(1)
        names: dict[str, Any] = {}
        while frame is not None and frame.f_back is not None and len(names) < 2:
            for name in ("compiler_fn", "frame"):
                if name in frame.f_locals:
                    names.setdefault(name, frame.f_locals[name])
            frame = frame.f_back
        traced = names.get("frame")
        if traced is None or not leads_to(names.get("compiler_fn"), backend):
            return
        owner = traced.f_locals.get("self")
        several = getattr(type(owner), STEPS, False)
        for optimizer in owner.optimizers if several else [owner]:
            if isinstance(optimizer, torch.optim.Optimizer):
                check(optimizer)
        seen = _optimizers(traced)
        for reason in filter(None, map(keep, seen)):
            _leave_to_eager(reason)
        within = _stepping()
        if seen or within:
            tracing.owners = [*seen, *within]
            tracing.own = any(map(_is_own, tracing.owners))
            for patch in (scalar_outputs(), collector_paused(), Apart(seen)):
                patch.__enter__()
                tracing.patches.append(patch)

    def ended(_: Any) -> None:
        leave()

    # a callback may run while Dynamo is tracing: it must not trace this too
    started = torch._dynamo.disable(started)  # type: ignore[no-untyped-call]
    ended = torch._dynamo.disable(ended)  # type: ignore[no-untyped-call]
    forget = callback_handler.clear

    def register() -> None:
        callback_handler.register_start_callback(started)
        callback_handler.register_end_callback(ended)

    def clear() -> None:
        """torch._dynamo.reset() drops all callbacks; these outlive it."""
        settle()
        forget()
        register()

    callback_handler.clear = clear  # type: ignore[method-assign]
    register()


def _leave_to_eager(reason: str) -> None:
    """Have Dynamo run the code that it begins to trace in eager, from now on.

    Relies on the function with which Dynamo gives up on a frame; where it is another,
    Dynamo traces on.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        torch_exc: Any = importlib.import_module("torch._dynamo.exc")
        torch_exc.unimplemented(
            gb_type="a step that runs in eager",
            context="",
            explanation=reason,
            hints=[],
        )


def refusal_of(optimizer: torch.optim.Optimizer) -> str:
    """Why Dynamo may not trace a step, as its trace has shown; "" if it may."""
    return watched.refused.get(optimizer, "")


def refuse(tx: Any, why: str) -> NoReturn:
    """End the trace of a step that Dynamo would compile to something else than eager.

    From now on the step runs in eager. Raises Dynamo's exception that ends a graph.
    """
    now = getattr(tx.output, "current_tx", tx)
    reason = f"{why} ({now.f_code.co_filename}:{now.lineno})"
    for owner in tracing.owners:
        watched.refused.setdefault(owner, reason)
    _leave_to_eager(reason)
    raise AssertionError("a graph went on that was ended")


def _is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Has an optimizer a class that is not torch's?"""
    kinds = type(optimizer).__mro__
    inside = kinds[: kinds.index(torch.optim.Optimizer)]
    return not all(kind.__module__.startswith("torch.") for kind in inside)


def _stepping() -> list[torch.optim.Optimizer]:
    """The optimizer one of whose methods is among the callers, as a list of one; [] if
    there is none, or gradients are recorded.
    """
    if torch.is_grad_enabled():
        return []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            return [owner]
        frame = frame.f_back
    return []


def leave_no_patches(backend: Callable[..., Any]) -> None:
    """Undo what Dynamo's patches leave behind after each trace for `backend`, and
    before any trace what an interrupted one has left.

    Relies on `convert_frame._compile`, in which Dynamo does all of a trace; where that
    is missing, the context variables that `config.patch` leaves stay.
    """
    try:
        converter: Any = importlib.import_module("torch._dynamo.convert_frame")
        trace = converter._compile
    except (ImportError, AttributeError):
        return

    @functools.wraps(trace)
    def traced(*args: Any, **kwargs: Any) -> Any:
        settle()
        if any(leads_to(x, backend) for x in args if callable(x)):
            return within_copy(trace, *args, **kwargs)
        return trace(*args, **kwargs)

    converter._compile = traced


#: Ends of a graph that are meant: by torch.optim's own decorator, and by closures.
MEANT = ("Call to `torch._dynamo.graph_break()`", "`torch.compiler.disable()`d")


def on_graph_break(
    backend: Callable[..., Any], tell: Callable[[str, str, torch.optim.Optimizer], None]
) -> None:
    """Call `tell(place, reason, optimizer)` when Dynamo ends a graph within code that
    holds an optimizer, for `backend`, and nobody meant it to.

    `place` is a source line. What the step calls while gradients are recorded does not
    count: it is a closure, not the update. Relies on the method with which Dynamo logs
    such ends, and on attributes of its tracer; where they are others, nobody is told.
    """
    try:
        translator: Any = importlib.import_module(
            "torch._dynamo.symbolic_convert"
        ).InstructionTranslatorBase
        log = translator.log_graph_break
    except (ImportError, AttributeError):
        return

    @functools.wraps(log)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        errors = [x for x in (*args, *kwargs.values()) if isinstance(x, Exception)]
        if errors and tracing.cuts is not None:
            tracing.cuts += [*(getattr(errors[0], "real_stack", None) or ())]
        kind = str(getattr(errors[0], "gb_type", "")) if errors else ""
        output: Any = getattr(self, "output", None)
        if (
            errors
            and not getattr(errors[0], "logged", False)
            and not any(meant in kind for meant in MEANT)
            and leads_to(getattr(output, "compiler_fn", None), backend)
        ):
            owners = _optimizers(output.root_tx)
            stack = getattr(errors[0], "real_stack", None)
            line = stack[-1] if stack else None
            if owners and line and torch.is_grad_enabled():
                # in the closure of a step, if not in a step that records gradients
                code = inspect.unwrap(type(owners[0]).step).__code__
                in_step = (code.co_filename, code.co_name) == (line.filename, line.name)
                line = line if in_step else None
            if owners and line and not refusal_of(owners[0]):
                place = f"{line.filename}:{line.lineno}: {line.line}"
                tell(place, kind or type(errors[0]).__name__, owners[0])
        return log(self, *args, **kwargs)

    translator.log_graph_break = told


@contextlib.contextmanager
def cuts_noted() -> Iterator[list[Any]]:
    """A list that gets the lines of source at which Dynamo ends a graph in this thread,
    with those that led there: objects with `filename`, `lineno`, `name` and `line`.
    """
    before, tracing.cuts = tracing.cuts, []
    try:
        yield tracing.cuts
    finally:
        tracing.cuts = before


def on_recompile_limit(
    backend: Callable[..., Any],
    tell: Callable[[str, torch.optim.Optimizer | None], None],
) -> None:
    """Call `tell(function, optimizer)` when Dynamo gives up on code for `backend`.

    `function` names the code and its place; `optimizer` is the one whose step it is, if
    it is one. Relies on the function by which Dynamo asks whether a limit is exceeded,
    and on local names of its caller; where they are others, nobody is told.
    """
    try:
        converter: Any = importlib.import_module("torch._dynamo.convert_frame")
        exceeds_limit = converter.exceeds_recompile_limit
    except (ImportError, AttributeError):
        return

    @functools.wraps(exceeds_limit)
    def exceeds(*args: Any, **kwargs: Any) -> Any:
        answer = exceeds_limit(*args, **kwargs)
        names = sys._getframe(1).f_locals
        if (
            answer[0]
            and "code" in names
            and leads_to(names.get("compiler_fn"), backend)
        ):
            code = names["code"]
            place = f"{code.co_filename}:{code.co_firstlineno}"
            owners = _optimizers(names["frame"]) if names.get("frame") else []
            tell(f"{code.co_name} ({place})", owners[0] if owners else None)
        return answer

    converter.exceeds_recompile_limit = exceeds


def on_failure(
    backend: Callable[..., Any],
    tell: Callable[[str, str, torch.optim.Optimizer | None], None],
) -> None:
    """Where Dynamo itself fails while it traces code for `backend`, that code runs in
    eager, and `tell(function, reason, optimizer)` is called.

    As Dynamo does where it ends a graph. Errors of backends are none of these. Relies
    on the class that traces a function, and on the class of Dynamo's own errors; where
    they are others, such an error reaches the caller of the step.
    """
    try:
        from torch._dynamo.convert_frame import ConvertFrameAssert
        from torch._dynamo.exc import InternalTorchDynamoError
    except ImportError:
        return
    convert = ConvertFrameAssert.__call__

    @functools.wraps(convert)
    def converted(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return convert(self, frame, *args, **kwargs)
        except InternalTorchDynamoError as error:
            # torch 2.11 raises without a cause
            within = error.__cause__ or error.__context__
            if not leads_to(self, backend) or isinstance(within, Warning):
                raise
            code = frame.f_code
            place = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
            reason = str(error).strip().partition("\n")[0]
            owners = _optimizers(frame)
            tell(place, reason, owners[0] if owners else None)
        _leave_to_eager(reason)
        raise AssertionError("a graph went on that was ended")

    ConvertFrameAssert.__call__ = converted  # type: ignore[method-assign]


def _optimizers(frame: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that code sees: its locals (one level of tuples deep, and what
    steps several), what it closes over, and globals that it names.
    """
    seen = list(frame.f_locals.values())
    seen += [y for x in seen if type(x) is tuple for y in x]
    seen += [y for x in seen if getattr(type(x), STEPS, False) for y in x.optimizers]
    for cell in getattr(frame, "closure", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            seen.append(cell.cell_contents)
    seen += [frame.f_globals.get(name) for name in frame.f_code.co_names]
    return [x for x in seen if isinstance(x, torch.optim.Optimizer)]


def leads_to(compiler: Any, backend: Callable[..., Any]) -> bool:
    """Is `backend` what Dynamo calls as `compiler`, within whatever wrappers?"""
    return any(
        layer is backend or getattr(layer, "compiler_fn", None) is backend
        for layer in layers_of(compiler)
    )


def layers_of(compiler: Any) -> Iterator[Any]:
    """The function that Dynamo calls with a graph, then what each wrapper wraps."""
    for _ in range(8):  # whoever wraps a backend may wrap itself
        if compiler is None:
            return
        yield compiler
        names = "_torchdynamo_orig_backend", "_compiler_fn", "compiler_fn"
        wrapped = (getattr(compiler, name, None) for name in names)
        compiler = next((x for x in wrapped if x is not None), None)


def initialize(optimizer: Any) -> bool:
    """Make the state of all parameters as Dynamo makes it before it traces.

    Dynamo calls `_init_group` for real, with empty lists. False where there is none, or
    one with other arguments.
    """
    make = getattr(optimizer, "_init_group", None)
    if make is None:
        return False
    params = list(inspect.signature(make).parameters.values())[1:]
    if any(x.kind not in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in params):
        return False
    for group in optimizer.param_groups:
        make(group, *([] for x in params if x.default is x.empty))
    return True


def number_sources(gm: torch.fx.GraphModule) -> dict[int, str]:
    """The sources of those arguments of a graph that are numbers, by position, such as
    "L['self'].t".

    A float comes as a tensor of one element. Relies on the `grapharg` that Dynamo notes
    at each placeholder; a source that it does not name is "".
    """
    sources = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        graph_arg = node.meta.get("grapharg")
        tensor = isinstance(node.meta.get("example_value"), torch.Tensor)
        if graph_arg is None or (
            tensor and not getattr(graph_arg, "pass_arg_as_tensor", False)
        ):
            continue
        name = getattr(getattr(graph_arg, "source", None), "name", "")
        sources[i] = name() if callable(name) else str(name)
    return sources
