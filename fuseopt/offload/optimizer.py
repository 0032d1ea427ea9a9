"""Optimizer of parameters of 16 bits that steps their masters of float32."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from ..config import resolve
from ..errors import UnsupportedInput
from ..isolate.compile import compile_stored
from ..locks import new_rlock
from ..runtime.undo import at_once
from ..storage.rule import Rule, rule_of
from .buckets import MasterSteps
from .homes import Home, InPlaceHome
from .masters import Master, Masters

#: Key of a parameter's master in a state dict.
MASTER = "master"


class MasterOptimizer(Optimizer):
    """Optimizer whose parameters of 16 bits have masters of float32.

    `optimizer_class(groups, **defaults)` makes the inner `optimizer`, which steps the
    masters. `master` is "fp32", or "split", which stores only the 16 bits that a
    parameter of bfloat16 lacks. `storage` is the option of `fuseopt.compile`, for the
    inner state. `options` are those of fuseopt.config. `home` is the place where the
    parameters are stepped; None steps them where they lie. Parameters of float32 are
    stepped directly.

    A step reads and writes each master, and each tensor of the inner state, once. For
    each element it reads 2 bytes of gradient and writes 2 bytes of parameter. Raises
    UnsupportedInput for parameters of 16 bits that are not contiguous, and for those of
    other types.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        *,
        master: str = "fp32",
        storage: Any = None,
        options: dict[str, Any] | None = None,
        home: Home | None = None,
        **defaults: Any,
    ) -> None:
        resolve(None, options)
        rule = Rule() if storage is None else rule_of(storage)
        self._lock = new_rlock()
        self._home = InPlaceHome() if home is None else home
        self._masters = Masters(master)
        groups = listed_groups(params)
        self._lists = [group["params"] for group in groups]
        wide = [
            {**group, "params": self._masters.add(self._home.weights_of(of_user))}
            for group, of_user in zip(groups, self._lists, strict=True)
        ]
        self.optimizer = optimizer_class(wide, **defaults)
        self._masters.optimizer = self.optimizer
        self._wide = [group["params"] for group in self.optimizer.param_groups]
        self._show(self._lists)
        # groups, state and defaults are those of `optimizer`, and so are their hooks
        self._opt_called = False
        compile_stored(self.optimizer, options or {}, rule, self._masters)

    def _show(self, lists: list[list[Any]]) -> None:
        """Write these parameters to the groups, in one C call."""
        pairs = zip(self.optimizer.param_groups, lists, strict=True)
        at_once([functools.partial(dict.update, g, params=x) for g, x in pairs])

    @contextlib.contextmanager
    def _on_masters(self) -> Iterator[None]:
        """Have the masters in the groups within the context."""
        with self._lock:
            try:
                self._show(self._wide)
                yield
            finally:
                try:
                    self._show(self._lists)
                finally:
                    self._show(self._lists)  # an interrupt may come before

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the groups, with the user's parameters."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the state of each parameter."""
        state = self.optimizer.state
        every = zip(chain(*self._lists), chain(*self._wide), strict=True)
        return {p: state[wide] for p, wide in every if wide in state}

    def _numbered(self) -> list[tuple[int, Master]]:
        """Return the masters with the indices of their parameters in a state dict."""
        numbers = {id(wide): i for i, wide in enumerate(chain(*self._wide))}
        return [(numbers[id(x.master)], x) for x in self._masters.every]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the default options of groups."""
        return self.optimizer.defaults

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters with the gradients of the parameters, and round them to the
        parameters. Call a closure first; return its loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._on_masters():
            self._home.take_gradients()
            self._masters.take_gradients()
            self.optimizer.step()
            self._home.give_weights()
        self._opt_called = True
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step_some(self, params: Sequence[torch.Tensor]) -> None:
        """Step the masters of these parameters, and no others. Weights are copied
        beside the current stream.
        """
        only = {*map(id, params)}
        with self._on_masters(), self._home.beside():
            self._home.take_gradients(only)
            self._masters.take_gradients(self._home.stepped(only))
            self.optimizer.step()
            self._home.give_weights()

    # ---------------------------------------------------------------- fuseopt.tail

    def check_tail(self) -> None:
        """Raise UnsupportedInput if a tail cannot step the masters: it replaces the
        method `step`.
        """
        if type(self).step is not MasterOptimizer.step:
            raise UnsupportedInput(
                f"fuseopt.tail of {type(self).__name__}: its class overrides step, "
                "which a tail of masters does not call. Call that step without a tail"
            )

    @contextlib.contextmanager
    def in_tail(self) -> Iterator[None]:
        """See `tails.masters`."""
        with self._on_masters():
            self._home.take_gradients()
            self._masters.take_gradients()
            yield
            self._home.give_weights()
        self._opt_called = True

    def widened(self) -> contextlib.AbstractContextManager[None]:
        """See `tails.masters`."""
        return self._masters.widened()

    def own_parameters(self) -> list[torch.Tensor]:
        """See `tails.masters`."""
        return [*chain(*self._lists)]

    def stored_gradients(self) -> list[torch.Tensor]:
        """See `tails.masters`."""
        stored, every = self._masters.stored, chain(*self._wide)
        pairs = ((p, p.grad) for p in every)
        return [stored.get(id(p), grad) for p, grad in pairs if grad is not None]

    # ---------------------------------------------------------------- groups

    def wide_groups(self) -> list[dict[str, Any]]:
        """Return the groups, with masters in place of parameters."""
        pairs = zip(self.optimizer.param_groups, self._wide, strict=True)
        return [{**group, "params": [*wide]} for group, wide in pairs]

    def steps_of_buckets(self, options: dict[str, Any]) -> MasterSteps:
        """Return the steps of buckets, for `fuseopt.in_backward`. Raises
        UnsupportedInput.
        """
        if options:
            raise UnsupportedInput(
                f"fuseopt.in_backward of {type(self).__name__} takes no options: give "
                f"{', '.join(options)} to {type(self).__name__}(..., options=...)"
            )
        every = chain(*self._lists), chain(*self._wide)
        if any(p is wide for p, wide in zip(*every, strict=True)):
            raise UnsupportedInput(
                "fuseopt.in_backward steps masters of parameters of 16 bits; one of "
                "these has float32 and no master. Step it by another optimizer"
            )
        return MasterSteps(self, self._home.join)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and make masters of its parameters."""
        params = _listed(param_group["params"])
        with self._on_masters():
            masters = self._masters.add(self._home.weights_of(params))
            self.optimizer.add_param_group({**param_group, "params": masters})
            self._wide.append(masters)
            self._lists.append(params)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with its packed state. It has the
        master of each parameter, a tensor of float32, under "master".
        """
        with self._on_masters():
            found = self.optimizer.state_dict()
        states = dict(found["state"])
        for i, x in self._numbered():
            states[i] = {**states.get(i, {}), MASTER: x.wide()}
        return {**found, "state": dict(sorted(states.items()))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or one of the inner optimizer's class in
        eager. In the second case the parameters are the masters' first numbers.
        """
        states = {i: {**state} for i, state in state_dict["state"].items()}
        masters = {i: state.pop(MASTER, None) for i, state in states.items()}
        stripped = {i: state for i, state in states.items() if state}
        with self._on_masters():
            self.optimizer.load_state_dict({**state_dict, "state": stripped})
            self._wide = [group["params"] for group in self.optimizer.param_groups]
            self._home.take_weights()
            for i, x in self._numbered():
                wide = masters.get(i)
                x.set(x.param if wide is None else wide)
            self._home.give_all_weights()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce__(self) -> Any:
        raise TypeError(
            "an optimizer with masters cannot be copied or pickled; save its "
            "state_dict() and make another one"
        )

    def __repr__(self) -> str:
        return f"<{self._masters.kind} masters: {self.optimizer!r}>"


def listed_groups(params: Any) -> list[dict[str, Any]]:
    """Return an optimizer's first argument as groups with lists of parameters."""
    groups = [*params]
    if not groups or not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [{**group, "params": _listed(group["params"])} for group in groups]


def _listed(params: Any) -> list[torch.Tensor]:
    return [params] if isinstance(params, torch.Tensor) else [*params]
