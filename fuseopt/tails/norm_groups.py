"""Compute a total norm over several meshes: `norm_groups` of `clip_grad_norm_`, `tail`.

Plain tensors do not describe which processes have other parts of the same norm. So the
user declares it: each `NormGroup` names the process groups over which its parts lie.
One launch computes the norms of all groups here. Each distinct list of process groups
then costs one collective of one number, and becomes one shorter. Lists that have become
equal are added up before the next collective. Powers of norms are float64, so that a
sum over processes adds less than an ulp of float32 to the total norm.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import compat
from ..errors import UnsupportedInput
from ..isolate.quick import TRACES
from ..shadow.whole import NotTraced
from .compiling import OneGraph
from .deferred import report_once
from .outcome import Outcome
from .sequence import factor_of

Tensors = list[torch.Tensor]
#: Process groups, the innermost first, over which the parts of a norm are added up.
Route = tuple[Any, ...]


class NormGroup:
    """Parameters whose gradients are shared out among processes in one way.

    `parameters` is a module, or an iterable of tensors. `reduce` has process groups, or
    DeviceMeshes of one dimension, over which *different* parts of the gradients lie.
    The innermost is first; None among them is left out. A process group whose processes
    all have the same gradients (replicas) must not be among them: those count once.
    `name` is for messages. Parameters are plain tensors, or all are DTensors, whose own
    mesh torch's function reduces over: `reduce` names what is beyond it.

    Processes that share a process group must declare the same number of norm groups
    with the same `reduce`, also for groups without parameters. Raises TypeError and
    ValueError.
    """

    def __init__(
        self,
        parameters: torch.nn.Module | Iterable[torch.Tensor],
        reduce: Iterable[Any] = (),
        name: str = "",
    ) -> None:
        if isinstance(parameters, torch.nn.Module):
            parameters = parameters.parameters()
        self.parameters = tuple(parameters)
        self.name = name
        for p in self.parameters:
            if not isinstance(p, torch.Tensor):
                raise TypeError(f"{self} has a {type(p).__name__} among its parameters")
        if len({_is_spread(p) for p in self.parameters}) > 1:
            raise ValueError(
                f"{self} has DTensors and plain tensors; make a norm group of each"
            )
        self.route: Route = tuple(_process_group(x) for x in reduce if x is not None)
        if len({*map(id, self.route)}) < len(self.route):
            raise ValueError(f"{self} is reduced twice over one process group")
        self._together: NormGroups | None = None

    def __repr__(self) -> str:
        return f"norm group {self.name!r}" if self.name else "a norm group"


def together(groups: Iterable[NormGroup]) -> NormGroups:
    """Return the groups as one object, the same one for the same groups."""
    every = [*groups]
    for group in every:
        if not isinstance(group, NormGroup):
            raise TypeError(f"norm_groups has a {type(group).__name__}")
    if not every:
        raise ValueError("norm_groups is empty")
    known = every[0]._together
    if known is None or known.groups() != every:
        known = every[0]._together = NormGroups(every)
    return known


class NormGroups:
    """Norm of the gradients of some groups. Raises ValueError for a parameter in two.

    `norm` is the total norm of the last `measure`; gradients must be multiplied by
    `factor`. The next `measure` overwrites `factor`.
    """

    def __init__(self, groups: Sequence[NormGroup]) -> None:
        # the first of them has this object
        self._groups = [*map(weakref.ref, groups)]
        self.parameters = [g.parameters for g in groups]
        self.routes = [g.route for g in groups]
        self.names = [*map(str, groups)]
        self.place: dict[int, int] = {}
        for k, params in enumerate(self.parameters):
            for p in params:
                if id(p) in self.place:
                    first = self.names[self.place[id(p)]]
                    raise ValueError(
                        f"a parameter of shape {[*p.shape]} is in {first} and again in "
                        f"{self.names[k]}; its gradient would count twice"
                    )
                self.place[id(p)] = k
        self.norm = self.factor = torch.empty(())
        self._is_checked = False
        self._values: torch.Tensor | None = None
        self._norms = OneGraph(_norms)
        self._scaled = OneGraph(_scaled)

    def groups(self) -> list[NormGroup | None]:
        """Return the groups, None for those that are gone."""
        return [x() for x in self._groups]

    def check(self, params: Iterable[torch.Tensor]) -> None:
        """Raise ValueError unless exactly the gradients of `params` are measured."""
        ids = set()
        for p in params:
            ids.add(id(p))
            if p.grad is not None and id(p) not in self.place:
                raise ValueError(
                    f"a parameter of shape {[*p.shape]} with a gradient is in no norm "
                    "group, so the total norm would leave it out"
                )
        for k, every in enumerate(self.parameters):
            for p in every:
                if p.grad is not None and id(p) not in ids:
                    raise ValueError(
                        f"a parameter of shape {[*p.shape]} in {self.names[k]} has a "
                        "gradient, and is not among the parameters that are clipped"
                    )

    def measure(self, max_norm: Any, norm_type: float, divisor: Any = None) -> None:
        """Compute `norm` and `factor`; all processes must. The caller later divides
        gradients by `divisor`.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type is {norm_type}; norm_groups need one above 0")
        with torch.no_grad():
            values = self._local(norm_type)
            if not self._is_checked:
                self._is_checked = True
                self._warn_of_replicas(values)
            total = self._total(values, norm_type)
            if norm_type not in (1.0, math.inf):
                total = total.sqrt() if norm_type == 2 else total ** (1 / norm_type)
            if divisor is not None:
                total = total / abs(divisor)
            self.norm = total.float()
            if self.factor.device != self.norm.device:
                self.factor = torch.empty_like(self.norm)
            self.factor.copy_(factor_of(max_norm, self.norm))

    def scale(self, params: Iterable[torch.Tensor]) -> None:
        """Multiply the gradients of `params` by `factor`, in memory."""
        grads = [_part(p.grad) for p in params if p.grad is not None]
        if grads:
            given = _NormArguments([grads], [self.factor], 0.0)
            _launch(self._scaled, given, _foreach_scaled)

    # ---------------------------------------------------------------- of this process

    def _local(self, norm_type: float) -> torch.Tensor:
        """Return the power of each group's norm here: float64, of one dimension."""
        grads_of_each = [
            [p.grad for p in params if p.grad is not None] for params in self.parameters
        ]
        device = next((g.device for grads in grads_of_each for g in grads), None)
        device = device or next(
            (p.device for params in self.parameters for p in params),
            torch.device("cpu"),
        )
        if self._values is None or self._values.device != device:
            shape = (len(grads_of_each),)
            self._values = torch.empty(shape, dtype=torch.float64, device=device)
        values = self._values.zero_()
        plain, spread = (
            _NormArguments([], [], norm_type),
            _NormArguments([], [], norm_type),
        )
        for grads, out in zip(grads_of_each, values.unbind(), strict=True):
            if grads:
                given = spread if _is_spread(grads[0]) else plain
                given.groups.append(grads)
                given.outs.append(out)
        if plain.groups:
            _launch(self._norms, plain, _eager_norms)
        _eager_norms(spread)
        return values

    # ---------------------------------------------------------------- of all processes

    def _total(self, values: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Return the power of the total norm, from the powers of this process."""
        is_largest = math.isinf(norm_type)
        parts: dict[Route, torch.Tensor] = {}

        def add(route: Route, value: torch.Tensor) -> None:
            known = parts.get(route)
            if known is not None:
                join: Any = torch.maximum if is_largest else torch.add
                value = join(known, value)
            parts[route] = value

        for route, value in zip(self.routes, values.unbind(), strict=True):
            add(route, value)
        while any(parts):
            # the longest first, so that a list that joins another one is ready in time
            route = max(parts, key=len)
            value = parts.pop(route).clone()
            _all_reduce(value, route[0], is_largest)
            add(route[1:], value)
        return parts[()]

    def _warn_of_replicas(self, values: torch.Tensor) -> None:
        """Warn if all processes have the same norm of a group that is added up."""
        import torch.distributed as dist

        parts: dict[Route, list[int]] = {}
        for k, route in enumerate(self.routes):
            if route:
                parts.setdefault(route, []).append(k)
        for route, places in parts.items():
            own = values[places]
            every = [
                torch.empty_like(own) for _ in range(dist.get_world_size(route[0]))
            ]
            dist.all_gather(every, own, group=route[0])
            if len(every) == 1:
                continue
            for place, *norms in zip(places, *(x.tolist() for x in every), strict=True):
                if len({*norms}) == 1 and norms[0] > 0:
                    warnings.warn(
                        f"fuseopt: {self.names[place]} has the same norm in all "
                        f"{len(every)} processes of a group that it is reduced over. "
                        "If they are replicas, they count several times: leave that "
                        "process group out of `reduce`",
                        RuntimeWarning,
                        stacklevel=4,
                    )


def clip_groups(
    params: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    raises: bool,
    groups: Iterable[NormGroup],
) -> torch.Tensor:
    """Do the work of `clip_grad_norm_` with `norm_groups`; return the total norm.

    Raises ValueError for parameters that the groups lack. Raises RuntimeError where
    `raises` and the norm is not finite. Both come before any write.
    """
    every = together(groups)
    every.check(params)
    every.measure(float(max_norm), float(norm_type))
    if raises and not bool(torch.isfinite(every.norm)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients of norm groups is "
            "non-finite, so it cannot be clipped. Set error_if_nonfinite=False to "
            "scale the gradients by the non-finite norm"
        )
    every.scale(params)
    return every.norm.clone()


def step_of_groups(
    tail: Any, call: Callable[..., Outcome], tail_inputs: dict[str, Any], params: Any
) -> Outcome:
    """Do a call of a tail whose norm spans processes: `call` scales by the factor.

    Raises ValueError for options that would let processes differ.
    """
    groups: NormGroups = tail.norm_groups
    excluded = {
        "scaler": tail.scaler is not None,
        "skip_nonfinite": tail_inputs["judged"],
        "error_if_nonfinite": tail.error_if_nonfinite,
        "clip_parameters": bool(tail_inputs["places"]),
    }
    for name, given in excluded.items():
        if given:
            raise ValueError(f"{name} and norm_groups exclude each other")
    if any(map(_is_spread, params)):
        raise UnsupportedInput(
            "a tail takes no norm_groups for DTensors. Call fuseopt.clip_grad_norm_ "
            "with them, and the tail without clip_grad_norm"
        )
    groups.check(params)
    limit, tail_inputs["max_norm"] = tail_inputs["max_norm"], None
    if limit is None:
        return call(tail_inputs, params, None)
    groups.measure(limit, tail_inputs["norm_type"], tail_inputs["divisor"])
    tail_inputs["factor"] = groups.factor
    outcome = call(tail_inputs, params, None)
    return Outcome(groups.norm.clone(), outcome.skips, outcome.stats)


# -------------------------------------------------------------------- launches


def _is_spread(t: torch.Tensor) -> bool:
    """Is a tensor a DTensor?"""
    return compat.are_spread([t])


def _part(t: torch.Tensor) -> torch.Tensor:
    """Return what this process has of a tensor."""
    return compat.arrived(compat.local_part(t)) if _is_spread(t) else t


class _NormArguments:
    """Arguments of a launch, in the form that Dynamo traces."""

    def __init__(self, groups: list[Any], outs: Tensors, norm_type: float) -> None:
        self.groups = groups
        self.outs = outs
        self.norm_type = norm_type


def _launch(graph: OneGraph[None], given: Any, eager: Callable[[Any], None]) -> None:
    """Call a compiled function; or `eager`, which does the same with torch's functions.
    Adds a Report where Dynamo cannot compile it.
    """
    if not graph.refusal and compat.stance() in TRACES:
        if graph(given) is not None:
            return
        report_once(f"torch's functions measure norm groups: {graph.refusal}")
    eager(given)


def _power(norm: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the float64 that processes add up: the norm's power, or the norm."""
    norm = norm.double()
    if norm_type == 2.0:
        return norm * norm
    return norm if norm_type == math.inf else norm**norm_type


def _norms(self: _NormArguments) -> None:
    """Write the power of the norm of each group."""
    if not torch.compiler.is_dynamo_compiling():
        raise NotTraced("Dynamo leaves it to eager")
    for grads, out in zip(self.groups, self.outs, strict=True):
        norm = torch.nn.utils.get_total_norm(grads, self.norm_type)
        out.copy_(_power(norm, self.norm_type))


def _eager_norms(self: _NormArguments) -> None:
    for grads, out in zip(self.groups, self.outs, strict=True):
        norm: Any = torch.nn.utils.get_total_norm(grads, self.norm_type)
        if _is_spread(norm):
            norm = norm.full_tensor()  # over the mesh of the parameters
        out.copy_(_power(norm, self.norm_type))


def _scaled(self: _NormArguments) -> None:
    """Multiply gradients by a factor."""
    if not torch.compiler.is_dynamo_compiling():
        raise NotTraced("Dynamo leaves it to eager")
    _foreach_scaled(self)


def _foreach_scaled(self: _NormArguments) -> None:
    torch._foreach_mul_(self.groups[0], self.outs[0])


# -------------------------------------------------------------------- collectives


def _process_group(given: Any) -> Any:
    """Return a process group, or the one of a DeviceMesh of one dimension."""
    import torch.distributed as dist

    if isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(given, dist.device_mesh.DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"reduce has a mesh of {given.ndim} dimensions; name one, as in "
                "mesh['tp'], or give one entry for each"
            )
        return given.get_group()
    raise TypeError(
        f"reduce has a {type(given).__name__}, which is no process group and no mesh"
    )


def _all_reduce(value: torch.Tensor, group: Any, is_largest: bool) -> None:
    import torch.distributed as dist

    dist.all_reduce(
        value, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=group
    )
