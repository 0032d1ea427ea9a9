"""Rehearse a step: record the ATen calls that it makes for each of some lanes.

The step runs on a double of the optimizer, whose tensors have no contents, except
zero-dimensional ones. A dispatch mode records, for each lane, the ATen calls on its
tensors, with their numbers. It names tensors by their role in the lane. The step treats
two lanes with equal records alike. The optimizer itself does not change.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import compat
from ..capture.aten.externs import tensors_in
from ..capture.aten.ops import OpInfo, op_info
from ..compiler.code_paths import Paths
from ..inputs.keys import GRAD, NUMBERS, PARAM, LanesDiffer, shape_beside
from ..inputs.lanes import Lanes
from ..inputs.values import holdings, own_attributes
from ..shadow.double import Double, Perturb, TensorIdentity
from .hollow import HollowResults


class Record(NamedTuple):
    """The result of a rehearsal.

    `lanes`: the calls of each lane. `shared`: the calls that change tensors of no lane.
    `states`: the state of each lane afterwards; `rest`: all else that the optimizer
    holds. `paths`: the branches that the code took. `reads`: True if it read numbers
    from tensors. `beyond`: the first op on tensors with dimensions that does more than
    treat each element alike, or "".
    """

    lanes: dict[int, list[Any]]
    shared: list[Any]
    states: dict[int, Any]
    rest: Any
    paths: set[Any]
    reads: bool
    beyond: str


_ITEM = torch.ops.aten._local_scalar_dense.default
_CONSTANT = torch.ops.aten.lift_fresh.default
_DETACH = torch.ops.aten.detach.default
_HOLDERS = (torch.Tensor, list, tuple)


class _Calls(compat.DISPATCH_MODE):  # type: ignore[misc]
    """Records the calls on the tensors of each lane."""

    def __init__(self, double: Double, paths: Paths) -> None:
        super().__init__()
        self.double = double
        self.known = double.known
        self.paths = paths
        self.lanes: dict[int, list[Any]] = collections.defaultdict(list)
        self.made: dict[int, int] = collections.Counter()
        self.shared: list[Any] = []
        self.viewed: set[int] = set()  # storages of no lane with several views
        #: The result of the last call if it took no tensors. `replaced`: ids of such
        #: results that torch replaced at once by a detached tensor.
        self.last_made: Any = None
        self.replaced: set[int] = set()
        self.reads = False
        self.beyond = ""
        self.places: dict[Any, torch.Tensor | None] = {}
        for t in double.alive:
            self._place(t)
        self._ops: dict[Any, tuple[OpInfo, frozenset[str]]] = {}
        self.results = HollowResults(double.scratch)

    @staticmethod
    def _where(t: torch.Tensor) -> Any:
        return t.data_ptr(), t.shape, t.stride(), t.dtype

    def _place(self, t: torch.Tensor) -> None:
        where = self._where(t)
        self.places[where] = None if where in self.places or not t.numel() else t

    def _of(self, t: torch.Tensor) -> TensorIdentity:
        """Return the record of a tensor, or of one with the same memory and layout."""
        identity = self.known.get(id(t))
        if id(t) in self.replaced:
            raise LanesDiffer("several tensors alias one scalar")
        if identity is None:
            twin = self.places.get(self._where(t))
            if twin is None:
                raise LanesDiffer("the step uses a tensor that belongs to no lane")
            identity = self.known[id(twin)]
            self.double.know(t, identity)
            if identity.lane < 0:
                self.viewed.add(t.untyped_storage()._cdata)
        return identity

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        op = self._ops.get(func)
        if op is None:
            info = op_info(func)
            if info.schema.seeded:
                raise LanesDiffer(f"{func} draws random numbers")
            written = frozenset(name for _, name in info.schema.writes)
            op = self._ops[func] = info, written
        info, written = op
        out = self._known_call(info, written, func, args, kwargs)
        if not (info.elementwise or self.beyond):
            every = tensors_in([*args, *kwargs.values(), out])
            if any(t.dim() for t in every):
                self.beyond = str(func)
        return out

    def _known_call(
        self, info: OpInfo, written: frozenset[str], func: Any, args: Any, kwargs: Any
    ) -> Any:
        names, lists, views = info.arguments, info.foreach, info.schema.views
        bound = dict(zip(names, args, strict=False))
        if kwargs:
            bound.update(kwargs)
        if func is _CONSTANT:
            return self._constant(args[0])
        tensors: list[torch.Tensor] = []
        for x in bound.values():
            if isinstance(x, _HOLDERS):
                tensors += tensors_in(x)
        identities = [self._of(t) for t in tensors]
        last, self.last_made = self.last_made, None
        if func is _DETACH and args[0] is last and identities[0].real:
            return self._instead(args[0], func(*args, **kwargs))
        # the result of a call without tensors is real if it has no dimensions
        real = all(k.real for k in identities) if identities else not bound.get("size")
        if func is _ITEM and (not real or self._is_of_one_lane(args[0])):
            return self._number(func, args[0])
        # before the call: in place, it changes the tensors that it reads
        named_args = self._names(bound, lists)
        if real:
            out = func(*args, **kwargs)
        else:
            out = self._hollow(func, args, kwargs, bound, written)
        if lists:
            self._foreach(func, bound, written, named_args, out, real)
        else:
            self._single(func, bound, tensors, written, named_args, out, real, views)
        self.last_made = None if tensors else out
        return out

    def _instead(
        self, original: torch.Tensor, replacement: torch.Tensor
    ) -> torch.Tensor:
        """Move the record of a result to the detached tensor that replaces it. Some of
        torch's functions return `result.detach()`, and the original is not used again.
        """
        self.double.know(replacement, self._of(original))
        self.replaced.add(id(original))
        self.places[self._where(replacement)] = replacement
        return replacement

    def _is_of_one_lane(self, t: torch.Tensor) -> bool:
        """Is this a number of one lane, such as its step counter? Its value may differ
        between lanes, and a trace does not read it either.
        """
        return self._of(t).lane >= 0 and t.is_floating_point()

    def _number(self, func: Any, t: torch.Tensor) -> float:
        """Return a stand-in for a number read from a lane's tensor. It depends only on
        the lane's number of calls so far, and on whether `perturb` is given. Raises
        LanesDiffer for a tensor of no lane, or of integers.
        """
        identity = self._of(t)
        if identity.lane < 0 or not t.is_floating_point():
            raise LanesDiffer(f"{func} depends on tensor data")
        self.reads = True
        calls = self.lanes[identity.lane]
        draw = random.Random(f"{len(calls)} {self.double.perturb is None}")
        value = 0.5 + draw.random()
        calls.append((func, identity.name, value))
        return value

    def _constant(self, t: torch.Tensor) -> torch.Tensor:
        if t.numel() > 64 or t.device.type != "cpu":
            raise LanesDiffer("the step uses a tensor constant")
        name = "constant", t.dtype, t.shape, repr(t.tolist())
        self._new(t, TensorIdentity(-1, name, True))
        return t

    # ---------------------------------------------------------------- names

    def _name(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.known[id(x)].name
        if isinstance(x, (list, tuple)):
            return type(x), tuple([self._name(item) for item in x])
        return type(x), repr(x)

    def _names(self, bound: Any, lists: bool) -> Any:
        if not lists:
            return tuple([(k, self._name(v)) for k, v in bound.items()])
        first_list = next(v for v in bound.values() if isinstance(v, (list, tuple)))
        n = len(first_list)
        columns: list[Any] = []
        for k, v in bound.items():
            if isinstance(v, (list, tuple)) and len(v) == n:
                columns.append([(k, self._name(x)) for x in v])
            else:
                columns.append([(k, self._name(v))] * n)
        return list(zip(*columns, strict=True))

    def _new(self, t: torch.Tensor, identity: TensorIdentity) -> None:
        self.double.know(t, identity)
        self._place(t)

    # ---------------------------------------------------------------- results

    def _hollow(
        self, func: Any, args: Any, kwargs: Any, bound: Any, written: Any
    ) -> Any:
        """Return the result of a call on tensors without contents."""
        for name in written:
            for t in tensors_in(bound[name]):
                identity = self._of(t)
                if identity.real:
                    self.double.known[id(t)] = identity._replace(real=False)
                    if t.untyped_storage()._cdata in self.viewed:
                        raise LanesDiffer("several tensors alias one scalar")
        returns = op_info(func).schema.returns
        if not returns:
            return None
        if written:
            if returns > 1 or len(written) > 1:
                raise LanesDiffer(f"{func} changes several tensors")
            return bound[next(iter(written))]
        return self.results.of(func, args, kwargs, bound)

    # ---------------------------------------------------------------- records

    def _owner(self, func: Any, tensors: Sequence[torch.Tensor]) -> int:
        owner = -1
        for t in tensors:
            lane = self.known[id(t)].lane
            if lane != owner and lane != -1:
                if owner != -1:
                    raise LanesDiffer(f"{func} mixes lanes")
                owner = lane
        return owner

    def _temp(self, lane: int) -> Any:
        self.made[lane] += 1
        return "temp", self.made[lane]

    def _adopt(self, lane: int, t: torch.Tensor, func: Any) -> None:
        """Give a tensor of no lane to the lane that changes it."""
        identity = self._of(t)
        if identity.lane == lane:
            return
        if identity.name[0] == "shared" or t.untyped_storage()._cdata in self.viewed:
            raise LanesDiffer(f"{func} changes an object that lanes share")
        name = self._temp(lane)
        self.lanes[lane].append(("takes", identity.name))
        self.known[id(t)] = TensorIdentity(lane, name, identity.real)

    def _position(
        self, func: Any, tensors: Any, written: Any, name: Any, results: Any, real: bool
    ) -> None:
        """Record one call, or one position of a call of lists."""
        lane = self._owner(func, tensors)
        if lane >= 0:
            # lanes of several sizes compare shapes with the parameter's
            near = self.double.near[lane]
            shapes = [shape_beside(t, near) for t in results if near is not None]
            self.lanes[lane].append((func, name, shapes))
            for t in written:
                self._adopt(lane, t, func)
            for t in results:
                self._new(t, TensorIdentity(lane, self._temp(lane), real))
            return
        for t in written:
            identity = self._of(t)
            if t.untyped_storage()._cdata in self.viewed:
                raise LanesDiffer(f"{func} changes memory that several tensors share")
            if identity.name[0] == "shared":
                self.shared.append((func, name))
                new_name: Any = (*identity.name[:2], len(self.shared))
            else:
                new_name = (func, name)
            self.known[id(t)] = TensorIdentity(-1, new_name, real)
        for k, t in enumerate(results):
            self._new(t, TensorIdentity(-1, (func, name, k), real))

    def _single(
        self,
        func: Any,
        bound: Any,
        tensors: list[torch.Tensor],
        written: Any,
        name: Any,
        out: Any,
        real: bool,
        views: bool,
    ) -> None:
        targets = [t for k in written for t in tensors_in(bound[k])]
        results = tensors_in(out)
        new = [] if written else results
        if out is not None and not results:
            self.reads = True
            name = (name, repr(out))
        if views and (
            self._owner(func, tensors) < 0 or any(self._of(t).lane < 0 for t in tensors)
        ):
            self.viewed.update(t.untyped_storage()._cdata for t in tensors)
        self._position(func, tensors, targets, name, new, real)

    def _foreach(
        self, func: Any, bound: Any, written: Any, names: Any, out: Any, real: bool
    ) -> None:
        n = len(names)
        whole = [
            t
            for v in bound.values()
            if not (isinstance(v, (list, tuple)) and len(v) == n)
            for t in tensors_in(v)
        ]
        for i in range(n):
            tensors, targets = list(whole), []
            for k, v in bound.items():
                if isinstance(v, (list, tuple)) and len(v) == n:
                    items = tensors_in(v[i])
                    tensors += items
                    if k in written:
                        targets += items
            results = tensors_in(out[i]) if out is not None else []
            self._position(func, tensors, targets, names[i], results, real)


def _dispatch(
    self: _Calls, func: Any, _: Any, args: Any = (), kwargs: Any = None
) -> Any:
    return self.paths.hidden(self._call, func, args, kwargs or {})


# In a new class torch would wrap this with torch.compiler.disable, which costs time at
# each call. So it is assigned later, and `rehearse` is disabled once.
_Calls.__torch_dispatch__ = _dispatch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def rehearse(
    optimizer: Optimizer,
    function: Callable[..., Any],
    lanes: Lanes,
    members: Sequence[int],
    perturb: Perturb | None = None,
) -> Record:
    """Run `function`, the step of `optimizer`, for some of its lanes.

    `perturb` changes the numbers that the step reads. Raises LanesDiffer if a call does
    not belong to a single lane.
    """
    double = Double(optimizer, lanes, members, perturb)
    paths = Paths()
    calls = _Calls(double, paths)
    before = torch.get_rng_state()
    try:
        with compat.as_if_compiling(), calls, paths:
            result = function(double.optimizer)
    except LanesDiffer:
        raise
    except Exception as error:
        raise LanesDiffer(
            f"a rehearsal fails: {type(error).__name__}: {error}"
        ) from error
    if result is not None:
        raise LanesDiffer("the step returns something")
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise LanesDiffer("the step draws random numbers")
    return _finish(double, calls, members)


def _finish(double: Double, calls: _Calls, members: Sequence[int]) -> Record:
    identities = double.known
    for i, p in double.params.items():
        where, grad = double.places[i]
        if p.data_ptr() != where or p.grad is not grad:
            raise LanesDiffer(
                f"the step replaces the memory or gradient of parameter {i}"
            )
    holders: set[int] = set()

    def in_lane(lane: int) -> Callable[[torch.Tensor], Any]:
        def name(t: torch.Tensor) -> Any:
            identity = calls._of(t)
            if identity.lane not in (lane, -1) or identity.name[0] == "shared":
                raise LanesDiffer("the state of a lane holds a tensor of another")
            if identity.name[0] != PARAM and identity.name[0] != GRAD:
                if id(t) in holders:
                    raise LanesDiffer("lanes share a tensor in their state")
            holders.add(id(t))
            near = double.near[lane]
            return identity.name, *shape_beside(t, near), t.dtype, t.device

        return name

    states: dict[int, Any] = {}
    state: Mapping[Any, Any] = double.optimizer.state
    inside = {id(double.params[i]) for i in members}
    if any(id(p) not in inside for p in state):
        raise LanesDiffer(
            "the step makes state for an object other than its parameters"
        )
    for i in members:
        entries = state.get(double.params[i])
        if entries is not None and not all(
            isinstance(v, (torch.Tensor, *NUMBERS)) for v in entries.values()
        ):
            raise LanesDiffer(
                "the state of a parameter holds more than tensors and numbers"
            )
        states[i] = None if entries is None else holdings(entries, in_lane(i))
    lane_of = {id(p): i for i, p in double.params.items()}

    def elsewhere(t: torch.Tensor) -> Any:
        if id(t) in lane_of:
            return "parameter", lane_of[id(t)]
        identity = identities.get(id(t))
        if identity is None or identity.lane >= 0:
            raise LanesDiffer(
                "the optimizer keeps a tensor of a lane besides its state"
            )
        return identity.name

    groups = [
        {k: v for k, v in g.items() if k != "params"}
        for g in double.optimizer.param_groups
    ]
    rest = holdings([own_attributes(double.optimizer), groups], elsewhere)
    taken = calls.paths.taken
    return Record(
        dict(calls.lanes),
        calls.shared,
        states,
        rest,
        taken,
        calls.reads,
        calls.beyond,
    )
