"""Add the gradient of an embedding's rows to that of its other use, in place.

GPT-2's head is its embedding. At the lookup's backward, autograd's engine has the
head's gradient. It then allocates a gradient as large for the few rows of the lookup,
and a sum. That is three times the largest matrix, at the peak of a step whose other
gradients are freed. Here those rows are added in place to the engine's gradient, and
the lookup returns none. A row outside the lookup gets `0 + x`, and each other row the
same sums in the same order. So the bits are the engine's.

This happens only if the engine has the same tensor that the head returned, and nothing
else refers to it. A third use would make a sum. In all other cases, and on other
devices than a CPU, the engine adds the gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compat


class _EngineGrads:
    """Gradients that the engine has in one backward, by the parameter's id; None if
    several uses gave one. Only the engine's queue has a strong reference to this.
    """

    def __init__(self) -> None:
        self.grads: dict[int, Tensor | None] = {}

    def clear(self) -> None:
        """Release the gradients, at the end of the backward."""
        self.grads.clear()


class Lookups:
    """Modules of a model that share a matrix with an embedding, and their hooks.

    The modules' hooks have weak references to it; in a copy of the model they do
    nothing.
    """

    def __init__(self, model: torch.nn.Module, params: Sequence[Tensor]) -> None:
        #: for each parameter, its lookups whose graph still exists
        self._waiting: dict[int, weakref.WeakSet[_Lookup]] = {}
        self._held: weakref.WeakValueDictionary[int, _EngineGrads] = (
            weakref.WeakValueDictionary()
        )
        self._hooks: list[Any] = []
        ids = {id(p) for p in params}
        owner = weakref.ref(self)
        for p, modules in _shared(model):
            if id(p) not in ids:
                continue
            self._waiting[id(p)] = weakref.WeakSet()
            for module in modules:
                looks_up = type(module) is torch.nn.Embedding
                watch = _watch_lookup if looks_up else _watch_other
                hook = _Hook(owner, p, watch)
                self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        # a hook has a strong reference to its parameter
        weakref.finalize(self, _remove, self._hooks)

    def close(self) -> None:
        """Remove the hooks."""
        _remove(self._hooks)

    def add(self, lookup: _Lookup) -> None:
        """Add a lookup of a new graph."""
        self._waiting[id(lookup.param)].add(lookup)

    def arrives(self, p: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of another use of a parameter, for the engine."""
        if not len(self._waiting.get(id(p), ())):
            return grad
        task = compat.backward_under_way()
        # detached, since a view would keep its base alive. The engine adds in place
        # only to a tensor that shares no memory
        detached = grad.detach()
        current = self._held.get(task)
        if current is None:
            current = self._held[task] = _EngineGrads()
            compat.at_end_of_backward(current.clear)
        current.grads[id(p)] = None if id(p) in current.grads else detached
        return detached

    def looked_up(self, lookup: _Lookup, rows: Tensor) -> bool:
        """Add the gradient of a lookup's rows. Return False if the engine has to."""
        current = self._held.get(compat.backward_under_way())
        grad = None if current is None else current.grads.pop(id(lookup.param), None)
        if grad is None or not compat.has_one_owner(grad):
            return False
        # The engine makes the gradients of further lookups, whose number is open. It
        # copies a gradient to which there is a reference until the end
        lookup.add_to(grad, rows)
        return True


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


class _Lookup:
    """One lookup in a graph; the graph's node has a strong reference to it."""

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
        """Run as the node's prehook. Return (None,) as its input if the rows have been
        added, so that it makes no gradient. Else return None, which changes nothing.
        """
        owner = self.owner()
        (rows,) = grads
        if owner is None or rows is None or torch.is_grad_enabled():
            return None
        if type(rows) is not Tensor or self.indices._version != self.version:
            return None
        return (None,) if owner.looked_up(self, rows) else None

    def add_to(self, grad: Tensor, rows: Tensor) -> None:
        """Do `grad += gradient of the embedding` without making that gradient."""
        rows_looked_up, row_of_index = torch.unique(self.indices, return_inverse=True)
        padding = -1
        if self.padding is not None:
            matches = (rows_looked_up == self.padding).nonzero()
            padding = int(matches) if matches.numel() else -1
        table = compat.gradient_of_lookup(
            rows, row_of_index, rows_looked_up.numel(), padding
        )
        grad.add_(0.0)  # -0 becomes 0, as where the zeros of other rows are added
        grad.index_add_(0, rows_looked_up, table)


class _Forward(NamedTuple):
    """One call of a module, with its arguments and its output."""

    module: torch.nn.Module
    args: Any
    kwargs: Any
    output: Tensor


class _Hook:
    """Hook of a module's forward; it calls `watch` if the output has a graph."""

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
        return _NoHook, ()


class _NoHook:
    """Hook in a copy of a module, which does nothing."""

    def __call__(self, *_: Any) -> None:
        return None


def _watch_lookup(owner: Lookups, param: Tensor, forward: _Forward) -> None:
    """Register a lookup on an embedding's node, if it can be added in place."""
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
        lookup = _Lookup(weakref.ref(owner), param, indices, module.padding_idx)
        node.register_prehook(lookup)
        owner.add(lookup)


def _watch_other(owner: Lookups, param: Tensor, forward: _Forward) -> None:
    """Register hooks on the nodes of the matrix's other uses, such as those of a
    head.
    """
    if param.device.type != "cpu":
        return
    for node in compat.nodes_near(forward.output.grad_fn):
        place = compat.gives_to(node, param)
        if place is not None:
            node.register_hook(_arrival(weakref.ref(owner), param, place))


def _arrival(owner_of: weakref.ref[Lookups], p: Tensor, at: int) -> Callable[..., Any]:
    """Return the hook of a node; `at` is the index of the parameter's gradient in its
    result.
    """

    def arrives(grads: tuple[Tensor | None, ...], _: Any) -> Any:
        owner, grad = owner_of(), grads[at]
        if owner is None or torch.is_grad_enabled() or type(grad) is not Tensor:
            return None
        if grad.layout != torch.strided or grad.shape != p.shape:
            return None
        new_grad = owner.arrives(p, grad)
        return None if new_grad is grad else (*grads[:at], new_grad, *grads[at + 1 :])

    return arrives


def _shared(model: torch.nn.Module) -> Iterator[tuple[Tensor, list[torch.nn.Module]]]:
    """Yield matrices that embeddings share with other modules, and these modules."""
    users: dict[int, tuple[Tensor, list[torch.nn.Module]]] = {}
    for module in model.modules():
        for p in {*module.parameters(recurse=False)}:
            users.setdefault(id(p), (p, []))[1].append(module)
    for shared, modules in users.values():
        lookups = sum(type(module) is torch.nn.Embedding for module in modules)
        if 0 < lookups < len(modules) and type(shared) is torch.nn.Parameter:
            yield shared, modules
