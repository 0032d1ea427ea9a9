"""Restore the calls that eager makes in Dynamo's graph.

Dynamo decomposes some calls into others that round differently. Its polyfill turns a
foreach lerp into a difference, N filled tensors and an addcmul. In float32 that is
lerp's own arithmetic. In bfloat16 and float16 it rounds the difference and the weight,
which eager does not. A method with a scale (`addcmul_`, `addcdiv_`, `add_`) becomes
`target.copy_(fma(product, scale, target))`, while eager scales the first factor and
then fuses. A `foreach_map` is one node with its own graph. `restore` puts the user's
calls back, before the graph is recorded or run.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...compat import MAKE_TENSOR, WRITTEN_AS
from .inline import inline

#: Methods that scale their addend, and the name of the scale argument.
SCALED = {"addcmul_": "value", "addcdiv_": "value", "add_": "alpha"}
#: Key in the `meta` of a restored graph module: True if its code is outdated.
STALE = "fuseopt_code_is_stale"


def restore(gm: GraphModule) -> None:
    """Restore decomposed calls in the graph of `gm`, in place. Idempotent.

    The code of `gm` is not recompiled, see `refresh`.
    """
    if STALE in gm.meta:
        return
    find = gm.graph.find_nodes
    changed = inline(gm)
    for node in find(op="call_function", target=torch._foreach_addcmul_):
        changed |= _restore_lerp(node)
    for node in find(op="call_method", target="copy_"):
        changed |= _restore_scaled(node)
    gm.meta[STALE] = changed


def refresh(gm: GraphModule) -> None:
    """Recompile the code of a graph module whose graph was restored."""
    if gm.meta.get(STALE):
        gm.recompile()
        gm.meta[STALE] = False


def _rewrite(
    node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Change the target and the arguments of a node."""
    node.target, node.args, node.kwargs = target, args, kwargs


def _erase(nodes: Iterable[Node]) -> None:
    """Erase nodes from their graph; users must come first."""
    for node in nodes:
        node.graph.erase_node(node)


# ---------------------------------------------------------------- lerp


def _same(nodes: Any) -> Node | None:
    """Return the only node in a list, or None."""
    first = nodes[0] if nodes else None
    same = isinstance(first, Node) and all(n is first for n in nodes)
    return first if same else None


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and (
        node.target in targets and node.op in ("call_function", "call_method")
    )


def _difference(diff: Any) -> Any:
    """Return the `_foreach_sub` whose results are exactly `diff`, in order, or None."""
    if not diff or not _calls(diff[0], operator.getitem):
        return None
    sub = diff[0].args[0]
    if not _calls(sub, torch._foreach_sub) or len(sub.args) != 2 or sub.kwargs:
        return None
    if not isinstance(sub.args[1], (list, tuple)) or len(sub.args[0]) != len(diff):
        return None
    for i, d in enumerate(diff):
        if not _calls(d, operator.getitem) or d.args != (sub, i):
            return None
    return sub


def _one_minus(node: Any) -> Any:
    """Return w if `node` is `-(1.0 - w)`, else None."""
    if not _calls(node, "neg", operator.neg, torch.neg):
        return None
    inner = node.args[0]
    if not _calls(inner, operator.sub, torch.rsub, "rsub") or inner.args[0] != 1.0:
        return None
    return inner.args[1]


def _copies(pairs: list[tuple[Node, Node]]) -> list[Node] | None:
    """Return the nodes `target.copy_(source)` of all pairs; None if one is missing."""
    nodes = []
    for target, source in pairs:
        copies = [u for u in target.users if _calls(u, "copy_") and u.args[1] is source]
        if len(copies) != 1 or copies[0].users:
            return None
        nodes.append(copies[0])
    return nodes


def _match(node: Node) -> tuple[tuple[Any, ...], list[Node]] | None:
    """Return the arguments of the lerp whose decomposition ends in this addcmul.

    Also returns the other nodes of the decomposition, users first. There is one form
    for weights below one half, one for other weights, and one for tensors.
    """
    if len(node.args) != 3 or node.kwargs:
        return None
    target, factors, diff = (list(a) for a in node.args)  # type: ignore[arg-type]
    sub = _difference(diff)
    if sub is None:
        return None
    end, start = list(sub.args[0]), list(sub.args[1])
    inner = [*diff, sub]

    if target == start and all(_calls(f, torch.full_like) for f in factors):
        # below one half: addcmul_(start, full_like(diff, weight), diff)
        weights = {f.args[1] for f in factors}
        if len(weights) == 1 and [f.args[0] for f in factors] == diff:
            return (start, end, weights.pop()), [*factors, *inner]

    factor = _same(factors)
    if factor is None:
        return None
    if target == start:
        # one half or more: start.copy_(end); addcmul_(start, [-(1.0 - tensor(weight))],
        # diff)
        weight_tensor = _one_minus(factor)
        copies = _copies(list(zip(start, end, strict=True)))
        if copies and _calls(weight_tensor, *MAKE_TENSOR):
            minus: Any = factor.args[0]
            return (start, end, weight_tensor.args[0]), [
                *copies,
                factor,
                minus,
                weight_tensor,
                *inner,
            ]
    if _calls(factor, torch.where) and all(_calls(t, torch.where) for t in target):
        # a tensor: bases = where(mask, end, start); addcmul_(bases, [w], diff); copy
        # back
        mask, high, weight = factor.args
        copies = _copies(list(zip(start, target, strict=True)))
        expected = [(mask, e, s) for s, e in zip(start, end, strict=True)]
        if (
            copies
            and _one_minus(high) is weight
            and [t.args for t in target] == expected
        ):
            # only the copies back write start; all other nodes are erased
            return (start, end, weight), [*copies, *target, factor, *inner]
    return None


def _restore_lerp(node: Node) -> bool:
    """Turn the addcmul at the end of a lerp into `_foreach_lerp_(start, end, weight)`.

    Nothing changes if another node of the decomposition has a further user.
    """
    match = _match(node)
    if match is None:
        return False
    args, inner = match
    inside = {*inner, node}
    if not all(user in inside for n in inner for user in n.users):
        return False
    _rewrite(node, torch._foreach_lerp_, args, {})
    _erase(inner)
    return True


# ---------------------------------------------------------------- scaled methods


def _restore_scaled(node: Node) -> bool:
    """Turn `target.copy_(fma(product, scale, target))` back into the scaled method."""
    operands: Any = node.args
    if len(operands) != 2:
        return False
    target, fma = operands
    if not isinstance(fma, Node) or "prims.fma" not in str(fma.target):
        return False
    operands = fma.args
    product, scale, base = operands
    if base is not target or set(fma.users) != {node}:
        return False
    name, factors, inner = "", (product,), [fma]
    if isinstance(product, Node) and set(product.users) == {fma}:
        if _calls(product, torch.mul) and _written(node, "addcmul_", scale):
            name = "addcmul_"
        elif _calls(product, torch.div) and _written(node, "addcdiv_", scale):
            name = "addcdiv_"
    if name:
        factors, inner = product.args, [fma, product]
    elif isinstance(scale, Node):
        name = "add_"
    else:
        return False
    _rewrite(node, name, (target, *factors), {SCALED[name]: scale})
    _erase(inner)
    return True


def _written(node: Node, name: str, scale: Any) -> bool:
    """Did the user call `name`?

    `rewrites` of compat notes the name in the node's meta. Without the note, and with a
    tensor as scale, the source line decides.
    """
    if WRITTEN_AS in node.meta:
        return bool(node.meta[WRITTEN_AS] == name)
    if not isinstance(scale, Node):
        return True
    trace = node.meta.get("stack_trace", "")
    return name in trace.rstrip().rsplit("File ", 1)[-1] or "item" in scale.name
