"""Iterate on the Gram matrix of a wide matrix; only with `numerics="fast"`.

An iteration X' = a X + u U X of an m x n matrix needs G = X X^T. Both products have m x
n operands. Neither X' nor its Gram matrix needs X itself:

    W = a G + u U G,   G' = X' X'^T = a W + u W U^T,
    X' = c' X0 + D' X0,   D' = a D + u c U + u U D,   c' = a c.

So k iterations are products of m x m, and one of m x n at either end. This holds for
any U, in exact arithmetic. It loses digits: the terms of X' cancel. Source of the idea:
Amsel et al. 2025 and others, who iterate on Gram matrices; the formulas are these.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..capture import Captured
from ..capture.aten.externs import Call, TensorRef
from ..ir.graph import Body, Buffer, Extern, ForeachSchedulerNode, Instr, Literal, Node
from .iterations import (
    ADDMM,
    DTYPES,
    MM,
    Facts,
    Iteration,
    Place,
    chains,
    gram_products,
)


def with_gram_forms(captured: Captured) -> tuple[Captured, tuple[str, ...]]:
    """Rewrite all iterations that have fewer multiplications on Gram matrices.

    Returns the captured step, and a sentence for each kind of matrix.
    """
    facts = Facts(captured)
    grams = gram_products(facts)
    found = [*chains(facts, grams)]
    if not found:
        return captured, ()
    writer = _Writer(facts, grams)
    kinds: dict[tuple[tuple[int, ...], int], int] = defaultdict(int)
    for chain in found:
        writer.rewrite(chain)
        kinds[facts.buffers[chain[0].x].shape, len(chain)] += 1
    said = tuple(
        f"Gram form: {count} of {list(shape)}, {steps} iterations"
        for (shape, steps), count in kinds.items()
    )
    return writer.captured(), said


# ---------------------------------------------------------------- rewriting


def _body(dtype: str) -> Body:
    """Return the body of `x * number + y`."""
    instrs = (
        Instr("load", (), dtype, 0),
        Instr("load", (), dtype, 1),
        Instr("scalar", (), dtype, 0),
        Instr("mul", (0, 2), dtype),
        Instr("add", (3, 1), dtype),
    )
    return Body("gram_sum", (dtype, dtype), 1, instrs, ((4, dtype),))


#: One body for all lanes: capture interns bodies, which compare by identity.
SUMS = {dtype: _body(dtype) for dtype in DTYPES}


class _Writer:
    """Writes chains anew; `captured` returns the step with all of them."""

    def __init__(self, facts: Facts, grams: Mapping[int, Place]) -> None:
        self.facts, self.grams = facts, grams
        self.buffers = [*facts.buffers]
        self.values = [*facts.graph.values]
        self.initial, self.final = [*facts.graph.initial], [*facts.graph.final]
        self.calls = [*facts.captured.calls]
        self.owners = dict(facts.captured.owners)
        self.value = dict(facts.value)
        self.storages = 1 + max(x.storage for x in facts.buffers)
        self.numbers = 1 + max(
            (n.call for n in facts.graph.nodes if not isinstance(n, Extern)), default=0
        )
        self.gone: set[Place] = set()
        #: what takes the place of a node, or of rows of it
        self.instead: dict[int, list[Node]] = defaultdict(list)

    def rewrite(self, chain: list[Iteration]) -> None:
        """Write the iterations of one matrix anew."""
        x0, gram = chain[0].x, self._gram_of(chain[0])
        d, scale, c = chain[0].u, chain[0].scale, chain[0].a
        for before, step in itertools.pairwise(chain):
            gram = self._next_gram(before, gram, self._gram_of(step))
            self._leave(before)
            total = self._product(step, d, step.a * scale, step.scale * scale)
            d = self._sum(step, step.u, step.scale * c, total)
            scale, c = 1.0, c * step.a
        self._end(chain[-1], x0, d, c)

    def _gram_of(self, step: Iteration) -> int:
        call = self.facts.call(self.grams[self.facts.buffers[step.x].storage])
        assert call is not None, "a chain has Gram matrices"
        return call.outputs[0]

    def _next_gram(self, step: Iteration, gram: int, result: int) -> int:
        """Write the Gram matrix of what an iteration makes, from that of its X."""
        place = self.grams[self.facts.buffers[step.made].storage]
        self.gone.add(place)
        at, a, u = place[0], step.a, step.scale
        w = self._new(gram, step.x)
        self._call(at, ADDMM, (gram, step.u, gram), w, {"beta": a, "alpha": u})
        turned = self._transposed(step.u, step.x)
        self._call(at, ADDMM, (w, w, turned), result, {"beta": a, "alpha": u})
        return result

    def _leave(self, step: Iteration) -> None:
        """Leave out the products of an iteration whose X' nothing needs."""
        self.gone |= {(step.node, 0), *step.rows}

    def _product(self, step: Iteration, d: int, beta: float, alpha: float) -> int:
        """Write beta D + alpha U D in the place of an iteration's product."""
        made = self._new(d, step.x)
        numbers = {"beta": beta, "alpha": alpha}
        self._call(step.node, ADDMM, (d, step.u, d), made, numbers)
        return made

    def _sum(self, step: Iteration, x: int, number: float, y: int) -> int:
        """Write x * number + y in the place of an iteration's product."""
        made = self._new(y, step.x)
        self._add(step.node, x, number, y, made)
        return made

    def _end(self, step: Iteration, x0: int, d: int, c: float) -> None:
        """Write the last X' from the first X."""
        self._leave(step)
        if step.made == step.product:
            numbers = {"beta": c, "alpha": 1.0}
            self._call(step.node, ADDMM, (x0, d, x0), step.made, numbers)
            return
        self._call(step.node, MM, (d, x0), step.product, {})
        ((at, _),) = self.facts.writers[self.facts.buffers[step.made].storage]
        self._add(at, x0, c, step.product, step.made)

    def _call(
        self, at: int, func: Any, operands: tuple[int, ...], result: int, kwargs: Any
    ) -> None:
        """Write a product in the place of a node."""
        old = self.facts.graph.nodes[at]
        assert isinstance(old, Extern), "products take the place of products"
        args = tuple(TensorRef(b) for b in operands)
        autocast = self.calls[old.payload].autocast
        fresh = frozenset({result})
        call = Call(func, args, kwargs, (result,), fresh, autocast)
        self.instead[at].append(
            old._replace(
                name=str(func),
                reads=tuple(self.value[b] for b in operands),
                writes=(self.value[result],),
                payload=len(self.calls),
            )
        )
        self.calls.append(call)

    def _add(self, at: int, x: int, number: float, y: int, result: int) -> None:
        """Write x * number + y in the place of a node."""
        node = ForeachSchedulerNode(
            SUMS[self.buffers[x].dtype],
            ((self.value[x],), (self.value[y],)),
            ((Literal(number),),),
            ((self.value[result],),),
            self.numbers,
            self.facts.graph.nodes[at].line,
        )
        self.numbers += 1
        self.instead[at].append(node)

    def _new(self, like: int, owner: int) -> int:
        """Make a contiguous matrix of the step, with the shape of another one."""
        x = self.buffers[like]
        stride = (x.shape[1], 1)
        made = x._replace(stride=stride, offset=0, storage=self.storages, kind="temp")
        self.storages += 1
        return self._register(made, owner)

    def _transposed(self, b: int, owner: int) -> int:
        """Make a transposed view of a matrix."""
        x = self.buffers[b]
        turned = x._replace(shape=x.shape[::-1], stride=x.stride[::-1])
        return self._register(turned, owner)

    def _register(self, x: Buffer, owner: int) -> int:
        number = len(self.buffers)
        self.buffers.append(x._replace(name=f"t{number}", source=-1))
        self.value[number] = len(self.values)
        self.values.append(number)
        self.initial.append(-1)
        self.final.append(-1)
        if owner in self.owners:
            self.owners[number] = self.owners[owner]
        return number

    def captured(self) -> Captured:
        """Return the captured step, written anew."""
        nodes: list[Node] = []
        for i, node in enumerate(self.facts.graph.nodes):
            count = 1 if isinstance(node, Extern) else node.rows
            left = [k for k in range(count) if (i, k) not in self.gone]
            if isinstance(node, Extern) or len(left) == count:
                nodes += [node] if left else []
            elif left:
                nodes.append(node.pick(left))
            nodes += self.instead.get(i, [])
        graph = replace(
            self.facts.graph,
            buffers=tuple(self.buffers),
            values=tuple(self.values),
            nodes=tuple(nodes),
            initial=tuple(self.initial),
            final=tuple(self.final),
        )
        owners = self.owners
        return replace(
            self.facts.captured, graph=graph, calls=tuple(self.calls), owners=owners
        )
