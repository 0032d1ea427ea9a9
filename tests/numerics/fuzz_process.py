"""What a process that runs many seeds does first."""

from __future__ import annotations

import gc

import torch
import torch._dynamo


def settle() -> None:
    """Import all that a step needs, and let Python's collector leave it alone, which
    takes a third of the time else. Dynamo writes no stack of each write into its logs.
    """
    torch.compile(torch.neg, backend="fuseopt")(torch.ones(1))
    torch._dynamo.config.side_effect_replay_policy = "silent"
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
