"""An optimizer, some of its lanes -> what its step does to each of them, undone.

The step runs on a double of the optimizer whose tensors have no contents but numbers
without dimensions. A dispatch mode writes down, for each lane, the ATen calls that
reach it, with their numbers; a call's tensors are named by what they are to the lane.
Two lanes with equal records are treated alike.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from .. import compat
from ..capture.aten.externs import tensors_in
from ..capture.aten.ops import OpInfo, op_info
from ..compiler.code_paths import Paths
from ..shadow.double import Double, Known, Perturb, holdings, own_attributes
from ..shadow.lanes import GRAD, NUMBERS, PARAM, Lanes, Unlike, shape_beside
from .hollow import HollowResults


class Record(NamedTuple):
    """What a rehearsal gave.

    `lanes`: calls of each lane. `shared`: changes of what belongs to none. `states`:
    the state of each lane afterwards; `rest`: all else that the optimizer holds.
    `reads`: did the step read numbers from tensors? `beyond`: the first op, of what has
    dimensions, that does more than treat each element alike; "": none.
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


class _Calls(TorchDispatchMode):
    """Writes down the calls that reach each lane."""

    def __init__(self, double: Double, paths: Paths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.double = double
        self.known = double.known
        self.paths = paths
        self.lanes: dict[int, list[Any]] = collections.defaultdict(list)
        self.made: dict[int, int] = collections.Counter()
        self.shared: list[Any] = []
        self.viewed: set[int] = set()  # storages of no lane that several tensors see
        #: what the last call made from nothing; such tensors as torch at once made
        #: another of, which is what the step has
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

    def _of(self, t: torch.Tensor) -> Known:
        """What is known of a tensor, or of the one that is the same memory."""
        known = self.known.get(id(t))
        if id(t) in self.replaced:
            raise Unlike("a number is seen by several tensors")
        if known is None:
            same = self.places.get(self._where(t))
            if same is None:
                raise Unlike("the step uses a tensor that belongs to no lane")
            known = self.known[id(same)]
            self.double.know(t, known)
            if known.lane < 0:
                self.viewed.add(t.untyped_storage()._cdata)
        return known

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        op = self._ops.get(func)
        if op is None:
            info = op_info(func)
            if info.schema.seeded:
                raise Unlike(f"{func} draws random numbers")
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
        known = [self._of(t) for t in tensors]
        last, self.last_made = self.last_made, None
        if func is _DETACH and args[0] is last and known[0].real:
            return self._instead(args[0], func(*args, **kwargs))
        # what is made from nothing is real where it is a number
        real = all(k.real for k in known) if known else not bound.get("size")
        if func is _ITEM and (not real or self._is_own(args[0])):
            return self._number(func, args[0])
        # before it runs: a call in place changes what it reads
        names_ = self._names(bound, lists)
        if real:
            out = func(*args, **kwargs)
        else:
            out = self._hollow(func, args, kwargs, bound, written)
        if lists:
            self._foreach(func, bound, written, names_, out, real)
        else:
            self._single(func, bound, tensors, written, names_, out, real, views)
        self.last_made = None if tensors else out
        return out

    def _instead(self, t: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Torch's own functions give another tensor than the call they make: that one
        stands for it, and nobody uses the first again.
        """
        self.double.know(made, self._of(t))
        self.replaced.add(id(t))
        self.places[self._where(made)] = made
        return made

    def _is_own(self, t: torch.Tensor) -> bool:
        """Is it a number of one lane, such as its counter? Lanes may count from other
        steps on, and a trace does not look at it either.
        """
        return self._of(t).lane >= 0 and t.is_floating_point()

    def _number(self, func: Any, t: torch.Tensor) -> float:
        """A number read from a tensor without contents, or from a lane's own: some
        number, in which two lanes agree if it is the same to both. It is another one
        in the next run.
        """
        known = self._of(t)
        if known.lane < 0 or not t.is_floating_point():
            raise Unlike(f"{func} depends on contents of tensors")
        self.reads = True
        calls = self.lanes[known.lane]
        draw = random.Random(f"{len(calls)} {self.double.perturb is None}")
        value = 0.5 + draw.random()
        calls.append((func, known.name, value))
        return value

    def _constant(self, t: torch.Tensor) -> torch.Tensor:
        if t.numel() > 64 or t.device.type != "cpu":
            raise Unlike("the step brings a tensor along")
        self._new(t, Known(-1, ("constant", t.dtype, t.shape, repr(t.tolist())), True))
        return t

    # ---------------------------------------------------------------- names

    def _name(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return self.known[id(x)].name
        if isinstance(x, (list, tuple)):
            return type(x), tuple([self._name(y) for y in x])
        return type(x), repr(x)

    def _names(self, bound: Any, lists: bool) -> Any:
        if not lists:
            return tuple([(k, self._name(v)) for k, v in bound.items()])
        own = next(v for v in bound.values() if isinstance(v, (list, tuple)))
        n = len(own)
        columns: list[Any] = []
        for k, v in bound.items():
            if isinstance(v, (list, tuple)) and len(v) == n:
                columns.append([(k, self._name(x)) for x in v])
            else:
                columns.append([(k, self._name(v))] * n)
        return list(zip(*columns, strict=True))

    def _new(self, t: torch.Tensor, known: Known) -> None:
        self.double.know(t, known)
        self._place(t)

    # ---------------------------------------------------------------- results

    def _hollow(
        self, func: Any, args: Any, kwargs: Any, bound: Any, written: Any
    ) -> Any:
        """What a call returns whose operands have no contents."""
        for name in written:
            for t in tensors_in(bound[name]):
                known = self._of(t)
                if known.real:
                    self.double.known[id(t)] = known._replace(real=False)
                    if t.untyped_storage()._cdata in self.viewed:
                        raise Unlike("a number is seen by several tensors")
        returns = op_info(func).schema.returns
        if not returns:
            return None
        if written:
            if returns > 1 or len(written) > 1:
                raise Unlike(f"{func} changes several tensors")
            return bound[next(iter(written))]
        return self.results.of(func, args, kwargs, bound)

    # ---------------------------------------------------------------- records

    def _owner(self, func: Any, tensors: Sequence[torch.Tensor]) -> int:
        owner = -1
        for t in tensors:
            lane = self.known[id(t)].lane
            if lane != owner and lane != -1:
                if owner != -1:
                    raise Unlike(f"{func} mixes lanes")
                owner = lane
        return owner

    def _temp(self, lane: int) -> Any:
        self.made[lane] += 1
        return "temp", self.made[lane]

    def _adopt(self, lane: int, t: torch.Tensor, func: Any) -> None:
        """A lane changes what was nobody's: from now on it is the lane's own."""
        known = self._of(t)
        if known.lane == lane:
            return
        if known.name[0] == "shared" or t.untyped_storage()._cdata in self.viewed:
            raise Unlike(f"{func} changes what lanes have in common")
        name = self._temp(lane)
        self.lanes[lane].append(("takes", known.name))
        self.known[id(t)] = Known(lane, name, known.real)

    def _position(
        self, func: Any, tensors: Any, written: Any, name: Any, made: Any, real: bool
    ) -> None:
        """Write down one call, or one position of a call of lists."""
        lane = self._owner(func, tensors)
        if lane >= 0:
            # what has other sizes in lanes that are alike must be like the parameter
            near = self.double.near[lane]
            shapes = [shape_beside(t, near) for t in made if near is not None]
            self.lanes[lane].append((func, name, shapes))
            for t in written:
                self._adopt(lane, t, func)
            for t in made:
                self._new(t, Known(lane, self._temp(lane), real))
            return
        for t in written:
            known = self._of(t)
            if t.untyped_storage()._cdata in self.viewed:
                raise Unlike(f"{func} changes what several tensors see")
            if known.name[0] == "shared":
                self.shared.append((func, name))
                now: Any = (*known.name[:2], len(self.shared))
            else:
                now = (func, name)
            self.known[id(t)] = Known(-1, now, real)
        for k, t in enumerate(made):
            self._new(t, Known(-1, (func, name, k), real))

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
        made = [] if written else results
        if out is not None and not results:
            self.reads = True
            name = (name, repr(out))
        if views and (
            self._owner(func, tensors) < 0 or any(self._of(t).lane < 0 for t in tensors)
        ):
            self.viewed.update(t.untyped_storage()._cdata for t in tensors)
        self._position(func, tensors, targets, name, made, real)

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
                    own = tensors_in(v[i])
                    tensors += own
                    if k in written:
                        targets += own
            made = tensors_in(out[i]) if out is not None else []
            self._position(func, tensors, targets, names[i], made, real)


def _dispatch(
    self: _Calls, func: Any, _: Any, args: Any = (), kwargs: Any = None
) -> Any:
    return self.paths.hidden(self._call, func, args, kwargs or {})


# given to a class that exists: what torch finds in a new one it wraps, so that Dynamo
# is told at each call to keep away. `rehearse` tells it once
_Calls.__torch_dispatch__ = _dispatch  # type: ignore


@torch.compiler.disable  # type: ignore[untyped-decorator]
def rehearse(
    optimizer: Optimizer,
    function: Callable[..., Any],
    lanes: Lanes,
    members: Sequence[int],
    perturb: Perturb | None = None,
) -> Record:
    """Run `function`, the step of `optimizer`, for some of its lanes.

    `perturb` changes the numbers that it sees. Raises Unlike where what the step does
    to lanes cannot be told apart.
    """
    double = Double(optimizer, lanes, members, perturb)
    paths = Paths()
    calls = _Calls(double, paths)
    before = torch.get_rng_state()
    try:
        with compat.as_if_compiling(), calls, paths:
            result = function(double.optimizer)
    except Unlike:
        raise
    except Exception as error:
        raise Unlike(f"a rehearsal fails: {type(error).__name__}: {error}") from error
    if result is not None:
        raise Unlike("the step returns something")
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise Unlike("the step draws random numbers")
    return _finish(double, calls, members)


def _finish(double: Double, calls: _Calls, members: Sequence[int]) -> Record:
    known = double.known
    for i, p in double.params.items():
        where, grad = double.places[i]
        if p.data_ptr() != where or p.grad is not grad:
            raise Unlike(f"the step gives parameter {i} other memory or gradients")
    holders: set[int] = set()

    def in_lane(lane: int) -> Callable[[torch.Tensor], Any]:
        def name(t: torch.Tensor) -> Any:
            found = calls._of(t)
            if found.lane not in (lane, -1) or found.name[0] == "shared":
                raise Unlike("the state of a lane holds a tensor of another")
            if found.name[0] != PARAM and found.name[0] != GRAD:
                if id(t) in holders:
                    raise Unlike("lanes have a tensor of their state in common")
            holders.add(id(t))
            near = double.near[lane]
            return found.name, *shape_beside(t, near), t.dtype, t.device

        return name

    states: dict[int, Any] = {}
    state: Mapping[Any, Any] = double.optimizer.state
    inside = {id(double.params[i]) for i in members}
    if any(id(p) not in inside for p in state):
        raise Unlike("the step makes state of something besides its parameters")
    for i in members:
        own = state.get(double.params[i])
        if own is not None and not all(
            isinstance(v, (torch.Tensor, *NUMBERS)) for v in own.values()
        ):
            raise Unlike("the state of a parameter holds more than tensors and numbers")
        states[i] = None if own is None else holdings(own, in_lane(i))
    lane_of = {id(p): i for i, p in double.params.items()}

    def elsewhere(t: torch.Tensor) -> Any:
        if id(t) in lane_of:
            return "parameter", lane_of[id(t)]
        found = known.get(id(t))
        if found is None or found.lane >= 0:
            raise Unlike("the optimizer keeps a tensor of a lane besides its state")
        return found.name

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
