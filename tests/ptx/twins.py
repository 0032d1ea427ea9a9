"""An optimizer in eager, and the same on "sim" with the kernels of a GPU, through what
happens to gradients and rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuseopt.runtime.triton.registry import DEVICES

from ..simulated.kernels import SIM
from ..simulated.twins import Make, SimTwins
from ..steps import same_bits, turned
from .kernels import Log

#: 0-d, odd, lanes that share programs, groups with and without a rest, several chunks.
SHAPES = ((17, 5), (9,), (), (128,), (129,), (700,), (2048,), (33, 130))
#: The same with a lane of several programs and a rest.
MANY = (*SHAPES, (5000,), (1,), (31,), (6, 8, 16), (2047,), (4096,), (0, 3))
#: What happens before a step: gradients stay where they are, lie at new addresses, at
#: addresses that are no multiple of 16, or some are not there; another rate. Beside
#: these, `strided`: transposed ones.
COURSE = ("moved", "stay", "odd", "missing", "rate", "stay", "moved")


class PtxTwins(SimTwins):
    """See SimTwins. `run` goes through a course; it returns what differs, with the
    step.
    """

    def prepare(self, event: str) -> None:
        """Gradients of the next step."""
        self.set_grads(event == "stay")
        if event == "rate":
            for optimizer in (self.eager, self.optimizer):
                for group in optimizer.param_groups:
                    if isinstance(group["lr"], Tensor):
                        group["lr"].mul_(0.5)
                    else:
                        group["lr"] *= 0.5
        for i, (p, q) in enumerate(zip(self.eager_params, self.params, strict=True)):
            if event == "missing" and i % 3 == 1:
                p.grad = q.grad = None
            elif event == "odd" and i % 2 == 0:
                assert q.grad is not None
                base = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)
                base[1:].copy_(q.grad.flatten())
                q.grad = base[1:].view(q.shape)
            elif event == "strided" and q.dim() > 1:
                assert q.grad is not None
                q.grad = turned(q.grad)

    def run(self, course: Sequence[str] = COURSE) -> list[str]:
        """What differs from eager, in which step."""
        sim: Any = torch.get_device_module("sim")
        found = []
        for k, event in enumerate(course):
            self.prepare(event)
            self.step_eager()
            self.optimizer.step()
            sim.synchronize()
            found += [f"step {k} ({event}): {x}" for x in self.differences()]
        return found


def beside_the_interpreter(
    log: Log, make: Make, course: Sequence[str] = COURSE, **options: Any
) -> list[str]:
    """What differs from the same in Triton's interpreter, after all steps.

    For dtypes in which a CPU's eager rounds the ends of its loops in another way.
    """
    twins = PtxTwins(make, **options)
    twins.run(course)
    entry = DEVICES["sim"]
    DEVICES["sim"] = SIM
    try:
        torch._dynamo.reset()
        other = PtxTwins(make, **options)
        other.run(course)
    finally:
        DEVICES["sim"] = entry
    found = []
    for i, (p, q) in enumerate(zip(twins.params, other.params, strict=True)):
        mine = {"parameter": p, **twins.optimizer.state[p]}
        theirs = {"parameter": q, **other.optimizer.state[q]}
        assert mine.keys() == theirs.keys()
        found += [
            f"{key} of {i}"
            for key, value in mine.items()
            if isinstance(value, Tensor)
            and not same_bits(value.detach().cpu(), theirs[key].detach().cpu())
        ]
    return found
