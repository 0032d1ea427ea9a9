"""Make Dynamo trace the plain step that its user configured, not the capturable one.

Dynamo sets `capturable` in all traced groups, and moves counters to the device of the
parameters. While torch.optim is traced, it computes with tensors what it computes with
Python numbers in eager. For other backends all of that stays.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from ..locks import new_lock
from .dtype_groups import groups_dtypes
from .layers import traces_for
from .names import Missing, find
from .patches import Hook, Patcher, patch
from .tracing import tracing

TORCH = os.path.dirname(torch.__file__) + os.sep
OPTIM = os.path.dirname(torch.optim.__file__) + os.sep
#: The folder of this package, whose own code must detect that it is being traced.
HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep
#: Checks in torch.optim's base class decide no number, only how lanes are sorted.
BASE = torch.optim.Optimizer.__name__ + "."


def answers_as_eager(code: types.CodeType) -> bool:
    """May code compute differently if it is compiled?

    torch.optim's does, and so do optimizers of other packages. The rest of torch checks
    for a compilation so that it can be traced at all.
    """
    file = code.co_filename
    if not file.startswith(OPTIM):
        return not file.startswith((TORCH, HERE))
    return not getattr(code, "co_qualname", code.co_name).startswith(BASE)


#: Loss of a step for which Dynamo's trace differs from eager.
LOST = "steps whose counters take part in the arithmetic run in eager"


# ---------------------------------------------------------------- is_compiling

#: Part of the names of functions that Dynamo makes for the code after a graph break.
RESUMED = "torch_dynamo_resume_in_"


@functools.cache
def _compiling_checks() -> list[Any]:
    """Return the functions by which code checks whether it is being compiled."""
    homes = (
        torch.compiler,
        find("torch._utils", None),
        find("torch._dynamo.external_utils", None),
    )
    functions = [getattr(home, "is_compiling", None) for home in homes]
    return [
        x for x in (*functions, torch.compiler.is_dynamo_compiling) if x is not None
    ]


@functools.cache
def _forwarding() -> frozenset[types.CodeType]:
    """Return the code of those functions that are called on behalf of their caller."""
    return frozenset(check.__code__ for check in _compiling_checks()[1:])


@patch(
    "plain-answers",
    "`is_compiling()` has eager's answer for an optimizer",
    LOST,
    bits=True,
)
def ANSWERS(patcher: Patcher) -> None:
    ConstantVariable = find("torch._dynamo.variables.constant:ConstantVariable")
    in_graph = find("torch._dynamo.variables.torch:TorchInGraphFunctionVariable")
    handlers = in_graph._get_handlers()
    backend = patcher.backend

    def handle(original: Hook, this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if answers_as_eager(tx.f_code) and traces_for(tx, backend) and _steps(tx):
            capturable = tx.symbolic_locals.get("capturable")
            # for a capturable group all ways of torch.optim compute the same; its check
            # for devices with graphs is omitted, as in Dynamo
            torchs = tx.f_code.co_filename.startswith(OPTIM)
            if not torchs or capturable is None or not _is_true(capturable):
                return ConstantVariable.create(False)
        return original(this, tx, *args, **kwargs)

    def _is_true(x: Any) -> bool:
        return bool(x.is_python_constant() and x.as_python_constant())

    if torch.compiler.is_compiling not in handlers:
        raise Missing("Dynamo has no handler of torch.compiler.is_compiling")
    for check in _compiling_checks():
        if check in handlers:
            patcher.handler(handlers, check, handle)


def _steps(tx: Any) -> bool:
    """Is code traced as part of an optimizer's step, and not of a module's forward?

    Models check for a compilation so that they can be traced at all. The innermost
    frame with a module or an optimizer as its first argument decides. Code that Dynamo
    resumes after a graph break may have lost both: then it is a step if gradients are
    not recorded. Code of torch.optim always belongs to a step.
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
    """Return the type of a variable of Dynamo; object if it is uncertain."""
    kind: Any = object
    with contextlib.suppress(Exception):
        realized = getattr(variable, "is_realized", lambda: True)()
        kind = variable.python_type() if realized else variable.peek_type()
        if kind is types.CellType:
            # also names that an inner function uses
            return _type_of(tx, tx.output.side_effects.load_cell(variable))
    return kind if isinstance(kind, type) else object


# ---------------------------------------------------------------- groups and counters


@patch(
    "plain-groups",
    "Dynamo leaves `capturable` and the counters of an optimizer as they are",
    LOST,
    bits=True,
)
def GROUPS(patcher: Patcher) -> None:
    """Trace groups and counters as they are.

    Dynamo traces each group as capturable, and moves counters to the device of the
    parameters. From torch 2.15 on one of its methods decides this.
    """
    AttrSource = find("torch._dynamo.source:AttrSource")
    VariableTracker = find("torch._dynamo.variables.base:VariableTracker")
    LazyVariableTracker = find("torch._dynamo.variables.lazy:LazyVariableTracker")
    kind = find("torch._dynamo.variables.optimizer:OptimizerVariable")
    backend = patcher.backend

    def keep(original: Hook, self: Any, tx: Any) -> None:
        if not traces_for(tx, backend):
            original(self, tx)
            return
        # keep its other effect: guards on all items of the groups
        source = self.source and AttrSource(self.source, "param_groups")
        groups = VariableTracker.build(tx, self.value.param_groups, source)
        LazyVariableTracker.realize_all(groups)

    def move(original: Hook, self: Any) -> None:
        if not tracing.hooked:
            original(self)

    def is_safe(original: Hook, self: Any, group: Any) -> bool:
        return not tracing.hooked and bool(original(self, group))

    patcher.around(kind, "_set_capturable", keep, "self", "tx")
    patcher.around(kind, "move_step_if_cpu", move, "self")
    if hasattr(kind, "_safe_to_set_capturable"):
        patcher.around(kind, "_safe_to_set_capturable", is_safe, "self", "group")


# ---------------------------------------------------------------- numbers of tensors

#: Arithmetic whose result is a float wherever an operand is one.
ARITHMETIC = frozenset(
    [
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow),
        *(operator.neg, operator.abs, torch.sym_max, torch.sym_min),
    ]
)


@patch(
    "plain-numbers",
    "numbers read with .item(), and arithmetic on them, are symbols",
    "a step that computes with its counters as Python's numbers is cut into pieces",
    bits=True,
)
def NUMBERS(patcher: Patcher) -> None:
    """Skip Dynamo's relations between numbers, and its assertion on powers.

    Dynamo would derive each number from the others, and assert that no power is
    complex. torch.optim branches where a power might be complex.
    """
    VariableTracker = find("torch._dynamo.variables.base:VariableTracker")
    symbol = find("torch._dynamo.variables.tensor:SymNodeVariable")
    TensorVariable = find("torch._dynamo.variables.tensor:TensorVariable")
    in_graph = find("torch._dynamo.variables.torch:TorchInGraphFunctionVariable")
    find("torch.fx.experimental.symbolic_shapes:ShapeEnv.create_unbacked_symfloat")
    make = symbol.create.__func__
    handlers = in_graph._get_handlers()
    backend = patcher.backend

    def fresh(tx: Any) -> Any:
        return tx.output.shape_env.create_unbacked_symfloat()

    def create(cls: Any, tx: Any, proxy: Any, sym_num: Any = None, **more: Any) -> Any:
        if sym_num is None and _is_number(proxy.node) and traces_for(tx, backend):
            sym_num = fresh(tx)
        return make(cls, tx, proxy, sym_num, **more)

    def read(original: Hook, self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        value = self.proxy.node.meta.get("example_value")
        if (
            args
            or kwargs
            or not isinstance(value, torch.Tensor)
            or value.dim()
            or not value.is_floating_point()
            or not traces_for(tx, backend)
            or not (_captures_numbers() or tx.f_code.co_filename.startswith(OPTIM))
        ):
            return original(self, tx, *args, **kwargs)
        proxy = tx.output.create_proxy("call_method", "item", (self.as_proxy(),), {})
        return symbol.create(tx, proxy, fresh(tx))

    def as_tensor(original: Hook, this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a tensor of a number without a value, without reading the value."""
        unknown = (
            len(args) == 1
            and isinstance(args[0], symbol)
            and is_unknown(args[0].sym_num)
        )
        if not unknown or not traces_for(tx, backend):
            return original(this, tx, *args, **kwargs)
        keywords = {k: v for k, v in kwargs.items() if not v.is_constant_none()}
        dtype = VariableTracker.build(tx, torch.get_default_dtype())
        keywords.setdefault("dtype", dtype)
        return in_graph(torch.scalar_tensor).call_function(tx, list(args), keywords)

    bound: Any = classmethod
    patcher.handler(handlers, torch.as_tensor, as_tensor)
    patcher.attribute(symbol, "create", bound(create))
    patcher.around(TensorVariable, "method_item", read, "self", "tx")


def _captures_numbers() -> bool:
    return bool(find("torch._dynamo:config").capture_scalar_outputs)


def is_unknown(x: Any) -> bool:
    """Was a number of a trace read from a tensor, or made from such a number?"""
    return isinstance(x, (torch.SymFloat, torch.SymBool)) and not x.node.has_hint()


def _is_number(node: Any) -> bool:
    """Does a node compute a float from numbers, one of which has no value?"""
    if node.op != "call_function" or node.target not in ARITHMETIC or node.kwargs:
        return False
    values = [
        x.meta.get("example_value") if isinstance(x, torch.fx.Node) else x
        for x in node.args
    ]
    floats = all(isinstance(x, (torch.SymFloat, float, int)) for x in values)
    return floats and any(map(is_unknown, values))


# ---------------------------------------------------------------- without Dynamo


_patching = new_lock()


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` return in this thread what a trace gets.

    That is True, but False for optimizers, and for the function that groups lists of
    several dtypes.
    """
    with _patching:
        check, forwarding = torch.compiler.is_compiling, _forwarding()

        def answer() -> bool:
            if not tracing.as_if:
                return check()
            frame = sys._getframe(1)
            while frame.f_code in forwarding and frame.f_back:
                frame = frame.f_back
            if not answers_as_eager(frame.f_code):
                return not groups_dtypes(frame)
            torchs = frame.f_code.co_filename.startswith(OPTIM)
            return torchs and bool(frame.f_locals.get("capturable"))

        torch.compiler.is_compiling = answer
        tracing.as_if += 1
        try:
            yield
        finally:
            tracing.as_if -= 1
            torch.compiler.is_compiling = check
