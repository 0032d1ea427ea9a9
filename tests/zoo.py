"""Any optimizer in eager and compiled, side by side, compared bit for bit.

`Pair` knows nothing of an optimizer but its class: state may hold tensors, numbers, and
lists or dicts of them, to any depth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt

from .steps import make_params, same_bits, set_grads

#: One parameter for each way to be awkward: matrix, odd vector, 0-d, several dims.
SHAPES = ((17, 5), (9,), (), (4, 3, 2, 2), (12, 8))
Make = Callable[..., Optimizer]


def leaves(x: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors and numbers of some state, with where they were found."""
    if isinstance(x, Tensor):
        yield path, x.detach()
    elif isinstance(x, (int, float)):
        yield path, torch.tensor(float(x), dtype=torch.float64)
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            yield from leaves(value, f"{path}.{i}")


def ulps(got: Tensor, want: Tensor) -> float:
    """The largest difference, in ulp of the largest element; infinite if of a kind."""
    if same_bits(got, want):
        return 0.0
    if got.dtype != want.dtype or got.shape != want.shape or got.isnan().any():
        return float("inf")
    distance = (got.double() - want.double()).abs().max()
    unit = want.double().abs().max() * torch.finfo(want.dtype).eps
    return float(distance / unit)


class Pair:
    """`make(groups)` twice: once in eager, once with a compiled step.

    The parameters are in two groups; `second` are the options of the second. `options`
    are those of the backend.
    """

    def __init__(
        self,
        make: Make,
        second: dict[str, Any] | None = None,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.make = make
        self.second = second or {}
        self.backend_options = options
        self.eager_params = make_params(shapes, dtype)
        self.params = make_params(shapes, dtype)
        self.eager = self._build(self.eager_params)
        self._compile(self._build(self.params))
        self.steps = 0

    def _build(self, params: list[Any]) -> Optimizer:
        cut = max(1, len(params) // 2)
        groups = [{"params": params[:cut]}, {"params": params[cut:], **self.second}]
        optimizer = self.make([g for g in groups if g["params"]])
        train = getattr(optimizer, "train", None)
        if callable(train):
            train()
        return optimizer

    def _compile(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        # apart from others of its class: Dynamo compiles one function only so often
        self.run = fuseopt.compile(optimizer, **self.backend_options).step

    def step(self, n: int = 1) -> None:
        """Do n steps on both, with fresh gradients and the same random numbers."""
        for _ in range(n):
            self.steps += 1
            set_grads(self.eager_params, self.params, self.steps)
            torch.manual_seed(self.steps)
            self.eager.step()
            torch.manual_seed(self.steps)
            self.run()

    def step_eager(self) -> None:
        """One step of the eager one alone: does it take these parameters at all?"""
        set_grads(self.eager_params, self.params, 0)
        self.eager.step()

    def scale_lr(self, factor: float) -> None:
        """Change every group's learning rate by hand, as a schedule would."""
        for optimizer in (self.eager, self.optimizer):
            for group in optimizer.param_groups:
                if group.get("lr") is not None:
                    group["lr"] *= factor

    def reload(self) -> None:
        """Carry both states over into new optimizers, through copies."""
        saved = copy.deepcopy(self.eager.state_dict())
        mine = copy.deepcopy(self.optimizer.state_dict())
        self.eager = self._build(self.eager_params)
        self.eager.load_state_dict(saved)
        self._compile(self._build(self.params))
        self.optimizer.load_state_dict(mine)

    def differences(self) -> dict[str, float]:
        """What differs, and by how many ulp."""
        found: dict[str, float] = {}

        def compare(name: str, mine: Any, theirs: Any) -> None:
            got, want = dict(leaves(mine)), dict(leaves(theirs))
            if got.keys() != want.keys():
                found[f"{name}: {sorted(got.keys() ^ want.keys())}"] = float("inf")
                return
            for path, value in want.items():
                distance = ulps(got[path], value)
                if distance:
                    found[f"{name}{path}"] = distance

        for i, (p, q) in enumerate(zip(self.eager_params, self.params, strict=True)):
            compare(f"parameter {i}", q.detach(), p.detach())
            compare(f"state {i}", self.optimizer.state.get(q), self.eager.state.get(p))
        for mine, theirs in zip(
            self.optimizer.param_groups, self.eager.param_groups, strict=True
        ):
            # Dynamo adds a key of its own to the groups that it traces
            keys = theirs.keys() - {"params"}
            compare("group", *({k: g.get(k) for k in keys} for g in (mine, theirs)))
        return found

    @property
    def graphs(self) -> int:
        return len(fuseopt.reports())


def race(pair: Pair, bound: float = 0.0) -> None:
    """Eight steps with changes of the lr and a state_dict carried over.

    Nothing may differ by more than `bound` ulp, and the last steps compile nothing.
    """
    for change in (None, None, 0.5, 0.9, "reload", None, None, 0.7, None):
        pair.step()
        worst = pair.differences()
        assert all(x <= bound for x in worst.values()), f"step {pair.steps}: {worst}"
        if change == "reload":
            pair.reload()
        elif isinstance(change, float):
            known = pair.graphs
            pair.scale_lr(change)
    assert pair.graphs, "nothing was compiled"
    assert pair.graphs == known, "a changed learning rate was compiled anew"
