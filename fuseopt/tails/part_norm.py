"""Total norm of DTensor gradients: the launch before the collective, and the rest.

Torch's own clip is traced on stand-ins (`shards/parts.py`), and its calls on local
parts are split at the last collective. The calls before it become one graph: one launch
for the norms of the parts, if there is no other collective. The last collective is
called in place, always in the same memory. The calls after it compute the norm and the
factor from few numbers; they become a part of the step's launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .. import compat
from ..compiler.report import Report
from ..config import Config
from ..inputs.keys import LanesDiffer
from ..runtime.step import CompiledStep
from ..shards.parts import parts_of
from .one_node import step_of
from .order import arranged

Tensors = list[torch.Tensor]


class PartNorm:
    """Total norm of gradients with given specs, for one norm type.

    `spec` is that of the norm, a DTensor. `values` are the results of `__call__` and
    arguments of `finish`; the next call overwrites them. Raises LanesDiffer if the norm
    needs more than few numbers after the last collective. Errors of torch's function
    pass through.
    """

    def __init__(
        self,
        grads: Sequence[Any],
        parts: Tensors,
        places: Sequence[int],
        norm_type: float,
        divisor: float | None,
        config: Config,
        notify: Callable[[Report], None],
    ) -> None:
        def clip(stand_ins: list[Any], numbers: list[float]) -> torch.Tensor:
            holders: list[Any] = [
                SimpleNamespace(grad=g) for g in arranged(stand_ins, places)
            ]
            return torch.nn.utils.clip_grad_norm_(holders, numbers[0], norm_type)

        self.specs = [*map(compat.spec_of, grads)]
        traced = parts_of(clip, grads, 1)
        self.spec = traced.spec
        self._cut(traced.gm, len(grads))
        #: the dtype of the norm
        self.dtype: torch.dtype = self._norm.meta["example_value"].dtype
        self.values = [
            torch.empty(x.shape, dtype=x.dtype, device=parts[0].device)
            for x in (n.meta["example_value"] for n in self._sent)
        ]
        if any(x.numel() > len(grads) for x in self.values):
            raise LanesDiffer(
                "processes exchange more than one number for each gradient"
            )
        self._config, self._report = config, notify
        self._step = self._compiled(parts, divisor)

    def fits(self, grads: Sequence[Any]) -> bool:
        """Have gradients the specs that this was made for?"""
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
        """Launch the norms of parts, and call the collective; all processes must."""
        divisors = () if divisor is None else (divisor,)
        self._step(*parts, *self.values, *divisors)
        if self._last is not None:
            reduced = self.values[-1]
            compat.in_place(self._last.target)(reduced, *self._last.args[1:])
            compat.waiting()(reduced)

    def finish(
        self, values: Sequence[Any], max_norm: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the total norm, and the factor for the gradients."""
        env = {self._limit: max_norm, **dict(zip(self._received, values, strict=True))}
        _replay(self._back, env)
        return env[self._norm], env[self._factor]

    # ---------------------------------------------------------------- torch's calls

    def _cut(self, gm: GraphModule, n: int) -> None:
        """Split torch's calls at the last collective. Raises LanesDiffer if they are
        not a norm and one factor for all gradients.
        """
        graph = gm.graph
        inputs = graph.find_nodes(op="placeholder")
        self._inputs, self._limit = inputs[:n], inputs[n]
        (result,) = graph.find_nodes(op="output")
        self._norm: Node = result.args[0][0]
        calls = [x for x in graph.nodes if x.op == "call_function"]
        collectives = [k for k, x in enumerate(calls) if _is_collective(x)]
        self._last: Node | None = None
        if collectives:
            self._last, waited = calls[collectives[-1] : collectives[-1] + 2]
            if compat.in_place(self._last.target) is None:
                raise LanesDiffer(f"{self._last.target} makes a total norm")
            self._front, back = calls[: collectives[-1]], calls[collectives[-1] + 2 :]
        else:
            end = calls.index(self._norm) + 1
            self._front, back = calls[:end], calls[end:]
        front = {*self._front}
        if any(map(_writes, front)):
            raise LanesDiffer("a clip writes before it has its norm")
        scales = [x for x in back if _writes(x)]
        self._back = [x for x in back if not _writes(x)]
        needed = [y for x in self._back for y in x.all_input_nodes]
        crossing = [*dict.fromkeys(x for x in [*needed, self._norm] if x in front)]
        self._sent, self._received = [*crossing], [*crossing]
        if self._last is not None:
            self._sent.append(self._last.args[0])
            self._received.append(waited)
        self._factor = self._scaled(scales)
        allowed = {self._limit, *self._received, *self._back}
        used = [*needed, self._norm, self._factor]
        if not allowed.issuperset(used):
            raise LanesDiffer("a clip reads gradients after its total norm")

    def _scaled(self, scales: Iterable[Node]) -> Node:
        """Return the factor that multiplies each gradient once. Raises LanesDiffer."""
        scaled: list[Node] = []
        factors: set[Any] = set()
        for x in scales:
            name = str(x.target)
            if name not in ("aten._foreach_mul_.Tensor", "aten.mul_.Tensor"):
                raise LanesDiffer(f"a clip calls {name}")
            target, factor = x.args
            scaled += [target] if isinstance(target, Node) else target  # type: ignore
            factors.add(factor)
        if len(factors) != 1 or len(scaled) != len(self._inputs):
            raise LanesDiffer("a clip is more than one factor")
        if {*scaled} != {*self._inputs}:
            raise LanesDiffer("a clip scales something besides gradients")
        (the_factor,) = factors
        if not isinstance(the_factor, Node):
            raise LanesDiffer("the factor of a clip does not depend on its norm")
        return the_factor

    # ---------------------------------------------------------------- the first launch

    def _compiled(self, parts: Tensors, divisor: float | None) -> CompiledStep:
        n, m = len(parts), len(self.values)

        def norms(*args: Any) -> None:
            read = [*args[:n]]
            if divisor is not None:
                read = [*torch._foreach_div(read, args[n + m])]
            env = dict(zip(self._inputs, read, strict=True))
            _replay(self._front, env)
            for value, node in zip(args[n : n + m], self._sent, strict=True):
                value.copy_(env[node])

        names = ["part"] * n + ["value"] * m + ["divisor"]
        args = [*parts, *self.values, *(() if divisor is None else (divisor,))]

        def on_report(report: Report) -> None:
            report.traced = "the norms of parts, all lanes"
            self._report(report)

        return step_of(norms, names[: len(args)], args, self._config, on_report)

    def forget(self) -> None:
        """Forget the record of the last call, which an exception ended."""
        self._step.forget()


def _dtype(spec: Any) -> Any:
    return spec.tensor_meta.dtype


def _is_collective(node: Node) -> bool:
    return isinstance(node.target, compat.OVERLOAD) and compat.is_collective(
        node.target
    )


def _writes(node: Node) -> bool:
    target = node.target
    return isinstance(target, compat.OVERLOAD) and target._schema.is_mutable


def _replay(nodes: Iterable[Node], env: dict[Node, Any]) -> None:
    """Run some calls of a graph; `env` has their inputs and gets their results."""
    for x in nodes:
        args = map_arg(x.args, env.__getitem__)
        kwargs = map_arg(x.kwargs, env.__getitem__)
        env[x] = x.target(*args, **kwargs)  # type: ignore[operator]
