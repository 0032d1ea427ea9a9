"""Have Dynamo trace the plain step that its user configured, not the capturable one.

Dynamo sets `capturable` in all groups of what it traces, and moves counters to the
device of the parameters; torch.optim computes with tensors, while it is traced, what
it computes with Python's numbers in eager. Where a trace leads to another backend all
of that stays.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .dynamo import leads_to
from .tracing import tracing

TORCH = os.path.dirname(torch.__file__) + os.sep
OPTIM = os.path.dirname(torch.optim.__file__) + os.sep
#: The folder of this package, whose own code asks to know that it is being traced.
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
#: What torch.optim's base class asks decides no number: how lanes are sorted, checks.
BASE = torch.optim.Optimizer.__name__ + "."


def answers_as_eager(code: types.CodeType) -> bool:
    """May code compute otherwise where it is compiled?

    torch.optim's does, and so do optimizers of other packages. The rest of torch asks
    so that it can be traced at all.
    """
    file = code.co_filename
    if not file.startswith(OPTIM):
        return not file.startswith((TORCH, HERE))
    return not getattr(code, "co_qualname", code.co_name).startswith(BASE)


def trace_plainly(backend: Callable[..., Any]) -> None:
    """Where Dynamo traces for `backend`: optimizers take the ways of eager.

    Relies on Dynamo's table of handlers, on the methods with which it changes groups
    and counters, and on how it makes symbols of `.item()`. Where they are others, it
    does as ever, and the step is traced as capturable.
    """
    with contextlib.suppress(ImportError, AttributeError):
        _answer_as_eager(backend)
        _keep_groups(backend)
        _keep_numbers(backend)


def _ours(tx: Any, backend: Callable[..., Any]) -> bool:
    return leads_to(getattr(tx.output, "compiler_fn", None), backend)


# ---------------------------------------------------------------- is it compiled?

#: In the names of functions that Dynamo makes of what comes after a cut.
RESUMED = "torch_dynamo_resume_in_"


@functools.cache
def _asked() -> list[Any]:
    """What code asks to know whether it is being compiled."""
    from torch._dynamo import external_utils

    homes = torch.compiler, torch._utils, external_utils
    functions = [getattr(home, "is_compiling", None) for home in homes]
    return [
        x for x in (*functions, torch.compiler.is_dynamo_compiling) if x is not None
    ]


@functools.cache
def _forwarding() -> frozenset[types.CodeType]:
    """The code of those of them that are asked in the place of their caller."""
    return frozenset(asked.__code__ for asked in _asked()[1:])


def _answer_as_eager(backend: Callable[..., Any]) -> None:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()

    def answering(original: Any) -> Any:
        @functools.wraps(original)
        def handle(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            if answers_as_eager(tx.f_code) and _ours(tx, backend) and _steps(tx):
                capturable = tx.symbolic_locals.get("capturable")
                # for a capturable group all ways of torch.optim compute the same; its
                # check for devices with graphs is left out, as Dynamo leaves it out
                torchs = tx.f_code.co_filename.startswith(OPTIM)
                if not torchs or capturable is None or not _is_true(capturable):
                    return ConstantVariable.create(False)
            return original(this, tx, *args, **kwargs)

        return handle

    def _is_true(x: Any) -> bool:
        return bool(x.is_python_constant() and x.as_python_constant())

    for asked in _asked():
        if asked in handlers:
            handlers[asked] = answering(handlers[asked])


def _steps(tx: Any) -> bool:
    """Is code traced as part of an optimizer's step, and of no module's forward?

    Models ask so that they can be traced at all. The innermost frame that is given a
    module as its first argument, or an optimizer, decides. What Dynamo resumes after a
    cut may have lost both: then a step is what records no gradients. What torch.optim
    has is always a step's.
    """
    if tx.f_code.co_filename.startswith(OPTIM):
        return True
    resumed = False
    while tx is not None:
        code = tx.f_code
        args = [tx.symbolic_locals.get(x) for x in code.co_varnames[: code.co_argcount]]
        kinds = [_type_of(tx, x) for x in args]
        resumed = RESUMED in code.co_name
        owners = kinds if resumed else kinds[:1]
        if any(issubclass(kind, torch.nn.Module) for kind in owners):
            return False
        if any(issubclass(kind, torch.optim.Optimizer) for kind in kinds):
            return True
        tx = getattr(tx, "parent", None)
    return resumed and not torch.is_grad_enabled()


def _type_of(tx: Any, variable: Any) -> type:
    """The type of what one of Dynamo's variables stands for; object, if not known."""
    kind: Any = object
    with contextlib.suppress(Exception):
        realized = getattr(variable, "is_realized", lambda: True)()
        kind = variable.python_type() if realized else variable.peek_type()
        if kind is types.CellType:
            # what a function within refers to as well
            return _type_of(tx, tx.output.side_effects.load_cell(variable))
    return kind if isinstance(kind, type) else object


# ---------------------------------------------------------------- groups and counters


def _keep_groups(backend: Callable[..., Any]) -> None:
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.optimizer import OptimizerVariable

    set_capturable = OptimizerVariable._set_capturable
    move_step = OptimizerVariable.move_step_if_cpu
    call_method = OptimizerVariable.call_method

    @functools.wraps(set_capturable)
    def keep(self: Any, tx: Any) -> None:
        if not _ours(tx, backend):
            set_capturable(self, tx)
            return
        # what else it does: all that the groups hold is guarded
        source = self.source and AttrSource(self.source, "param_groups")
        groups = VariableTracker.build(tx, self.value.param_groups, source)
        LazyVariableTracker.realize_all(groups)

    @functools.wraps(call_method)
    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        before = tracing.groups_kept
        tracing.groups_kept = _ours(tx, backend)
        try:
            return call_method(self, tx, name, args, kwargs)
        finally:
            tracing.groups_kept = before

    @functools.wraps(move_step)
    def move(self: Any) -> None:
        if not tracing.groups_kept:
            move_step(self)

    kind: Any = OptimizerVariable
    kind._set_capturable = keep
    kind.call_method = call
    kind.move_step_if_cpu = move


# ---------------------------------------------------------------- numbers of tensors

#: Arithmetic whose result is a float wherever an operand is one.
ARITHMETIC = frozenset(
    [
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow),
        *(operator.neg, operator.abs, torch.sym_max, torch.sym_min),
    ]
)


def _keep_numbers(backend: Callable[..., Any]) -> None:
    """Numbers read with `.item()`, and arithmetic on them, are symbols of their own.

    Dynamo would work out what each is of the others, and assert that no power is
    complex: torch.optim branches where it might be.
    """
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    symbol: Any = SymNodeVariable
    make = symbol.create.__func__
    item = TensorVariable.method_item

    def fresh(tx: Any) -> Any:
        return tx.output.shape_env.create_unbacked_symfloat()

    def create(cls: Any, tx: Any, proxy: Any, sym_num: Any = None, **more: Any) -> Any:
        if sym_num is None and _is_number(proxy.node) and _ours(tx, backend):
            sym_num = fresh(tx)
        return make(cls, tx, proxy, sym_num, **more)

    @functools.wraps(item)
    def read(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        value = self.proxy.node.meta.get("example_value")
        if (
            args
            or kwargs
            or not isinstance(value, torch.Tensor)
            or value.dim()
            or not value.is_floating_point()
            or not _ours(tx, backend)
            or not (_captures_numbers() or tx.f_code.co_filename.startswith(OPTIM))
        ):
            return item(self, tx, *args, **kwargs)
        proxy = tx.output.create_proxy("call_method", "item", (self.as_proxy(),), {})
        return SymNodeVariable.create(tx, proxy, fresh(tx))

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    original_tensor = handlers.get(torch.as_tensor)

    def as_tensor(this: Any, tx: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a number that nobody knows: what makes one does not ask for it."""
        unknown = isinstance(x, SymNodeVariable) and is_unknown(x.sym_num)
        if not unknown or args or not _ours(tx, backend):
            return (
                original_tensor(this, tx, x, *args, **kwargs)
                if original_tensor
                else None
            )
        keywords = {k: v for k, v in kwargs.items() if not v.is_constant_none()}
        dtype = VariableTracker.build(tx, torch.get_default_dtype())
        keywords.setdefault("dtype", dtype)
        make = TorchInGraphFunctionVariable(torch.scalar_tensor)
        return make.call_function(tx, [x], keywords)

    handlers[torch.as_tensor] = as_tensor
    bound: Any = classmethod
    symbol.create = bound(create)
    TensorVariable.method_item = read  # type: ignore[method-assign]


def _captures_numbers() -> bool:
    import torch._dynamo

    return bool(torch._dynamo.config.capture_scalar_outputs)


def is_unknown(x: Any) -> bool:
    """Is a number of a trace one that was read from a tensor, or made from such?"""
    return isinstance(x, (torch.SymFloat, torch.SymBool)) and not x.node.has_hint()


def _is_number(node: Any) -> bool:
    """Does a node compute a float from numbers, one of which nobody knows?"""
    if node.op != "call_function" or node.target not in ARITHMETIC or node.kwargs:
        return False
    values = [
        x.meta.get("example_value") if isinstance(x, torch.fx.Node) else x
        for x in node.args
    ]
    floats = all(isinstance(x, (torch.SymFloat, float, int)) for x in values)
    return floats and any(map(is_unknown, values))


# ---------------------------------------------------------------- without Dynamo


_patching = threading.Lock()


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` say in this thread what it says to a trace:
    yes, but to optimizers.
    """
    with _patching:
        asked, forwarding = torch.compiler.is_compiling, _forwarding()

        def answer() -> bool:
            if not tracing.as_if:
                return asked()
            frame = sys._getframe(1)
            while frame.f_code in forwarding and frame.f_back:
                frame = frame.f_back
            if not answers_as_eager(frame.f_code):
                return True
            torchs = frame.f_code.co_filename.startswith(OPTIM)
            return torchs and bool(frame.f_locals.get("capturable"))

        torch.compiler.is_compiling = answer
        tracing.as_if += 1
        try:
            yield
        finally:
            tracing.as_if -= 1
            torch.compiler.is_compiling = asked
