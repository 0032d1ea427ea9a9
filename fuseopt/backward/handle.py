"""`fuseopt.in_backward`: an optimizer that steps while the backward runs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.session import session
from ..config import resolve
from ..errors import NotAnOptimizer, UnsupportedInput
from ..locks import new_rlock
from ..tails.arguments import parameters_of, stepped
from .buckets import BYTES, Bucket, buckets_of
from .lookups import Lookups
from .on_thread import OnThread, Steps, threads_of
from .stepper import BEYOND, Stepper, Streams


class _Pass:
    """One backward, and the gradients that have arrived in it. Only the engine's queue
    has a strong reference, so an exception that ends a backward frees this.

    `task` is the backward's number. `stream_of` has, for each bucket, a function that
    returns the current stream of its device, or None on a CPU.
    `awaited` is, for each bucket, the number of gradients that have not arrived. `seen`
    has the ids of parameters whose gradient has arrived.
    """

    def __init__(
        self, task: int, buckets: Sequence[Bucket], stream_of: Sequence[Any]
    ) -> None:
        self.task = task
        self.buckets = buckets
        self.awaited = [sum(p.requires_grad for p in bucket) for bucket in buckets]
        self.streams = [*map(Streams, stream_of)]
        self.seen: set[int] = set()


def _none() -> None:
    """Return None, before the first backward."""


class InBackward(Optimizer):
    """Optimizer that steps while the backward runs; see docs/backward.md.

    Groups, state and defaults are those of `optimizer`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: torch.nn.Module | None,
        buckets: Any,
        thread: int = False,
        **options: Any,
    ) -> None:
        # this does not call Optimizer.__init__: the groups are those of `optimizer`
        self.optimizer = optimizer
        self._opt_called = False
        self._lock = new_rlock()
        self._passes: weakref.WeakValueDictionary[int, _Pass] = (
            weakref.WeakValueDictionary()
        )
        #: the backward of the last gradient
        self._latest: Callable[[], _Pass | None] = _none
        self._accumulating = 0
        self._buckets: list[Bucket] = []
        self._stream_of: list[Callable[[], Any] | None] = []
        self._bucket_of: dict[int, int] = {}
        self._hooks: list[Any] = []
        params = parameters_of([optimizer])
        all_buckets = buckets_of(buckets, model, params)
        self._stepper = _steps_of(optimizer, thread, options)
        self._add_buckets(all_buckets)
        self._lookups = None if model is None else Lookups(model, params)

    # ---------------------------------------------------------------- one optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the groups; a schedule may change their numbers at any time."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Return the state of each parameter."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Return the default options of groups."""
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of the optimizer."""
        self._stepper.wait()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state_dict of this optimizer, or of one in eager."""
        with self._lock:
            self._stepper.wait()
            self.optimizer.load_state_dict(state_dict)
            self._stepper.forget()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients that were not stepped; mostly there are none."""
        self._stepper.wait()
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose parameters become new buckets. Raises UnsupportedInput,
        and then adds nothing.
        """
        with self._lock:
            self._stepper.wait()
            n = len(self.optimizer.param_groups)
            self.optimizer.add_param_group(param_group)
            params = self.optimizer.param_groups[-1]["params"]
            try:
                self._stepper.refresh()
                self._add_buckets(buckets_of(BYTES, None, params))
            except UnsupportedInput:
                del self.optimizer.param_groups[n:]
                raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient: none after a plain backward. Call a
        closure, whose backward steps, first. Return its loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._stepper.wait()
        if stepped([self.optimizer]):
            self._check()
            self._stepper.refresh()
            for bucket in self._buckets:
                self._stepper.step(bucket)
            self._stepper.wait()
        self._opt_called = True
        return loss

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Let backwards accumulate gradients within the context; the next backward
        steps.
        """
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def close(self) -> None:
        """Remove the hooks from the parameters, so that no backward steps. The
        optimizer stays.
        """
        self._stepper.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._lookups is not None:
            self._lookups.close()

    remove = close

    def __enter__(self) -> InBackward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # GradScaler.step reads this attribute first
        raise UnsupportedInput(
            "fuseopt.in_backward has stepped with scaled gradients, because it steps "
            "before a GradScaler can unscale them. Train in bfloat16, or use "
            "fuseopt.tail(optimizer, scaler=...)"
        )

    def _no_hooks(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedInput(
            "fuseopt.in_backward does not support hooks of a step, because they would "
            "run once for each bucket. Use hooks of the parameters"
        )

    register_step_pre_hook = register_step_post_hook = _no_hooks

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def register_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.register_state_dict_pre_hook(*args, **kwargs)

    def register_state_dict_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.register_state_dict_post_hook(*args, **kwargs)

    def register_load_state_dict_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.register_load_state_dict_pre_hook(*args, **kwargs)

    def register_load_state_dict_post_hook(self, *args: Any, **kwargs: Any) -> Any:
        return self.optimizer.register_load_state_dict_post_hook(*args, **kwargs)

    def __reduce__(self) -> Any:
        raise TypeError(
            "an optimizer of fuseopt.in_backward cannot be copied or pickled. Save its "
            "state_dict(), and load it into a new one"
        )

    def __repr__(self) -> str:
        return f"<in backward, {len(self._buckets)} buckets: {self.optimizer!r}>"

    # ---------------------------------------------------------------- the backward

    def _add_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Add buckets, and hooks to their parameters. Raises UnsupportedInput, before
        any change, if another InBackward steps one of these.
        """
        hook = _hook(weakref.ref(self))
        for other in [*session.in_backward]:
            if other._hooks and any(
                q is p for b in buckets for p in b for q in other._bucket_for(p)
            ):
                raise UnsupportedInput(
                    "a parameter already belongs to another fuseopt.in_backward, which "
                    "frees its gradient. Call close() on that one first"
                )
        session.in_backward.add(self)
        for bucket in buckets:
            for p in bucket:
                self._bucket_of[id(p)] = len(self._buckets)
                self._hooks.append(_register(p, hook))
            self._buckets.append(bucket)
            device = bucket[0].device
            remote = device.type != "cpu" and device.index is not None
            self._stream_of.append(compat.stream_on(device) if remote else None)
        self._stepper.kept = 2 * len(self._buckets) + BEYOND

    def _bucket_for(self, p: torch.Tensor) -> Bucket:
        """Return the bucket with the id of a parameter, or []."""
        k = self._bucket_of.get(id(p))
        return [] if k is None else self._buckets[k]

    def _check(self) -> None:
        """Raise UnsupportedInput unless the buckets together have the effect of one
        step.
        """
        if compat.has_step_hooks(self.optimizer):
            self._no_hooks()
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            if distributed.get_world_size() > 1:
                raise UnsupportedInput(
                    "fuseopt.in_backward steps before processes exchange gradients. "
                    "Use fuseopt.compile or fuseopt.tail in a group of several "
                    "processes"
                )
        n = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if n != len(self._bucket_of):
            raise UnsupportedInput(
                "a group has parameters that are in no bucket. Add them with "
                "add_param_group"
            )

    def _begin(self, task: int) -> _Pass:
        """Begin a backward, at its first gradient. Raises UnsupportedInput."""
        self._check()
        if compat.is_nested():
            raise UnsupportedInput(
                "a backward runs within another backward, so parameters may get more "
                "gradients later. Use checkpoint(..., use_reentrant=False)"
            )
        self._stepper.refresh()
        new_pass = _Pass(task, [*self._buckets], self._stream_of)
        if isinstance(self._stepper, OnThread):
            # an exception may end the backward while a bucket is stepped
            weakref.finalize(new_pass, self._stepper.settle).atexit = False
        owner = weakref.ref(self)

        def end() -> None:
            self = owner()
            if self is not None:
                self._end(new_pass)

        compat.at_end_of_backward(end)
        return new_pass

    def _arrived(self, p: torch.Tensor) -> None:
        """Note that a parameter's gradient of this backward is complete. Step its
        bucket if it was the last one.
        """
        if self._accumulating:
            return
        task = compat.backward_under_way()
        with self._lock:
            current = self._latest()
            if current is None or current.task != task:
                current = self._passes.get(task)
                if current is None:
                    current = self._passes[task] = self._begin(task)
                self._latest = weakref.ref(current)
            k = self._bucket_of[id(p)]
            if k >= len(current.buckets):
                return  # the bucket was added during this backward
            if id(p) in current.seen:
                raise UnsupportedInput(
                    "a parameter got its gradient twice in one backward"
                )
            current.seen.add(id(p))
            current.streams[k].arrived()
            current.awaited[k] -= 1
            if current.awaited[k] == 0:
                current.streams[k].join(current.buckets[k])
                self._stepper.step(current.buckets[k])

    def _end(self, ended: _Pass) -> None:
        """End a backward: step the gradients in buckets that did not fill."""
        with self._lock:
            # before this thread reads gradients that another one may set to None
            self._stepper.wait()
            for bucket in ended.buckets:
                self._stepper.step(bucket)
            self._stepper.wait()
        self._opt_called = True


def _hook(owner: weakref.ref[InBackward]) -> Callable[[torch.Tensor], None]:
    """Return the hook of parameters. It has a weak reference, since the garbage
    collector does not visit hooks of tensors.
    """

    def arrived(p: torch.Tensor) -> None:
        self = owner()
        if self is not None:
            self._arrived(p)

    untraced: Callable[[torch.Tensor], None] = torch.compiler.disable(arrived)  # type: ignore[no-untyped-call]
    return untraced


def _register(p: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register a hook on a parameter, which may be frozen now."""
    frozen = not p.requires_grad
    with torch.no_grad():
        try:
            p.requires_grad_(True)
            return p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        finally:
            if frozen:
                p.requires_grad_(False)


def _steps_of(optimizer: Any, thread: int, options: dict[str, Any]) -> Steps:
    """Return the steps of an optimizer's buckets. One with masters makes its own."""
    on_cpu = all(p.is_cpu for p in parameters_of([optimizer]))
    threads = threads_of(thread, on_cpu)
    make = getattr(type(optimizer), "steps_of_buckets", None)
    steps: Steps
    steps = Stepper(optimizer, options) if make is None else make(optimizer, options)
    if not threads:
        return steps
    if make is None and not on_cpu:
        raise UnsupportedInput(
            "thread=True steps parameters on the CPU; one of these is on another "
            "device. Use fuseopt.offload.CPUOffloadOptimizer, or leave thread out"
        )
    return OnThread(steps, threads)


# ---------------------------------------------------------------- the function


def in_backward(
    model_or_params: torch.nn.Module | Iterable[Any],
    make_optimizer: Callable[[Any], Optimizer],
    *,
    buckets: int | str | Sequence[Iterable[torch.Tensor]] = BYTES,
    thread: int = False,
    **options: Any,
) -> InBackward:
    """Return an optimizer that steps while the backward runs: `loss.backward()` is a
    whole step. Each bucket of parameters is stepped as soon as its gradients exist,
    which are then freed.

    `make_optimizer` takes a list of the model's parameters, or of the given ones, and
    returns an optimizer. `buckets` is the number of bytes of parameters in each,
    "layer" for one bucket for each module, or lists of parameters. With `thread`, a
    second thread steps on the CPU while the backward goes on. The backward returns when
    all is stepped. A number is that of the threads of the kernels. `options` are those
    of fuseopt.config.

    Raises NotAnOptimizer, ConfigError, and UnsupportedInput for an optimizer whose step
    depends on all parameters at once.
    """
    resolve(None, options, of=in_backward)
    missing = compat.why_no_backward_is_known()
    if missing:
        raise UnsupportedInput(f"this version of torch has no {missing}")
    model = model_or_params if isinstance(model_or_params, torch.nn.Module) else None
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UnsupportedInput(
            "fuseopt.in_backward steps before DistributedDataParallel exchanges "
            "gradients. Use fuseopt.compile or fuseopt.tail"
        )
    params = list(model_or_params.parameters() if model else model_or_params)  # type: ignore[arg-type,union-attr]
    optimizer = make_optimizer(params)
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, InBackward):
        raise NotAnOptimizer(
            "make_optimizer must return a torch.optim.Optimizer, not a "
            f"{type(optimizer).__name__!r}"
        )
    return InBackward(optimizer, model, buckets, thread, **options)
