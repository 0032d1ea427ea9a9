"""Record the effect of autocast on the calls of a graph, which run on meta.

Autocast ignores meta tensors. So where autocast is on, each call first runs on fake
tensors, which report the step's device. If autocast changed the call, the ATen calls
below it are recorded, each with the state of autocast that it had. Otherwise the call
is recorded as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ... import compat
from ...compat import DISPATCH_MODE, negated_view
from ...errors import EagerOnly
from ..aten.autocast import Autocast, KeptCast, autocast_of
from ..aten.externs import tensors_in
from ..aten.recorder import Recorder
from .lists import is_foreach

#: Types from which autocast casts to float32.
LOWER = (torch.bfloat16, torch.float16)


class AutocastCall(NamedTuple):
    """An ATen call on fake tensors, its result, and the state of autocast."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    autocast: Autocast


class CallRecorder(DISPATCH_MODE):  # type: ignore[misc]
    """Records the ATen calls that are made below autocast."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.calls: list[AutocastCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.calls.append(
            AutocastCall(func, args, kwargs, out, autocast_of(self.kinds))
        )
        return out


class AutocastRecorder:
    """Records the calls of a graph as autocast changes them.

    `inputs`: the index of an input, by the id of its twin. `shared`: the indices of
    inputs that share memory. `leaves`: the indices of inputs that require gradients.
    `own`: True if the graph itself switches autocast.
    """

    def __init__(
        self,
        recorder: Recorder,
        own: bool,
        inputs: Mapping[int, int],
        kinds: Sequence[str],
        shared: frozenset[int],
        leaves: frozenset[int],
    ) -> None:
        self.recorder = recorder
        self.inputs = inputs
        self.kinds = kinds
        self.shared = shared
        self.leaves = leaves
        self.own = own
        self.entered: list[Any] = []
        self.mode: Any = None

    def close(self) -> None:
        """Leave the contexts that a graph has entered, if an error ended it inside
        them.
        """
        while self.entered:
            self.entered.pop().__exit__(None, None, None)

    def follow(self) -> Autocast:
        """Record the next calls with the present state of autocast."""
        self.recorder.autocast = now = autocast_of(self.kinds)
        return now

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of a node on meta tensors, and record its effect."""
        if function is compat.ENTER_AUTOCAST:
            self.entered.append(function(*args, **kwargs))
            return self.entered[-1]
        if function is compat.EXIT_AUTOCAST:
            self.entered.remove(args[0])
            return function(*args, **kwargs)
        now = self.follow()
        given = tensors_in([args, list(kwargs.values())])
        if not (now.on and given):
            return function(*args, **kwargs)
        if is_foreach(function):
            self._check_lists(function, given, now)
            return function(*args, **kwargs)
        twins: dict[int, torch.Tensor] = {}
        with self._recording_off():
            made, result = self._seen(function, args, kwargs, twins)
        if all(x.autocast == now for x in made):
            return function(*args, **kwargs)
        for x in made:
            self._again(x, twins, now)
        return _mapped(result, twins)

    @contextlib.contextmanager
    def _recording_off(self) -> Iterator[None]:
        """Pause the recording, and turn off autocast's cache."""
        cached = torch.is_autocast_cache_enabled()
        self.recorder.__exit__(None, None, None)
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
            self.recorder.__enter__()

    def _seen(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        twins: dict[int, torch.Tensor],
    ) -> tuple[list[AutocastCall], Any]:
        """Call a function on fake tensors; return the calls below autocast, and the
        result.

        Adds to `twins` the tensor that each fake tensor replaces, by id of the fake
        tensor.
        """
        if self.mode is None:
            self.mode = compat.fake_mode()
        fakes: dict[int, torch.Tensor] = {}
        with self.mode:
            for t in tensors_in([args, list(kwargs.values())]):
                if id(t) not in fakes:
                    fakes[id(t)] = self._fake(t)
                    twins[id(fakes[id(t)])] = t
            with CallRecorder(self.kinds) as seen:
                result = function(*_mapped(args, fakes), **_mapped(kwargs, fakes))
        # the ids of these objects are keys
        self.recorder.keep([fakes, seen.calls])
        return seen.calls, result

    def _fake(self, t: torch.Tensor) -> torch.Tensor:
        device = self.recorder.device_of(t) if t.is_meta else t.device
        fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
        fake = fake.conj() if t.is_conj() else fake
        return negated_view(fake) if t.is_neg() else fake

    def _again(
        self, made: AutocastCall, twins: dict[int, torch.Tensor], now: Autocast
    ) -> None:
        """Repeat a call on the tensors that its fake tensors replace, and record it."""
        args, kwargs = _mapped(made.args, twins), _mapped(made.kwargs, twins)
        self.recorder.autocast = made.autocast
        if made.autocast != now and self._is_kept(made.func, args, kwargs, now):
            self.recorder.autocast = now
            self.recorder.instead = KeptCast(kwargs["dtype"])
        try:
            out = made.func(*args, **kwargs)
        finally:
            self.recorder.instead = None
            self.recorder.autocast = now
        for fake, twin in zip(tensors_in(made.out), tensors_in(out), strict=True):
            twins[id(fake)] = twin

    def _is_kept(self, func: Any, args: Any, kwargs: Any, now: Autocast) -> bool:
        """May autocast cache this cast? It caches casts of parameters, and no views."""
        place = self.inputs.get(id(args[0])) if args else None
        if func is not torch.ops.aten._to_copy.default or place is None:
            return False
        t: torch.Tensor = args[0]
        kind = torch.device(self.recorder.device_of(t)).type
        if t.dtype != torch.float32 or kwargs.get("dtype") != dict(now.on).get(kind):
            return False
        if self.own and place not in self.leaves:
            return False
        if self.own or place in self.shared:
            why = "enters autocast itself" if self.own else "has it in two places"
            raise EagerOnly(
                f"autocast may keep the cast of a tensor of a step that {why}\n"
                f"{self.recorder.line}"
            )
        return True

    def _check_lists(
        self, function: Any, given: Sequence[torch.Tensor], now: Autocast
    ) -> None:
        """Refuse a foreach call that eager may split into calls under autocast."""
        name = function.__name__.removeprefix("_foreach_").removesuffix("_")
        kinds = [kind for kind, _ in now.on if compat.may_cast(name, kind)]
        products = name == "mm" or any(t.dtype in LOWER for t in given)
        if kinds and products:
            raise EagerOnly(
                f"autocast may change what {function.__name__} does in eager\n"
                f"{self.recorder.line}"
            )


def method(name: str) -> Callable[..., Any]:
    """Return a function that calls a method of its first argument."""
    return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)


def switches(nodes: Sequence[Node]) -> bool:
    """Does a graph switch autocast?"""
    return any(
        n.op == "call_function" and n.target is compat.ENTER_AUTOCAST for n in nodes
    )


def _mapped(x: Any, by_id: Mapping[int, Any]) -> Any:
    if isinstance(x, torch.Tensor):
        return by_id.get(id(x), x)
    if isinstance(x, dict):
        return {k: _mapped(v, by_id) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)([_mapped(y, by_id) for y in x])
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*[_mapped(y, by_id) for y in x])
    if type(x).__module__ == "torch.return_types":
        return type(x)([_mapped(y, by_id) for y in x])
    return x


__all__ = ["AutocastRecorder", "method", "switches"]
