"""Columns beside the lanes of a led tail: averages, copies, and shared inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch

from ..inputs.keys import LanesDiffer
from ..replicate.tail_arguments import TailArguments
from .totals_graph import Factors

Tensors = list[torch.Tensor]


def columns_of(tail_inputs: Mapping[str, Any], params: Tensors) -> list[Tensors]:
    """Return the columns of averages and copies, each with a tensor for each parameter.
    Raises LanesDiffer if they are not of all parameters in their order.
    """
    columns = []
    for averages, source in (*tail_inputs["averages"], *tail_inputs["copies"]):
        if len(source) != len(params) or not all(map(is_, source, params)):
            raise LanesDiffer("an average does not cover all parameters in their order")
        columns.append(averages)
    return columns


def dtypes_beside(
    params: Tensors, columns: Sequence[Tensors]
) -> list[Mapping[torch.dtype, torch.dtype]]:
    """Return for each column its dtype for each dtype of parameters. Raises LanesDiffer
    if there is more than one.
    """
    dtypes_of_columns: list[Mapping[torch.dtype, torch.dtype]] = []
    for column in columns:
        pairs = {(p.dtype, t.dtype) for p, t in zip(params, column, strict=True)}
        dtypes = dict(pairs)
        if len(dtypes) < len(pairs):
            raise LanesDiffer("averages of parameters of one dtype have several dtypes")
        dtypes_of_columns.append(dtypes)
    return dtypes_of_columns


class LastArguments:
    """Arguments of the last step: the next one gets the same object while they are the
    same, so that it may repeat the last one.
    """

    def __init__(self) -> None:
        self._last = TailArguments()

    def of(
        self,
        columns: Sequence[Tensors],
        shared: Sequence[Any],
        flag: torch.Tensor | None = None,
    ) -> TailArguments:
        """Return the arguments of a step; see `TailArguments`."""
        last = self._last
        same = (
            flag is last.flag
            and len(columns) == len(last.columns)
            and len(shared) == len(last.shared)
            and all(map(_same, shared, last.shared))
            and all(map(_same_column, columns, last.columns))
        )
        if not same:
            self._last = TailArguments(columns, shared, flag)
        return self._last


def _same(x: Any, y: Any) -> bool:
    """Are both one object, or floats of one value other than zero?"""
    return x is y or (type(x) is type(y) is float and x == y != 0)


def _same_column(x: Tensors, y: Tensors) -> bool:
    return x is y or (len(x) == len(y) and all(map(is_, x, y)))


def shared_of(
    tail_inputs: Mapping[str, Any], factors: Factors, device: torch.device
) -> list[Any]:
    """Return the arguments that all lanes share, in the order of `TailPlan`."""
    shared = [tail_inputs["divisor"], factors.unscales, factors.clips]
    limit = tail_inputs["max_value"]
    if limit is not None:
        shared += [limit] if isinstance(limit, torch.Tensor) else [limit, -limit]
    shared += tail_inputs["adaptive"] or ()
    shared += [
        decay if isinstance(decay, torch.Tensor) else 1 - decay
        for decay in tail_inputs["decays"]
    ]
    shared += [x.number.to(device) for x in tail_inputs["models"]]
    return [x for x in (*shared, factors.skip) if x is not None]
