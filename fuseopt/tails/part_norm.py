"""Gradients that are DTensors -> what processes tell one another of their total norm,
and from there the norm and the factor of a clip.

Torch's own clip is run on stand-ins (`shards/parts.py`); what it does to parts is cut
behind its last collective. Up to there it is a graph of its own: one launch for the
norms of the parts, if they are summed up once. That last collective is called as it is,
in memory that is always the same. What comes after it works on a few numbers and scales
the gradients: it is left to the launch of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from .. import compat
from ..capture.fx.interpreter import OWN
from ..compiler import internal_errors, pipeline
from ..compiler.report import Report
from ..compiler.timing import Clock
from ..config import Config
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..shadow.lanes import Unlike
from ..shards.parts import parts_of
from .fused import AllFollowed
from .order import arranged

Tensors = list[torch.Tensor]


class PartNorm:
    """For gradients with these specs, of which the norm is asked in one way.

    `spec`: of the norm, a DTensor. `values`: what `__call__` leaves, and `finish`
    takes; the next call overwrites it. Raises Unlike where the norm is another thing
    than numbers, once all processes have been asked, and what torch's function raises.
    """

    def __init__(
        self,
        grads: Sequence[Any],
        parts: Tensors,
        places: Sequence[int],
        norm_type: float,
        divisor: float | None,
        config: Config,
        told: Callable[[Report], None],
    ) -> None:
        def clip(stand_ins: list[Any], numbers: list[float]) -> torch.Tensor:
            holders: list[Any] = [
                SimpleNamespace(grad=g) for g in arranged(stand_ins, places)
            ]
            return torch.nn.utils.clip_grad_norm_(holders, numbers[0], norm_type)

        self.specs = [*map(compat.spec_of, grads)]
        done = parts_of(clip, grads, 1)
        self.spec = done.spec
        self._cut(done.gm, len(grads))
        #: of the norm
        self.dtype: torch.dtype = self._norm.meta["example_value"].dtype
        self.values = [
            torch.empty(x.shape, dtype=x.dtype, device=parts[0].device)
            for x in (n.meta["example_value"] for n in self._given)
        ]
        if any(x.numel() > len(grads) for x in self.values):
            raise Unlike("processes tell one another more than a number for each")
        self._config, self._told = config, told
        self._step = self._compiled(parts, divisor)

    def fits(self, grads: Sequence[Any]) -> bool:
        """Are gradients spread as those that this is for?"""
        specs = [*map(compat.spec_of, grads)]
        if len(specs) == len(self.specs) and all(map(is_, specs, self.specs)):
            return True
        if [*map(_dtype, specs)] != [*map(_dtype, self.specs)]:
            return False
        if not all(map(compat.alike, specs, self.specs)):
            return False
        self.specs = specs
        return True

    def __call__(self, parts: Tensors, divisor: float | None) -> None:
        """Ask all processes."""
        rest = () if divisor is None else (divisor,)
        self._step(*parts, *self.values, *rest)
        if self._last is not None:
            own = self.values[-1]
            compat.in_place(self._last.target)(own, *self._last.args[1:])
            compat.waiting()(own)

    def finish(
        self, values: Sequence[Any], max_norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm, and what gradients are to be multiplied by."""
        env = {self._limit: max_norm, **dict(zip(self._taken, values, strict=True))}
        _replay(self._back, env)
        return env[self._norm], env[self._factor]

    # ---------------------------------------------------------------- what torch does

    def _cut(self, gm: GraphModule, n: int) -> None:
        """Find what comes before the last collective, and what behind it."""
        graph = gm.graph
        inputs = graph.find_nodes(op="placeholder")
        self._inputs, self._limit = inputs[:n], inputs[n]
        (result,) = graph.find_nodes(op="output")
        self._norm: Node = result.args[0][0]
        calls = [x for x in graph.nodes if x.op == "call_function"]
        told = [k for k, x in enumerate(calls) if _is_collective(x)]
        self._last: Node | None = None
        if told:
            self._last, waited = calls[told[-1] : told[-1] + 2]
            if compat.in_place(self._last.target) is None:
                raise Unlike(f"{self._last.target} makes a total norm")
            self._front, back = calls[: told[-1]], calls[told[-1] + 2 :]
        else:
            at = calls.index(self._norm) + 1
            self._front, back = calls[:at], calls[at:]
        front = {*self._front}
        if any(map(_writes, front)):
            raise Unlike("a clip writes before its norm is known")
        scales = [x for x in back if _writes(x)]
        self._back = [x for x in back if not _writes(x)]
        needed = [y for x in self._back for y in x.all_input_nodes]
        crossing = [*dict.fromkeys(x for x in [*needed, self._norm] if x in front)]
        self._given, self._taken = [*crossing], [*crossing]
        if self._last is not None:
            self._given.append(self._last.args[0])
            self._taken.append(waited)
        self._factor = self._scaled(scales)
        allowed = {self._limit, *self._taken, *self._back}
        rest = [*needed, self._norm, self._factor]
        if not allowed.issuperset(rest):
            raise Unlike("a total norm takes gradients again when it is known")

    def _scaled(self, scales: Iterable[Node]) -> Node:
        """The one number by which each gradient is multiplied once."""
        known: list[Node] = []
        factors: set[Any] = set()
        for x in scales:
            name = str(x.target)
            if name not in ("aten._foreach_mul_.Tensor", "aten.mul_.Tensor"):
                raise Unlike(f"a clip calls {name}")
            target, factor = x.args
            known += [target] if isinstance(target, Node) else target  # type: ignore
            factors.add(factor)
        if len(factors) != 1 or len(known) != len(self._inputs):
            raise Unlike("a clip is more than one factor")
        if {*known} != {*self._inputs}:
            raise Unlike("a clip scales something besides gradients")
        (found,) = factors
        if not isinstance(found, Node):
            raise Unlike("the factor of a clip is known before")
        return found

    # ---------------------------------------------------------------- the first launch

    def _compiled(self, parts: Tensors, divisor: float | None) -> CompiledStep:
        n, m = len(parts), len(self.values)

        def norms(*args: Any) -> None:
            read = [*args[:n]]
            if divisor is not None:
                read = [*torch._foreach_div(read, args[n + m])]
            env = dict(zip(self._inputs, read, strict=True))
            _replay(self._front, env)
            for own, node in zip(args[n : n + m], self._given, strict=True):
                own.copy_(env[node])

        setattr(norms, OWN, True)
        graph = Graph()
        names = [f"part{k}" for k in range(n)] + [f"value{k}" for k in range(m)]
        names += [] if divisor is None else ["divisor"]
        graph.call_function(norms, tuple(map(graph.placeholder, names)))
        graph.output(())
        gm = GraphModule(torch.nn.Module(), graph)
        args = [*parts, *self.values, *(() if divisor is None else (divisor,))]

        def tell(report: Report) -> None:
            report.traced = "the norms of parts, all lanes"
            self._told(report)

        plan = pipeline.replanner(gm, self._config, tell, Clock())
        try:
            program = plan(args)
        except Exception as error:
            if internal_errors.is_mishap(error):
                then = "The tail runs in pieces."
                given = error, gm, args, self._config, then
                raise Unlike(internal_errors.tell(*given)) from error
            raise
        source = GraphTensors(gm, program.plan.captured.tensor_args)
        return CompiledStep(source, program, plan, AllFollowed())

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        self._step.forget()


def _dtype(spec: Any) -> Any:
    return spec.tensor_meta.dtype


def _is_collective(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and compat.is_collective(
        node.target
    )


def _writes(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _replay(nodes: Iterable[Node], env: dict[Node, Any]) -> None:
    """Do what some calls of a graph do, where what they take is known."""
    for x in nodes:
        args = map_arg(x.args, env.__getitem__)
        kwargs = map_arg(x.kwargs, env.__getitem__)
        env[x] = x.target(*args, **kwargs)  # type: ignore[operator]
