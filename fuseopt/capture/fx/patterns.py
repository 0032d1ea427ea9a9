"""Undo what is written only for tracing, where eager computes something else.

Dynamo's polyfill takes a foreach lerp apart into a difference, N filled tensors and an
addcmul. In float32 that is lerp's own arithmetic; in bfloat16 and float16 it rounds the
difference and the weight, which eager does not. `find_lerps` recognises the three forms
(weight below one half, above it, a tensor) and says which nodes a single
`torch._foreach_lerp_` stands for.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...compat import MAKE_TENSOR


@dataclass(frozen=True)
class Lerp:
    """`torch._foreach_lerp_(start, end, weight)`, weight a number, node or tensor."""

    start: list[Node]
    end: list[Node]
    weight: Any


def _same(nodes: Any) -> Node | None:
    """The one node a list repeats, or None."""
    first = nodes[0] if nodes else None
    same = isinstance(first, Node) and all(n is first for n in nodes)
    return first if same else None


def _calls(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and (
        node.target in targets and node.op in ("call_function", "call_method")
    )


def _difference(diff: Any) -> Any:
    """The `_foreach_sub` whose results, all of them and in order, `diff` lists."""
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
    """w, if node is `-(1.0 - w)`."""
    if not _calls(node, "neg", operator.neg, torch.neg):
        return None
    inner = node.args[0]
    if not _calls(inner, operator.sub, torch.rsub, "rsub") or inner.args[0] != 1.0:
        return None
    return inner.args[1]


def _copies(pairs: list[tuple[Node, Node]]) -> list[Node] | None:
    """The nodes `target.copy_(source)` for every pair, where all exist."""
    found = []
    for target, source in pairs:
        copies = [u for u in target.users if _calls(u, "copy_") and u.args[1] is source]
        if len(copies) != 1 or copies[0].users:
            return None
        found.append(copies[0])
    return found


def _match(node: Node) -> tuple[Lerp, list[Node]] | None:
    if not _calls(node, torch._foreach_addcmul_) or len(node.args) != 3 or node.kwargs:
        return None
    target, factors, diff = (list(a) for a in node.args)  # type: ignore[arg-type]
    sub = _difference(diff)
    if sub is None:
        return None
    end, start = list(sub.args[0]), list(sub.args[1])
    inner = [sub, *diff]

    if target == start and all(_calls(f, torch.full_like) for f in factors):
        # below one half: addcmul_(start, full_like(diff, weight), diff)
        weights = {f.args[1] for f in factors}
        if len(weights) == 1 and [f.args[0] for f in factors] == diff:
            return Lerp(start, end, weights.pop()), [*inner, *factors]

    factor = _same(factors)
    if factor is None:
        return None
    if target == start:
        # above: start.copy_(end); addcmul_(start, [-(1.0 - tensor(weight))], diff)
        made = _one_minus(factor)
        copies = _copies(list(zip(start, end, strict=True)))
        if copies and _calls(made, *MAKE_TENSOR):
            chain = [factor, factor.args[0], made]
            return Lerp(start, end, made.args[0]), [*inner, *copies, *chain]
    if _calls(factor, torch.where) and all(_calls(t, torch.where) for t in target):
        # a tensor: bases = where(mask, end, start); addcmul_(bases, [w], diff);
        # copy back
        mask, high, weight = factor.args
        copies = _copies(list(zip(start, target, strict=True)))
        expected = [(mask, e, s) for s, e in zip(start, end, strict=True)]
        if (
            copies
            and _one_minus(high) is weight
            and [t.args for t in target] == expected
        ):
            # the copies back are what writes start; the rest falls away
            used = [*inner, *target, factor, *copies]
            return Lerp(start, end, weight), used
    return None


def find_lerps(nodes: Iterable[Node]) -> tuple[dict[Node, Lerp], set[Node]]:
    """The addcmul nodes that are lerps, and the nodes that need not run.

    A match whose inner nodes have another reader is left as it is.
    """
    lerps: dict[Node, Lerp] = {}
    dropped: set[Node] = set()
    for node in nodes:
        if node.target is not torch._foreach_addcmul_:
            continue
        got = _match(node)
        if got is None:
            continue
        lerp, inner = got
        inside = {*inner, node}
        if all(user in inside for n in inner for user in n.users):
            lerps[node] = lerp
            dropped.update(inner)
    return lerps, dropped


@dataclass(frozen=True)
class Product:
    """`target.<name>(*factors, <keyword>=scale)`: addcmul_, addcdiv_ or add_."""

    name: str
    keyword: str
    target: Node
    factors: tuple[Any, ...]
    scale: Any


def find_products(nodes: Iterable[Node]) -> tuple[dict[Node, Product], set[Node]]:
    """The methods that Dynamo writes as `target.copy_(fma(product, scale, target))`.

    Eager scales the first factor and then fuses; the polyfill fuses the scale. Like
    `find_lerps`: the nodes to run as a Product, and those that need not run.
    """
    found: dict[Node, Product] = {}
    dropped: set[Node] = set()
    for node in nodes:
        if node.target != "copy_" or node.op != "call_method" or len(node.args) != 2:
            continue
        operands: Any = node.args
        target, fma = operands
        if not isinstance(fma, Node) or "prims.fma" not in str(fma.target):
            continue
        operands = fma.args
        product, scale, base = operands
        if base is not target or set(fma.users) != {node}:
            continue
        single = isinstance(product, Node) and set(product.users) == {fma}
        made: Product | None = None
        if single and _calls(product, torch.mul) and _written(node, "addcmul_", scale):
            made = Product("addcmul_", "value", target, tuple(product.args), scale)
        elif (
            single and _calls(product, torch.div) and _written(node, "addcdiv_", scale)
        ):
            made = Product("addcdiv_", "value", target, tuple(product.args), scale)
        if made is not None:
            dropped |= {fma, product}
        elif isinstance(scale, Node):
            made = Product("add_", "alpha", target, (product,), scale)
            dropped.add(fma)
        if made is not None:
            found[node] = made
    return found, dropped


def _written(node: Node, name: str, scale: Any) -> bool:
    """Was a product meant as `name`? Only a tensor as scale leaves a doubt."""
    if not isinstance(scale, Node):
        return True
    trace = node.meta.get("stack_trace", "")
    return name in trace.rstrip().rsplit("File ", 1)[-1] or "item" in scale.name
