"""Results of ATen calls on tensors without contents: tensors of the right layouts.

The same call on meta tensors gives the layouts. It runs once for all calls with equal
arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import compat
from ..capture.aten.externs import tensors_in
from ..inputs.keys import LanesDiffer
from ..shadow.double import Scratch


class HollowResults:
    """Makes results of calls in `scratch`, memory that is never read."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self._layouts: dict[Any, Any] = {}

    def of(self, func: Any, args: Any, kwargs: Any, bound: Any) -> Any:
        """Return the results of a call that writes none of its arguments.

        `bound`: the arguments by name. Raises LanesDiffer for a call that meta tensors
        do not support.
        """
        key = (func, self._layout(args), self._layout(kwargs))
        layouts = self._layouts.get(key)
        if layouts is None:
            metas = compat.tree_map(
                lambda x: (
                    torch.empty_strided(
                        x.shape, x.stride(), dtype=x.dtype, device="meta"
                    )
                    if isinstance(x, torch.Tensor)
                    else x
                ),
                (args, kwargs),
            )
            devices = [t.device for x in bound.values() for t in tensors_in(x)]
            device = devices[0] if devices else torch.get_default_device()
            if "device" in bound or not devices:
                device = torch.device(bound.get("device") or device)
                metas[1]["device"] = torch.device("meta")
            try:
                result = func(*metas[0], **metas[1])
            except (NotImplementedError, RuntimeError) as error:
                raise LanesDiffer(f"{func} depends on tensor data") from error
            layouts = self._layouts[key] = compat.tree_map(
                lambda t: (
                    (t.shape, t.stride(), t.dtype, device)
                    if isinstance(t, torch.Tensor)
                    else LanesDiffer
                ),
                result,
                is_leaf=lambda t: isinstance(t, torch.Tensor),
            )
        return self._build(layouts)

    def _build(self, layouts: Any) -> Any:
        if layouts is LanesDiffer:
            raise LanesDiffer("a call returns an object that is not a tensor")
        if isinstance(layouts, list):
            return [self._build(x) for x in layouts]
        if isinstance(layouts, tuple) and not isinstance(layouts[0], torch.Size):
            return tuple(self._build(x) for x in layouts)
        return self.scratch.make(*layouts)

    def _layout(self, x: Any) -> Any:
        """Return a key of the parts of an argument that decide layouts of results."""
        if isinstance(x, torch.Tensor):
            return x.shape, x.stride(), x.dtype, x.device
        if isinstance(x, (list, tuple)):
            return tuple([self._layout(y) for y in x])
        if isinstance(x, dict):
            return tuple([(k, self._layout(v)) for k, v in x.items()])
        return float if isinstance(x, float) else (type(x), repr(x))
