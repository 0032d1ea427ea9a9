"""Rules for functions of torch besides ATen, and for `torch._foreach_*`."""

from __future__ import annotations

import ast
import operator
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from .. import compat
from . import iteration, tensors
from .class_functions import is_instance
from .container_functions import empty
from .functions import Args, Keywords, Rule, compute, rule
from .machine import Machine, usable
from .memory import List, pure
from .values import (
    PLAIN,
    Data,
    First,
    Grouped,
    Known,
    Level,
    Many,
    Ref,
    Tensor,
    Value,
    level_of,
    uniform,
)

# ---------------------------------------------------------------- torch


def _truth(value: bool) -> Rule:
    return lambda *_: Known(value)


rule(getattr(torch.jit, "is_scripting", None), getattr(torch.jit, "is_tracing", None))(
    _truth(False)
)
rule(*compat.SCRIPTING)(_truth(False))


@rule(
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    *compat.COMPILING,
    torch.is_grad_enabled,
    torch.cuda.is_available,
    getattr(torch.cuda, "is_current_stream_capturing", None),
)
def _unknown_truth(*_: Any) -> Value:
    return uniform(bool)


@rule(*compat.BACKEND_NAME)
def _backend_name(*_: Any) -> Value:
    return uniform(str)


@rule(
    *compat.OVERRIDDEN,
    getattr(torch.overrides, "has_torch_function_unary", None),
    getattr(torch.overrides, "has_torch_function_variadic", None),
)
def _overridden(*_: Any) -> Value:
    return Known(False)  # lanes are plain tensors and parameters


@rule(torch.get_default_dtype)
def _dtype(*_: Any) -> Value:
    return uniform(torch.dtype)


@rule(torch.finfo, torch.iinfo)
def _finfo(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    info = type(torch.finfo(torch.float32)), type(torch.iinfo(torch.int32))
    computed = compute(machine, args, node)
    return Data(level_of(computed) or Level.UNIFORM, frozenset(info))


@rule(torch.device)
def _device(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return compute(machine, args, node, (torch.device,))


@rule(torch.is_tensor)
def _is_tensor(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return is_instance(machine, [args[0], Known(torch.Tensor)], {}, node)


rule(
    torch.is_complex,
)(lambda m, a, k, n: _metadata(m, a, n, "is_complex"))
rule(
    torch.is_floating_point,
)(lambda m, a, k, n: _metadata(m, a, n, "is_floating_point"))
rule(torch.numel)(lambda m, a, k, n: _metadata(m, a, n, "numel"))


def _metadata(machine: Machine, args: Args, node: ast.AST, name: str) -> Value:
    value = usable(machine, args[0], node)
    if isinstance(value, (Tensor, First)):
        answer = tensors.metadata(machine, value, name, Level.UNIFORM, node)
        assert answer is not None
        return answer
    if level_of(value) is not None:
        return compute(machine, [value], node, (bool,))
    raise machine.refusal("it tests an unknown value", node)


@rule(torch.result_type, torch.promote_types, torch.can_cast)
def _promoted(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    for x in args:
        usable(machine, x, node)
    return Data(Level.KIND, frozenset({torch.dtype, bool}))


@rule(getattr(torch_optimizer, "_get_value", None))
def _get_value(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    value = usable(machine, args[0], node)
    if isinstance(value, Tensor):
        return Tensor(shared=value.shared, number=True, foreign=value.foreign)
    return value


@rule(getattr(torch_optimizer, "_stack_if_compiling", None))
def _stack(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    # it returns one tensor of the numbers, or their list: a number for each lane
    if iteration.lanes_of(machine, args[0], node) is None:
        if not empty(machine, args[0]):
            raise machine.refusal("it stacks a list of something besides lanes", node)
    return args[0]


@rule(*compat.CHECKS)
def _nothing(*_: Any) -> Value:
    return Known(None)


def _sorted_by(machine: Machine, args: Args, node: ast.AST, keys: Any) -> Value:
    outer = machine.container(args[0], node) if isinstance(args[0], Ref) else None
    if machine.lane is not None:
        raise machine.refusal("it sorts lanes within a loop over lanes", node)
    if not isinstance(outer, List) or outer.items is None:
        raise machine.refusal("it sorts unknown lists", node)
    lanes: Any = None
    for x in outer.items:
        sequence = iteration.lanes_of(machine, x, node)
        if sequence is None:
            if not empty(machine, x):
                raise machine.refusal(
                    "it sorts a list of something besides lanes", node
                )
            continue
        if lanes is not None and sequence.lanes != lanes:
            raise machine.refusal("two lists may have different lanes", node)
        lanes = sequence.lanes
    first = outer.items[0] if outer.items else Known(None)
    container = machine.now.heap[first.number] if isinstance(first, Ref) else None
    first_sequence = iteration.lanes_of(machine, first, node)
    single = (
        isinstance(container, List)
        and container.filled
        and first_sequence is not None
        and isinstance(first_sequence.item, Tensor)
        and first_sequence.item.role == "param"
        and machine.world.single
    )
    return Grouped(outer.items, lanes, keys[0], keys[1], single)


_DEVICE = Data(Level.UNIFORM, frozenset({torch.device, type(None)}))
_DTYPE = Data(Level.UNIFORM, frozenset({torch.dtype, type(None)}))


@rule(
    getattr(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", None),
    getattr(torch_optimizer, "_group_tensors_by_device_and_dtype", None),
)
def _by_dtype(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return _sorted_by(machine, args, node, ((_DEVICE, _DTYPE), True))


@rule(*compat.SORTS_BY_DIMS)
def _by_dims(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    keys = (_DEVICE, _DTYPE, uniform(bool))
    return _sorted_by(machine, args, node, (keys, False))


# ---------------------------------------------------------------- lists of lanes


def foreach(
    machine: Machine, name: str, args: Args, keywords: Keywords, node: ast.AST
) -> Value:
    """Evaluate a call of torch._foreach_*: each list position belongs to one lane."""
    lanes: Any = None
    values: list[Value] = []
    has_empty, tensors_only, misaligned = False, True, False
    for value in (*args, *keywords.values()):
        usable(machine, value, node)
        sequence = iteration.lanes_of(machine, value, node)
        if sequence is None:
            if empty(machine, value):
                has_empty = True
            else:
                values.append(value)
            continue
        if lanes is not None and sequence.lanes != lanes:
            misaligned = True
        else:
            lanes = sequence.lanes
        tensors_only = tensors_only and pure(sequence.item)
        if misaligned and not tensors_only:
            # the dry run shows which tensors a call combines, but not which numbers
            raise machine.refusal("two lists may have different lanes", node)
        tensors.Operands(machine, node).take(sequence.item)
    if lanes is None:
        if has_empty:
            return machine.list_of()
        operands = tensors.Operands(machine, node)
        for value in values:
            operands.take(value)
        if name.endswith("_"):
            return Known(None)
        return Many(Tensor(shared=operands.shared), Level.KIND)
    if machine.lane is not None:
        raise machine.refusal("it uses all lanes within a loop over lanes", node)
    for value in values:
        scalar = isinstance(value, Tensor) and value.shared
        if level_of(value) is None and not scalar:
            raise machine.refusal("it pairs lanes with items by position", node)
        if isinstance(value, Known) and not isinstance(value.value, PLAIN):
            raise machine.refusal("it passes torch an object", node)
    if name.endswith("_"):
        return Known(None)
    result = List(None, lanes=lanes, item=Tensor(), writer=machine.site(node))
    return machine.new(result)


_OPERATORS = {
    **{getattr(operator, n): n for n in "add sub mul truediv pow neg".split()},
}


@rule(*_OPERATORS)
def _operator(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if any(isinstance(x, Tensor) for x in args):
        return tensors.aten(machine, "add", args, {}, node)
    return compute(machine, args, node)
