"""TorchRL: a learner in a CUDA graph, `CapturedLearner(update, optimizers=[...])`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tensordict.nn import CudaGraphModule
from torch.optim import Optimizer

from ..errors import ConfigError
from ..isolate.compile import compile
from ..isolate.refresh import refresh


class CapturedLearner(CudaGraphModule):  # type: ignore[misc]
    """Capture an update that steps `optimizers`, and compile their steps.

    It takes the arguments of tensordict's `CudaGraphModule`. The graph reads rates and
    counters as they are at each call, so a schedule goes on, and AdamW needs no
    `capturable=True`. An update steps each optimizer once, and leaves the gradients
    where they are: `zero_grad` comes before its backward. Without CUDA an update runs
    as it is, with compiled steps. `options`: of `fuseopt.compile`.

    Raises ConfigError for `warmup=1`: the first call makes the state. A call raises
    LaunchError, before anything runs, where `fuseopt.refresh` does. Another learner
    then captures again. Counters count a call whose arguments tensordict refuses.
    """

    def __init__(
        self,
        module: Any,
        warmup: int = 2,
        *args: Any,
        optimizers: Iterable[Optimizer],
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if warmup == 1:
            raise ConfigError(
                "CapturedLearner cannot capture the first call (warmup=1), which makes "
                "the state of the optimizers. Pass warmup=2 or more"
            )
        super().__init__(module, warmup, *args, **kwargs)
        self.optimizers = [compile(x, **(options or {})) for x in optimizers]
        self._uncaptured = warmup - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One update, as of `CudaGraphModule`."""
        if self.counter >= self._uncaptured:
            captures = self.counter == self._uncaptured  # else it replays
            for optimizer in self.optimizers:
                refresh(optimizer, anew=captures)
        return super().__call__(*args, **kwargs)
