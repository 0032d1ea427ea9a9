"""Decide which steps need a missing capability for eager's bits.

A capability that is needed for bits is never just left out: steps that need it are not
compiled. A step of a class outside of torch needs the guards that Dynamo lacks, unless
its code is plain (plain_code.py). Torch's own steps need to be traced as their user
configured them. Steps whose counters take no part in the arithmetic, as the graph
shows, are excepted.
"""

from __future__ import annotations

import functools
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.optim import Optimizer

from ..errors import UnsupportedTorch
from .arithmetic import ORDER, computes_with_symbols
from .attributes import READS, WRITES
from .capability import Capability, switches
from .dtype_groups import DTYPE_GROUPS, mixes_dtypes
from .guards import LOST as GUARDED
from .missing_kernels import missing_kernel
from .modes import NUMBERS_PASS_MODES
from .names import find
from .numpy_arrays import other_arithmetic
from .owners import among_callers, is_own, optimizers_of
from .patch_state import patch_state
from .plain import ANSWERS, GROUPS, NUMBERS
from .plain_code import names_in, plain, plain_code, writes_attributes
from .rewrites import REWRITES
from .sources import strange_input
from .states import STATES, is_all_tensors
from .tracing import tracing
from .window import frame_traced

PLAIN = (ANSWERS, GROUPS, NUMBERS)


class _Soundness:
    """Capabilities that are needed for bits and are missing, found once."""

    def __init__(self) -> None:
        self._epoch = -1
        self._lacking: tuple[Capability, ...] = ()

    def lacking(self) -> tuple[Capability, ...]:
        if self._epoch != switches.epoch:
            lacking = [
                x for x in switches.table.values() if x.bits and not x.available()
            ]
            self._lacking, self._epoch = tuple(lacking), switches.epoch
        return self._lacking


soundness = _Soundness()


def is_sound() -> bool:
    """Is everything available that steps may need for their bits?"""
    return not soundness.lacking()


def unsound(optimizer: Optimizer) -> str:
    """Return why a step may not be traced here; "" if its trace has eager's bits."""
    lacking = soundness.lacking()
    if not lacking:
        return ""
    if is_own(optimizer):
        names = names_in(optimizer)
        for capability in lacking:
            if _own_step_needs(capability, optimizer, names):
                return _without(capability)
    if NUMBERS_PASS_MODES in lacking:
        modes = find("torch._C:_len_torch_function_stack", None)
        if modes is None or modes():
            return _without(NUMBERS_PASS_MODES)
    if GROUPS in lacking and _may_be_made_capturable(optimizer):
        return _without(GROUPS)
    return ""


def _may_be_made_capturable(optimizer: Optimizer) -> bool:
    """Does Dynamo set `capturable` in groups whose user did not?

    It does so for parameters on an accelerator.
    """
    return any(
        not group.get("capturable", True)
        and any(p.device.type != "cpu" for p in group["params"])
        for group in optimizer.param_groups
    )


def _own_step_needs(
    capability: Capability, optimizer: Optimizer, names: frozenset[str]
) -> bool:
    if capability is READS:
        return any(x in "_init_group" and x != "_init_group" for x in names)
    if capability is WRITES:
        return writes_attributes(optimizer)
    if capability.without == GUARDED:
        return not plain(optimizer)
    return False


def _without(capability: Capability) -> str:
    return (
        f"torch {torch.__version__} lacks {capability.name}, "
        f"{capability.gives} ({capability.missing()})"
    )


# ---------------------------------------------------------------- graphs


def unsound_graph(gm: torch.fx.GraphModule) -> tuple[str, list[Optimizer]]:
    """Return why the graph of a step may not run, and whose step it is; "" if it may.

    Some of Dynamo's functions continue with a constant after an error in a part of the
    trace. So the graph of a refused trace may still arrive.
    """
    _check_effects(gm)
    if tracing.refusal:
        return tracing.refusal, tracing.owners or tracing.given
    if not soundness.lacking():
        return "", []
    optimizers = tracing.owners or tracing.given or _owners()
    return (_unsound(gm, optimizers) if optimizers else ""), optimizers


def refused_graph(gm: torch.fx.GraphModule) -> str:
    """Return why the graph of an update may not run, traced in any way; or ""."""
    refusal, _ = unsound_graph(gm)
    return refusal or unknown_input(gm)[0]


def unknown_input(gm: torch.fx.GraphModule) -> tuple[str, list[Optimizer]]:
    """Return why no torch can make a step of this graph, and whose step it is.

    An argument comes from an unsupported source, its trace was refused, torch computes
    in it what numpy does, or a call has no kernel.
    """
    refusal = tracing.refusal or strange_input(gm) or other_arithmetic(gm)
    refusal = refusal or missing_kernel(gm)
    return refusal, (tracing.owners or tracing.given or _owners()) if refusal else []


def _check_effects(gm: torch.fx.GraphModule) -> None:
    """Find out from a trace whether hooks still have their effects.

    Dynamo must keep what the trace wrote to optimizers. Counters of torch's optimizers
    must arrive as numbers, as in eager.
    """
    if tracing.stores - tracing.stored and WRITES.available():
        WRITES.lack("a trace lost its writes to the optimizer")
    owners = tracing.owners
    if (
        owners
        # without another hook, counters that are tensors prove nothing about this one
        and all(x.available() for x in PLAIN)
        and not any(map(is_own, owners))
        and all(map(_counts_in_numbers, owners))
        and computes_with_counters(gm)
    ):
        ANSWERS.lack("a trace computed with counters as tensors")


def _counts_in_numbers(optimizer: Optimizer) -> bool:
    """Does eager read an optimizer's counters as Python's numbers?"""
    groups = optimizer.param_groups
    return all(
        group.get("capturable") is False and not group.get("differentiable")
        for group in groups
    )


def _owners() -> list[Optimizer]:
    """Return the optimizers whose step is traced, if Dynamo reported no beginning."""
    frame = frame_traced()
    return among_callers() or ([] if frame is None else optimizers_of(frame))


def _unsound(gm: torch.fx.GraphModule, optimizers: list[Optimizer]) -> str:
    lacking = soundness.lacking()
    for optimizer in optimizers:
        refusal = unsound(optimizer)
        if refusal:
            return refusal
    plainly = [x for x in PLAIN if x in lacking]
    if (
        plainly
        and not all(map(_is_capturable, optimizers))
        and computes_with_counters(gm)
    ):
        return _without(plainly[0])
    if REWRITES in lacking and _is_apart(gm):
        return _without(REWRITES)
    if DTYPE_GROUPS in lacking and any(map(mixes_dtypes, optimizers)):
        return _without(DTYPE_GROUPS)
    if STATES in lacking and any(map(_begins_some, optimizers)):
        return _without(STATES)
    if ORDER in lacking and computes_with_symbols(gm):
        return _without(ORDER)
    return ""


def held_to_plain_code(
    compiled: Callable[..., Any], gm: torch.fx.GraphModule, optimizers: list[Optimizer]
) -> Callable[..., Any]:
    """Return a compiled graph that compares at each call whether its plain code is the
    same.

    The graph lacks guards. If the code has changed, the step runs in eager.
    """
    own = [x for x in optimizers if is_own(x) and x not in patch_state.shadows]
    if not own:
        return compiled
    codes = [(weakref.ref(x), plain_code(x)) for x in own]
    output = next(iter(reversed(gm.graph.nodes)))
    silent = len(own) == 1 and not output.all_input_nodes

    def step(*args: Any) -> Any:
        if all(code.same() for _, code in codes):
            return compiled(*args)
        owner = codes[0][0]()
        if owner is None or not silent:
            raise UnsupportedTorch(
                "the code of a step changed, and this torch has no guard for that: "
                "call torch._dynamo.reset(). Nothing was written."
            )
        disable: Any = torch.compiler.disable
        disable(inspect.unwrap(type(owner).step))(owner)
        return ()

    return step


def _is_capturable(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return all(group.get("capturable") is True for group in groups)


def _begins_some(optimizer: Optimizer) -> bool:
    """Do only some parameters with gradients have a state, which `_init_group` begins?

    States that user code begins have a guard.
    """
    if not hasattr(optimizer, "_init_group"):
        return False
    made = {
        is_all_tensors(optimizer.state.get(p))
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    }
    return len(made) > 1


#: The recognized forms in which Dynamo writes `add_`, `addcmul_` and `addcdiv_` with a
#: number.
SCALED = ["add_", "mul", "fma.default", "copy_", "div", "fma.default", "copy_"]
#: The same for a foreach lerp by a small weight and by a large one.
LERPS = (
    [
        *("_foreach_sub", "full_like", "_foreach_addcmul_"),
        *("_foreach_sub", "tensor", "sub", "neg", "copy_", "_foreach_addcmul_"),
    ],
    ["_foreach_lerp_", "_foreach_lerp_"],
)


@functools.cache
def _forms() -> tuple[str, ...]:
    """Return the calls that Dynamo itself makes of calls that scale or interpolate.

    Traces a function with such calls.
    """

    def scaled(x: Any, y: Any, z: Any) -> None:
        x.add_(y, alpha=0.3)
        x.addcmul_(y, z, value=0.3)
        x.addcdiv_(y, z, value=-0.7)
        torch._foreach_lerp_([x], [y], 0.1)
        torch._foreach_lerp_([x], [z], 0.9)

    calls: list[str] = []

    def inspect_graph(gm: torch.fx.GraphModule, _: Any) -> Any:
        for node in gm.graph.nodes:
            if node.op.startswith("call") and node.target is not operator.getitem:
                calls.append(str(getattr(node.target, "__name__", node.target)))
        return gm.forward

    try:
        with torch.no_grad():
            torch.compile(scaled, backend=inspect_graph, fullgraph=True)(
                *(torch.ones(3, device="cpu") for _ in range(3))
            )
    except Exception:
        return ()
    return tuple(calls)


def _is_apart(gm: torch.fx.GraphModule) -> bool:
    """May a graph have parts of calls that Dynamo decomposed in unrecognized forms?

    Parts of a scaled sum look like user code, so that any graph may.
    """
    forms = [*_forms()]
    if forms[: len(SCALED)] != SCALED:
        return True
    known = forms[len(SCALED) :] in LERPS
    return not known and any(map(_is_taken_apart, gm.graph.nodes))


#: Parts of the names of calls that Dynamo decomposes by default.
APART = ("lerp", "fma")


def _is_taken_apart(node: Node) -> bool:
    """Is a node a part of a call that Dynamo has decomposed?"""
    name = str(getattr(node.target, "__name__", node.target))
    return node.op == "call_function" and (
        any(x in name for x in APART)
        or ("addcmul" in name and "foreach" in name and _is_lerp(node))
    )


def _is_lerp(node: Node) -> bool:
    """Is it the end of a foreach lerp, a difference scaled by tensors of one number?"""
    return any("full" in str(x.target) for x in node.all_input_nodes)


def _value(gm: torch.fx.GraphModule, node: Node) -> Any:
    if node.op != "get_attr":
        return node.meta.get("example_value")
    found: Any = gm
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found


def computes_with_counters(gm: torch.fx.GraphModule) -> bool:
    """Does a graph use its counters for more than to count?

    A counter is a tensor without dimensions to which the graph adds a number. A product
    with zero does not count: the product is zero, for counters are finite. A value
    computed from that is a tensor of float32 where eager has a number of float64. So it
    may meet no tensor of float64.
    """
    nodes = [*gm.graph.nodes]
    counters = {x for x in nodes if x.op in ("get_attr", "placeholder")}
    counters = {x for x in counters if any(_counts(user, x) for user in x.users)}
    derived, zeros = set(counters), False
    for node in nodes:
        if not any(x in derived for x in node.all_input_nodes) or _reads(node):
            continue
        if node.op == "output":
            return any(x in derived - counters for x in node.all_input_nodes)
        if _is_zero(node):
            zeros = True
        elif _only_counts(node, derived) or _shifts(node):
            derived.add(node)
        else:
            return True
    return zeros and any(
        isinstance(value := _value(gm, x), torch.Tensor) and value.dtype is torch.double
        for x in nodes
    )


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removeprefix("_foreach_")


def _is_zero(node: Node) -> bool:
    """Is it a product with the number zero?"""
    numbers = [x for x in node.args if isinstance(x, (int, float))]
    return _name(node) in ("mul", "mul.Tensor") and 0 in numbers


def _reads(node: Node) -> bool:
    """Does a call make a number of a tensor, as eager does?"""
    return node.op == "call_method" and node.target == "item"


def _shifts(node: Node) -> bool:
    """Is it a new tensor, the sum of a counter and a number?"""
    return _name(node) in ("add", "sub") and not node.kwargs and len(node.args) == 2


def _counts(node: Node, counter: Node) -> bool:
    """Does a call add a number to a counter in place?"""
    if _name(node) not in ("add_", "iadd") or len(node.args) != 2:
        return False
    first, second = node.args
    known = first is counter or (isinstance(first, (list, tuple)) and counter in first)
    value = counter.meta.get("example_value")
    flat = not isinstance(value, torch.Tensor) or not value.dim()
    return known and flat and isinstance(second, (int, float))


def _only_counts(node: Node, derived: set[Node]) -> bool:
    """Does a call only add a number to counters?"""
    if node.target is operator.getitem:
        return True
    targets = [*_nodes(node.args[:1])]
    return all(x in derived for x in targets) and any(_counts(node, x) for x in targets)


def _nodes(x: Any) -> Iterator[Node]:
    if isinstance(x, Node):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _nodes(y)
