"""A model whose embedding is used elsewhere too -> the gradient of what was looked up
is added to that of the other place, in place.

GPT-2's head is its embedding: when the backward comes to the lookup, the engine holds
the head's gradient, makes one as large for the few rows that were looked up, and a sum:
three times the largest matrix, at the moment that is the peak of a step whose other
gradients are gone. Here those rows are added to the gradient that the engine holds, and
the lookup gives it none: `0 + x` for a row that was not looked up, and the same sums in
the same order for the others, so the bits are the engine's.

It is done where the engine is seen to hold the very tensor that the head gave it, and
nobody else to have it: no third place has made a sum of it. Else, and on other devices
than a CPU, the engine does what it always does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compat


class _Held:
    """Gradients that the engine holds in one backward, by the parameter's id; None
    where several places gave one. The engine's own queue keeps this.
    """

    def __init__(self) -> None:
        self.grads: dict[int, Tensor | None] = {}

    def clear(self) -> None:
        """The backward is over."""
        self.grads.clear()


class Lookups:
    """Watches the modules of a model that share a matrix with an embedding.

    Modules know it weakly. A model that is copied or pickled is watched by nobody.
    """

    def __init__(self, model: torch.nn.Module, params: Sequence[Tensor]) -> None:
        #: lookups of each parameter that a graph holds
        self._waiting: dict[int, weakref.WeakSet[_Lookup]] = {}
        self._held: weakref.WeakValueDictionary[int, _Held] = (
            weakref.WeakValueDictionary()
        )
        self._hooks: list[Any] = []
        known = {id(p) for p in params}
        owner = weakref.ref(self)
        for p, modules in _shared(model):
            if id(p) not in known:
                continue
            self._waiting[id(p)] = weakref.WeakSet()
            for module in modules:
                looks_up = type(module) is torch.nn.Embedding
                watch = _watch_lookup if looks_up else _watch_other
                hook = _Hook(owner, p, watch)
                self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        # a hook that is left has its parameter
        weakref.finalize(self, _remove, self._hooks)

    def close(self) -> None:
        """Watch no more."""
        _remove(self._hooks)

    def add(self, lookup: _Lookup) -> None:
        """A graph has a lookup of a parameter."""
        self._waiting[id(lookup.param)].add(lookup)

    def arrives(self, p: Tensor, grad: Tensor) -> Tensor:
        """The gradient to give to the engine for one of a parameter, of which no lookup
        made it.
        """
        if not len(self._waiting.get(id(p), ())):
            return grad
        task = compat.backward_under_way()
        # a tensor of its own: one that is a view keeps its base, and the engine adds
        # in place to none that shares its memory
        given = grad.detach()
        held = self._held.get(task)
        if held is None:
            held = self._held[task] = _Held()
            compat.at_end_of_backward(held.clear)
        held.grads[id(p)] = None if id(p) in held.grads else given
        return given

    def looked_up(self, lookup: _Lookup, rows: Tensor) -> bool:
        """Add the gradient of what was looked up; False where it was not done."""
        held = self._held.get(compat.backward_under_way())
        grad = None if held is None else held.grads.pop(id(lookup.param), None)
        if grad is None or not compat.has_one_owner(grad):
            return False
        # of further lookups the engine makes gradients: nobody knows of how many, and
        # what is kept until the end the engine copies
        lookup.add_to(grad, rows)
        return True


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


class _Lookup:
    """One lookup in a graph; the graph's node keeps it."""

    def __init__(
        self,
        owner: weakref.ref[Lookups],
        param: Tensor,
        indices: Tensor,
        padding: int | None,
    ) -> None:
        self.owner = owner
        self.param = param
        self.indices = indices
        self.version = indices._version
        self.padding = padding

    def __call__(self, grads: tuple[Tensor | None, ...]) -> Any:
        """Before the node runs: with no gradient it makes none."""
        owner = self.owner()
        (rows,) = grads
        if owner is None or rows is None or torch.is_grad_enabled():
            return None
        if type(rows) is not Tensor or self.indices._version != self.version:
            return None
        return (None,) if owner.looked_up(self, rows) else None

    def add_to(self, grad: Tensor, rows: Tensor) -> None:
        """What `grad += embedding's gradient` does, without making that."""
        found, places = torch.unique(self.indices, return_inverse=True)
        padding = -1
        if self.padding is not None:
            at = (found == self.padding).nonzero()
            padding = int(at) if at.numel() else -1
        table = compat.gradient_of_lookup(rows, places, found.numel(), padding)
        grad.add_(0.0)  # -0 becomes 0, as where the zeros of other rows are added
        grad.index_add_(0, found, table)


class _Forward(NamedTuple):
    """One call of a module, and what it gave."""

    module: torch.nn.Module
    args: Any
    kwargs: Any
    output: Tensor


class _Hook:
    """A hook of a module's forward. `watch`: what it does where a graph is made."""

    def __init__(
        self,
        owner: weakref.ref[Lookups],
        param: Tensor,
        watch: Callable[[Lookups, Tensor, _Forward], None],
    ) -> None:
        self.owner = owner
        self.param = param
        self.watch = watch

    def __call__(
        self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        owner = self.owner()
        if owner is not None and isinstance(output, Tensor) and output.grad_fn:
            self.watch(owner, self.param, _Forward(module, args, kwargs, output))

    def __reduce__(self) -> Any:
        return _Nobody, ()


class _Nobody:
    """What is left of a hook in a copy of its module."""

    def __call__(self, *_: Any) -> None:
        return None


def _watch_lookup(owner: Lookups, param: Tensor, forward: _Forward) -> None:
    """Have an embedding's node ask before it makes a gradient."""
    node: Any = forward.output.grad_fn
    module: Any = forward.module
    indices = forward.args[0] if forward.args else forward.kwargs.get("input")
    if not compat.is_lookup(node) or type(indices) is not Tensor:
        return
    if module.sparse or module.scale_grad_by_freq:
        return
    if param.device.type != "cpu" or indices.is_inference():
        return
    if indices.numel() < param.shape[0] and compat.gives_to(node, param) == 0:
        made = _Lookup(weakref.ref(owner), param, indices, module.padding_idx)
        node.register_prehook(made)
        owner.add(made)


def _watch_other(owner: Lookups, param: Tensor, forward: _Forward) -> None:
    """Have the nodes tell that give the matrix a gradient in another way, as a head's
    do.
    """
    if param.device.type != "cpu":
        return
    for node in compat.nodes_near(forward.output.grad_fn):
        at = compat.gives_to(node, param)
        if at is not None:
            node.register_hook(_arrival(weakref.ref(owner), param, at))


def _arrival(owner_of: weakref.ref[Lookups], p: Tensor, at: int) -> Callable[..., Any]:
    """What a node calls when it has made gradients, that of the parameter at this
    place.
    """

    def arrives(grads: tuple[Tensor | None, ...], _: Any) -> Any:
        owner, grad = owner_of(), grads[at]
        if owner is None or torch.is_grad_enabled() or type(grad) is not Tensor:
            return None
        if grad.layout != torch.strided or grad.shape != p.shape:
            return None
        given = owner.arrives(p, grad)
        return None if given is grad else (*grads[:at], given, *grads[at + 1 :])

    return arrives


def _shared(model: torch.nn.Module) -> Iterator[tuple[Tensor, list[torch.nn.Module]]]:
    """Matrices of embeddings that other modules hold too, with all that hold them."""
    found: dict[int, tuple[Tensor, list[torch.nn.Module]]] = {}
    for module in model.modules():
        for p in {*module.parameters(recurse=False)}:
            found.setdefault(id(p), (p, []))[1].append(module)
    for shared, modules in found.values():
        lookups = sum(type(module) is torch.nn.Embedding for module in modules)
        if 0 < lookups < len(modules) and type(shared) is torch.nn.Parameter:
            yield shared, modules
