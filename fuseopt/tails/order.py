"""Order in which the total norm of a tail is added up.

A sum in a different order has different last bits. torch's function adds norms up in
the order of its argument, mostly that of the model. The order of groups may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import compat
from ..inputs.keys import LanesDiffer
from .arguments import entries_of


class ClipOrder:
    """Parameters of a total norm, in order. None: in the order of the groups. Raises
    TypeError, ValueError.
    """

    def __init__(self, params: torch.nn.Module | Iterable[torch.Tensor] | None) -> None:
        if isinstance(params, torch.nn.Module):
            params = params.parameters()
        #: the user's list, if one was given
        self.lists = [] if params is None else [entries_of(params)]
        self.follow()

    def follow(self) -> None:
        """Copy the user's list again. Raises TypeError, ValueError."""
        self.params = [*self.lists[0]] if self.lists else None
        for p in self.params or ():
            if not isinstance(p, torch.Tensor):
                raise TypeError(
                    f"clip_parameters has a {type(p).__name__} among the parameters"
                )
        self._place = {id(p): k for k, p in enumerate(self.params or ())}
        if len(self._place) < len(self.params or ()):
            raise ValueError("clip_parameters has a parameter twice")

    def strangers(self, params: Sequence[Any]) -> list[Any]:
        """Return the parameters that no optimizer has; they must not have gradients."""
        ids = {*map(id, params)}
        return [p for p in self.params or () if id(p) not in ids]

    def places(self, params: Sequence[Any]) -> list[int]:
        """Return the indices of the gradients of `params` in the order of the norm, or
        [] if that is their own order.

        Raises ValueError if other parameters have gradients.
        """
        if self.params is None:
            return []
        params_with_grad = [p for p in params if p.grad is not None]
        for p in params_with_grad:
            if id(p) not in self._place:
                raise ValueError(
                    f"a parameter of shape {[*p.shape]} is not in clip_parameters"
                )
        if sum(p.grad is not None for p in self.params) > len(params_with_grad):
            raise ValueError(
                "clip_parameters has a parameter with a gradient that no optimizer of "
                "the tail steps"
            )
        ranks = [self._place[id(p)] for p in params_with_grad]
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        return [] if order == [*range(len(order))] else order


def dtypes_in_order(grads: Sequence[Any], places: Sequence[int]) -> list[torch.dtype]:
    """Return the dtypes of gradients in the order in which norms are added up, [] for
    one dtype. Raises LanesDiffer if one graph cannot have these gradients.
    """
    if len({g.device for g in grads}) > 1:
        raise LanesDiffer("gradients are on several devices")
    order = compat.dtypes_in_order(arranged(grads, places))
    if order is None:
        raise LanesDiffer("the order in which torch adds up dtypes is unknown")
    return order


def arranged(tensors: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Return tensors in the order of `places`; in their own order if it is empty."""
    return [tensors[k] for k in places] if places else [*tensors]
