"""Measure statistics of each parameter and its gradient, as rows of one tensor.

The measurement uses memory that a tail reads for the step too; traced, and in eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Tensors = list[torch.Tensor]

#: 2-norms of the gradient (divided and unscaled, before the clip), of the parameter
#: after the step, and of its change by the step. Then the number of elements of that
#: gradient that are infinite or NaN.
COLUMNS = ("grad_norm", "param_norm", "update_norm", "nonfinite")


class StatsBefore(NamedTuple):
    """Measurements before the step. `norms` and `counts` are of gradients, in the order
    of the parameters that have one. `were` has copies of all parameters.
    """

    norms: Tensors
    counts: Tensors
    were: Tensors


def begin(params: Tensors, grads: Tensors) -> StatsBefore:
    """Measure gradients before they are clipped, and copy the parameters."""
    counts = [torch.logical_not(torch.isfinite(g)).sum() for g in grads]
    return StatsBefore(norms_of(grads), counts, [p.clone() for p in params])


def table(
    params: Tensors, have_grads: Sequence[bool], before: StatsBefore
) -> torch.Tensor:
    """Return a float32 tensor (parameters, len(COLUMNS)). `have_grads` is true for
    parameters with a gradient. Without one, its norm and count are 0.
    """
    device = params[0].device
    sizes = norms_of(params)
    changes = norms_of([*torch._foreach_sub(params, before.were)])
    norms, counts = iter(before.norms), iter(before.counts)
    cells: Tensors = []
    for has_grad, size, change in zip(have_grads, sizes, changes, strict=True):
        zero = None if has_grad else torch.zeros((), device=device)
        norm = next(norms) if zero is None else zero
        count = next(counts) if zero is None else zero
        cells += [norm, size, change, count]
    numbers = [x.to(device, torch.float32) for x in cells]
    return torch.stack(numbers).view(len(params), len(COLUMNS))


def norms_of(tensors: Tensors) -> Tensors:
    """Return the 2-norm of each tensor; 0 without elements, for lack of a kernel."""
    filled = [t for t in tensors if t.numel()]
    norms = iter(torch._foreach_norm(filled) if filled else ())
    return [next(norms) if t.numel() else t.new_zeros(()) for t in tensors]


def row_names(names: Any, params: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of parameters. `names` is a module that has them, or a list in
    their order; parameters without a name get their index.
    """
    if isinstance(names, torch.nn.Module):
        name_of = {id(p): name for name, p in names.named_parameters()}
        return [name_of.get(id(p), str(k)) for k, p in enumerate(params)]
    names_in_order = [*(names or ())]
    return [*names_in_order, *map(str, range(len(names_in_order), len(params)))][
        : len(params)
    ]
