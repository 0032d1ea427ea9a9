"""What a call of ATen returns whose operands have no contents: tensors without any.

Their layouts are those that the call has for meta tensors, asked once for all calls
that are given the same.
"""

from __future__ import annotations

from typing import Any

import torch

from ..capture.aten.externs import tensors_in
from ..shadow.double import Scratch
from ..shadow.lanes import Unlike


class HollowResults:
    """Results of calls, made in `scratch`, which holds memory for tensors of no use."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self._layouts: dict[Any, Any] = {}

    def of(self, func: Any, args: Any, kwargs: Any, bound: Any) -> Any:
        """What a call that changes nothing returns; `bound`: its arguments, by name."""
        key = (func, self._layout(args), self._layout(kwargs))
        made = self._layouts.get(key)
        if made is None:
            metas = torch.utils._pytree.tree_map(
                lambda x: (
                    torch.empty_strided(
                        x.shape, x.stride(), dtype=x.dtype, device="meta"
                    )
                    if isinstance(x, torch.Tensor)
                    else x
                ),
                (args, kwargs),
            )
            found = [t.device for x in bound.values() for t in tensors_in(x)]
            device = found[0] if found else torch.get_default_device()
            if "device" in bound or not found:
                device = torch.device(bound.get("device") or device)
                metas[1]["device"] = torch.device("meta")
            try:
                result = func(*metas[0], **metas[1])
            except (NotImplementedError, RuntimeError) as error:
                raise Unlike(f"{func} depends on contents of tensors") from error
            made = self._layouts[key] = torch.utils._pytree.tree_map(
                lambda t: (
                    (t.shape, t.stride(), t.dtype, device)
                    if isinstance(t, torch.Tensor)
                    else Unlike
                ),
                result,
                is_leaf=lambda t: isinstance(t, torch.Tensor),
            )
        return self._build(made)

    def _build(self, made: Any) -> Any:
        if made is Unlike:
            raise Unlike("a call returns what is no tensor")
        if isinstance(made, list):
            return [self._build(x) for x in made]
        if isinstance(made, tuple) and not isinstance(made[0], torch.Size):
            return tuple(self._build(x) for x in made)
        return self.scratch.make(*made)

    def _layout(self, x: Any) -> Any:
        """What results depend on of what a call is given."""
        if isinstance(x, torch.Tensor):
            return x.shape, x.stride(), x.dtype, x.device
        if isinstance(x, (list, tuple)):
            return tuple([self._layout(y) for y in x])
        if isinstance(x, dict):
            return tuple([(k, self._layout(v)) for k, v in x.items()])
        return float if isinstance(x, float) else (type(x), repr(x))
