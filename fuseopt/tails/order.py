"""Parameters as `clip_grad_norm_` would be given them -> the order of a total norm.

A sum in another order has other last bits: torch's function adds norms up in the order
of what it is given, as a rule that of the model, and groups may have another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import compat
from ..shadow.lanes import Unlike


class ClipOrder:
    """The parameters that a total norm is over, in order. None: as the groups have
    them.
    """

    def __init__(self, given: torch.nn.Module | Iterable[torch.Tensor] | None) -> None:
        if isinstance(given, torch.nn.Module):
            given = given.parameters()
        self.params = None if given is None else [*given]
        for p in self.params or ():
            if not isinstance(p, torch.Tensor):
                raise TypeError(
                    f"clip_parameters has a {type(p).__name__} among the parameters"
                )
        self._place = {id(p): k for k, p in enumerate(self.params or ())}
        if len(self._place) < len(self.params or ()):
            raise ValueError("clip_parameters has a parameter twice")

    def strangers(self, params: Sequence[Any]) -> list[Any]:
        """Those that an optimizer does not have; they have no gradients."""
        own = {*map(id, params)}
        return [p for p in self.params or () if id(p) not in own]

    def places(self, params: Sequence[Any]) -> list[int]:
        """Of those of an optimizer's parameters that have gradients, their places in
        the order of the norm; [] where that is their own order.

        Raises ValueError unless both are the same parameters.
        """
        if self.params is None:
            return []
        having = [p for p in params if p.grad is not None]
        for p in having:
            if id(p) not in self._place:
                raise ValueError(
                    f"a parameter of shape {[*p.shape]} is not in clip_parameters"
                )
        if sum(p.grad is not None for p in self.params) > len(having):
            raise ValueError(
                "clip_parameters has a parameter with a gradient that no optimizer of "
                "the tail steps"
            )
        ranks = [self._place[id(p)] for p in having]
        found = sorted(range(len(ranks)), key=ranks.__getitem__)
        return [] if found == [*range(len(found))] else found


def dtypes_in_order(grads: Sequence[Any], places: Sequence[int]) -> list[torch.dtype]:
    """The dtypes of gradients in which their norms are added up, [] of one.

    Raises Unlike where one graph cannot have these gradients.
    """
    if len({g.device for g in grads}) > 1:
        raise Unlike("gradients lie on several devices")
    order = compat.dtypes_in_order(arranged(grads, places))
    if order is None:
        raise Unlike("nobody knows in which order torch goes over dtypes")
    return order


def arranged(tensors: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Tensors in another order."""
    return [tensors[k] for k in places] if places else [*tensors]
