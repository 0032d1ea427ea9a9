"""Compare two optimizers bit for bit: parameters, state, and options of groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: An integer type as wide as each type of floating point.
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class Difference:
    """One difference between two optimizers.

    `where`: such as "parameter 3", or "exp_avg of parameter 3". `elements`: the number
    of elements that differ; 0 if the value is no tensor. `ulp`: the largest distance,
    as a number of representable steps; None if there is no distance, as between a
    number and NaN. `what`: both values as text, if they are no tensors or have
    different shapes.
    """

    where: str
    elements: int = 0
    ulp: int | None = None
    what: str = ""

    def __str__(self) -> str:
        if self.what:
            return f"{self.where}: {self.what}"
        far = "no distance" if self.ulp is None else f"{self.ulp:,} ulp at most"
        plural = "s" if self.elements > 1 else ""
        return f"{self.where}: {self.elements:,} element{plural}, {far}"


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def differences(want: Optimizer, got: Optimizer) -> list[Difference]:
    """Return all differences between two optimizers.

    Options of groups are compared only if `want` has them, since Dynamo adds its own
    key to the groups that it traces.
    """
    found: list[Difference] = []
    pairs = zip(parameters(want), parameters(got), strict=True)
    for i, (p, q) in enumerate(pairs):
        found += _compared(f"parameter {i}", p.detach(), q.detach())
        states = want.state.get(p, {}), got.state.get(q, {})
        found += _compared("", *states, f" of parameter {i}")
    groups = zip(want.param_groups, got.param_groups, strict=True)
    for i, (mine, theirs) in enumerate(groups):
        for name in mine.keys() - {"params"}:
            place = f"{name} of group {i}"
            if name not in theirs:
                found.append(Difference(place, what="is missing"))
            else:
                found += _compared(place, mine[name], theirs[name])
    return found


def _compared(
    where: str, want: Any, got: Any, behind: str = ""
) -> Iterator[Difference]:
    """Yield the differences between two values: tensors, numbers, or containers of
    these.
    """
    place = where + behind
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        yield from _tensors(place, want.detach(), got.detach())
    elif isinstance(want, dict) and isinstance(got, dict):
        if want.keys() != got.keys():
            text = f"keys {sorted(map(str, want))} and {sorted(map(str, got))}"
            yield Difference(place.strip(), what=text)
            return
        for key, value in want.items():
            inner = f"{where}.{key}" if where else str(key)
            yield from _compared(inner, value, got[key], behind)
    elif isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        if len(want) != len(got):
            yield Difference(place, what=f"{len(want)} and {len(got)} items")
            return
        for i, (mine, theirs) in enumerate(zip(want, got, strict=True)):
            yield from _compared(f"{where}.{i}", mine, theirs, behind)
    elif isinstance(want, Tensor) or isinstance(got, Tensor):
        kinds = type(want).__name__, type(got).__name__
        yield Difference(place, what=f"a {kinds[0]} and a {kinds[1]}")
    elif isinstance(want, (bool, int, float, str, type(None))):
        same = type(want) is type(got) and (want == got or want is got)
        both_nan = want != want and got != got
        if not same and not both_nan:
            yield Difference(place, what=f"{want!r} and {got!r}")


def _tensors(where: str, want: Tensor, got: Tensor) -> Iterator[Difference]:
    if (want.dtype, want.shape, want.device) != (got.dtype, got.shape, got.device):
        kinds = [f"{t.dtype} {tuple(t.shape)} {t.device}" for t in (want, got)]
        yield Difference(where, what=" and ".join(kinds))
        return
    if want.layout != torch.strided:
        want, got = want.to_dense(), got.to_dense()
    if want.is_complex():
        want, got = torch.view_as_real(want), torch.view_as_real(got)
    if not want.is_floating_point():
        elements = int((want != got).sum())
        if elements:
            yield Difference(where, elements)
        return
    nan = want.isnan() & got.isnan()
    mine, theirs = _ordered(want), _ordered(got)
    differ = (mine != theirs) & ~nan
    # 0.0 and -0.0 have the same place in the order, but different bits
    zeros = (want == 0) & (got == 0) & (want.signbit() != got.signbit())
    elements = int((differ | zeros).sum())
    if elements:
        yield Difference(where, elements, _distance(mine, theirs, want, got, differ))


def _distance(
    mine: Tensor, theirs: Tensor, want: Tensor, got: Tensor, differ: Tensor
) -> int | None:
    if bool(((want.isnan() | got.isnan()) & differ).any()):
        return None
    if not bool(differ.any()):
        return 0
    # as Python integers: the distance of two int64 may need 65 bits
    pairs = zip(mine[differ].tolist(), theirs[differ].tolist(), strict=True)
    distances: list[int] = [abs(x - y) for x, y in pairs]
    return max(distances)


def _ordered(t: Tensor) -> Tensor:
    """Map floats to integers with the same order; neighbouring floats differ by one."""
    kind = BITS[t.element_size()]
    bits = t.contiguous().view(kind)
    least = torch.iinfo(kind).min
    return torch.where(bits < 0, least - bits, bits)


def nudge(t: Tensor) -> None:
    """Move each element of a tensor by one ulp, away from zero."""
    with torch.no_grad():
        if t.is_complex():
            t = torch.view_as_real(t)
        bits = t.contiguous().view(BITS[t.element_size()])
        t.copy_((bits + 1).view(t.dtype))
