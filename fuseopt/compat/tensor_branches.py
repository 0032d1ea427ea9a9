"""Branches on a tensor (`if grad.norm() > 1`): its truth value, and choosing tensors.

A variable with a different tensor after each way becomes a new tensor,
`torch.where(condition, x, y)`. That is as good as eager's as long as no code can
distinguish it from `x` and `y`. The step may later write it, write `x` or `y`, or keep
it. Then the trace begins anew and Dynamo breaks its graph at the branch. The same holds
for a chosen int, which is a float in the graph, if it is kept or decides a dtype.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from torch.fx import Node

from .leaving import refuse
from .names import find
from .patches import Hook, Patcher
from .plain import is_unknown
from .schemas import written
from .tracing import traces_step, tracing

#: Functions that return one of two numbers.
MIXING = (torch.sym_max, torch.sym_min)
#: Modules of functions of numbers, and functions whose result has one type for any
#: number.
NUMERIC = ("_operator", "math", "torch")
OF_ANY_NUMBER = frozenset(
    [*("truediv", "float", "lt", "le", "gt", "ge", "eq", "ne", "sqrt", "not"), "int"]
)
#: A branch: its code, and the index of its instruction.
Branch = tuple[CodeType, int]


def truth_of(tx: Any, value: Any) -> Any:
    """Return the truth of a tensor as a number without a value, or None.

    None for any other variable, and for tensors without a truth in eager.
    """
    VariableTracker = find("torch._dynamo.variables.base:VariableTracker")
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
    TensorVariable = find("torch._dynamo.variables.tensor:TensorVariable")
    if not isinstance(value, TensorVariable) or not traces_step():
        return None
    if torch.is_grad_enabled():
        return None  # a write to `.data` is recorded when the tensor is chosen
    example = value.as_proxy().node.meta.get("example_value")
    if (
        not isinstance(example, torch.Tensor)
        or any(type(n) is not int for n in example.shape)
        or example.numel() != 1
        or example.is_complex()
    ):
        return None
    if example.dim():
        value = value.call_method(tx, "reshape", [VariableTracker.build(tx, ())], {})
    kind = VariableTracker.build(tx, torch.float64)
    number = value.call_method(tx, "to", [kind], {}).call_method(tx, "item", [], {})
    if not isinstance(number, SymNodeVariable):
        return None
    zero = VariableTracker.build(tx, 0)
    return VariableTracker.build(tx, operator.ne).call_function(tx, [number, zero], {})


def tensor_of(value: Any) -> torch.Tensor | None:
    """Return the example tensor of a variable; None if it is no tensor."""
    TensorVariable = find("torch._dynamo.variables.tensor:TensorVariable")
    if type(value.realize()) is not TensorVariable:
        return None
    example = value.as_proxy().node.meta.get("example_value")
    return example if isinstance(example, torch.Tensor) else None


def are_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Do tensors differ only in contents and memory?"""
    return (
        type(x) is type(y)
        and (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)
        and x.layout is y.layout is torch.strided
        and x.stride() == y.stride()
        and not (x.requires_grad or y.requires_grad)
        and not (x.is_conj() or y.is_conj() or x.is_neg() or y.is_neg())
    )


def choose(tx: Any, condition: Node, x: Any, y: Any, branch: Branch) -> Any:
    """Return a variable that is one tensor or the other; None if they are unlike."""
    wrap_fx_proxy = find("torch._dynamo.variables.builder:wrap_fx_proxy")
    a, b = tensor_of(x), tensor_of(y)
    if a is None or b is None or not are_alike(a, b):
        return None
    condition_proxy = torch.fx.Proxy(condition, tx.output.current_tracer)
    choice = wrap_fx_proxy(
        tx,
        tx.output.create_proxy(
            "call_function",
            torch.where,
            (condition_proxy, x.as_proxy(), y.as_proxy()),
            {},
        ),
    )
    chosen = tensor_of(choice)
    if chosen is None or not are_alike(a, chosen):
        return None
    notes = vars(tx.output)
    notes.setdefault("fuseopt_chosen", {})[_storage(chosen)] = branch
    notes.setdefault("fuseopt_sides", {}).update({_storage(t): branch for t in (a, b)})
    return choice


def _storage(t: torch.Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def watch_choices(patcher: Patcher) -> None:
    """Refuse to write or keep a chosen tensor, or to write the tensors of the choice.

    Also refuse uses that show a float where Python has an int. Relies on the method by
    which Dynamo's tracer makes the nodes of its graph, and on those that trace
    `isinstance` and `type`.
    """
    builtin = find("torch._dynamo.variables.builtin:BuiltinVariable")
    kind = find("torch._dynamo.output_graph:SubgraphTracer")

    def create(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
        node = original(self, *args, **kwargs)
        notes = vars(self.output_graph)
        if node.target in MIXING and _is_mixed(node):
            notes.setdefault("fuseopt_floats", {})[node] = None
        chosen, floats = notes.get("fuseopt_chosen"), notes.get("fuseopt_floats")
        if floats:
            _follow_floats(self.output_graph, node, floats)
        if chosen and node.op == "output":
            _refuse_any(node.all_input_nodes, chosen)
        elif chosen and node.op.startswith("call"):
            _refuse_any(written(node), {**chosen, **notes["fuseopt_sides"]})
        return node

    def read_type(original: Hook, self: Any, tx: Any, x: Any, *args: Any) -> Any:
        floats = vars(tx.output).get("fuseopt_floats")
        proxy = getattr(x.realize(), "proxy", None) if floats else None
        node = getattr(proxy, "node", None)
        if floats and node in floats:
            why = "it asks for the type of what it chose"
            if floats[node] is not None:
                code, place = floats[node]
                refuse_branch(code, place, why)
            refuse(tx, why)
        return original(self, tx, x, *args)

    patcher.around(kind, "create_node", create, "self")
    for name in ("call_isinstance", "call_type"):
        patcher.around(builtin, name, read_type, "self", "tx")


def note_float(tx: Any, node: Node, branch: Branch) -> None:
    """Record that a branch chose a float which is an int in Python after some way."""
    vars(tx.output).setdefault("fuseopt_floats", {})[node] = branch


def _is_mixed(node: Node) -> bool:
    """Is it one of two numbers of unlike type, one of which has no value?"""
    examples = [
        x.meta.get("example_value") if isinstance(x, Node) else x for x in node.args
    ]
    kinds = {isinstance(x, (float, torch.SymFloat)) for x in examples}
    return len(kinds) > 1 and any(
        is_unknown(x) or (isinstance(x, torch.SymInt) and not x.node.has_hint())
        for x in examples
    )


def _follow_floats(output: Any, node: Node, floats: dict[Node, Branch | None]) -> None:
    """Check that a new node may use the floats among its inputs."""
    given = [x for x in node.all_input_nodes if x in floats]
    if not given:
        return
    branch = floats[given[0]]
    examples = [x.meta.get("example_value") for x in node.all_input_nodes]
    tensors = [t for example in examples for t in _tensors(example)]
    name = str(getattr(node.target, "__name__", node.target)).removeprefix("sym_")
    if tensors:
        # with whole numbers, a float changes the result; with floats, an int does
        fits = any(map(torch.is_floating_point, tensors)) and all(
            t.is_floating_point() or t.dtype == torch.bool for t in tensors
        )
    elif getattr(node.target, "__module__", "") in NUMERIC:
        fits = True
        if name.strip("_") not in OF_ANY_NUMBER:
            floats[node] = branch
    else:
        fits = node.op != "output" and "dtype" in node.kwargs
    if node.op == "output" or not fits:
        why = "it keeps an int that it chose, or makes a tensor of it"
        if branch is not None:
            refuse_branch(*branch, why)
        refuse(output.current_tx, why)


def _refuse_any(nodes: Any, branches: dict[int, Branch]) -> None:
    for node in nodes:
        for t in _tensors(node.meta.get("example_value")):
            if _storage(t) in branches:
                refuse_branch(
                    *branches[_storage(t)], "it writes or keeps the selected tensor"
                )


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)


def refuse_branch(code: CodeType, place: int, why: str) -> None:
    """Begin the trace anew, and let Dynamo end its graph at a branch."""
    anew = find("torch._dynamo.exc:SpeculationRestartAnalysis")
    tracing.one_way.setdefault(code, set()).add(place)
    raise anew(restart_reason=why)
