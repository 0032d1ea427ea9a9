"""Numbers that training is watched by: a row for each parameter, in one tensor.

Measured while a tail goes over the memory anyway; traced, and in eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Tensors = list[torch.Tensor]

#: Of the gradient as the optimizer would see it without a clip: its 2-norm. Of the
#: parameter after the step, and of what the step has changed it by: theirs. How many
#: elements of that gradient are infinite or NaN.
COLUMNS = ("grad_norm", "param_norm", "update_norm", "nonfinite")


class Begun(NamedTuple):
    """What is known before the step: norms and counts of gradients, in the order of
    the parameters that have one, and all parameters as they were.
    """

    norms: Tensors
    counts: Tensors
    were: Tensors


def begin(params: Tensors, grads: Tensors) -> Begun:
    """Measure gradients, each before it is clipped, and keep what parameters are."""
    counts = [torch.logical_not(torch.isfinite(g)).sum() for g in grads]
    return Begun(norms_of(grads), counts, [p.clone() for p in params])


def table(params: Tensors, held: Sequence[bool], begun: Begun) -> torch.Tensor:
    """The rows of all parameters, in float32; `held`: which of them have a gradient.
    Without one its norm and its count are 0.
    """
    device = params[0].device
    sizes = norms_of(params)
    changes = norms_of([*torch._foreach_sub(params, begun.were)])
    norms, counts = iter(begun.norms), iter(begun.counts)
    cells: Tensors = []
    for has, size, change in zip(held, sizes, changes, strict=True):
        none = None if has else torch.zeros((), device=device)
        norm = next(norms) if none is None else none
        count = next(counts) if none is None else none
        cells += [norm, size, change, count]
    numbers = [x.to(device, torch.float32) for x in cells]
    return torch.stack(numbers).view(len(params), len(COLUMNS))


def norms_of(tensors: Tensors) -> Tensors:
    """The 2-norm of each; 0 of one without elements, for which there is no kernel."""
    filled = [t for t in tensors if t.numel()]
    found = iter(torch._foreach_norm(filled) if filled else ())
    return [next(found) if t.numel() else t.new_zeros(()) for t in tensors]


def row_names(names: Any, params: Sequence[torch.Tensor]) -> list[str]:
    """The names of parameters: those of a module that holds them, or one for each in a
    list; their place where there is none.
    """
    if isinstance(names, torch.nn.Module):
        known = {id(p): name for name, p in names.named_parameters()}
        return [known.get(id(p), str(k)) for k, p in enumerate(params)]
    given = [*(names or ())]
    return [*given, *map(str, range(len(given), len(params)))][: len(params)]
