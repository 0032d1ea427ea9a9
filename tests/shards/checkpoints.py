"""Checkpoints: what one training saves another one reads, compiled or not, in as many
processes or in more or fewer.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from tests.shards import assert_same, difference
from tests.shards.training import OPTIMIZERS, built, compiled, train, trained

WAY = "fuseopt.compile"
HALF = 3
#: Of tensors that are whole in each process.
WHOLE = StateDictOptions(full_state_dict=True)


def checkpoint(kind: str, name: str, way: str = WAY) -> None:
    """Eager's checkpoint read by a compiled optimizer, and the other way round."""
    ends = []
    for first, second in (("", ""), ("", way), (way, "")):
        torch._dynamo.reset()
        m, early = trained(kind, name, first, steps=HALF)
        saved = copy.deepcopy(get_optimizer_state_dict(m, early))
        late = compiled(OPTIMIZERS[name](m.parameters()), second)
        set_optimizer_state_dict(m, late, saved)
        train(m, late, HALF, first=HALF)
        ends.append(late)
        again = get_optimizer_state_dict(m, late)
        assert list(again["state"]) == list(saved["state"])
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


def save(kind: str, name: str, way: str = WAY) -> None:
    """Half a training of each way: what these save is the same."""
    wholes = []
    for how in ("", way):
        torch._dynamo.reset()
        m, optimizer = trained(kind, name, how, steps=HALF)
        folder = folder_of(kind, name, dist.get_world_size(), how)
        dcp.save(state_of(m, optimizer), checkpoint_id=folder)
        wholes.append(state_of(m, optimizer, WHOLE))
        if dist.get_rank() == 0:
            torch.save(wholes[-1], f"{folder}.pt")
    assert not difference(wholes[1], wholes[0])


def load(kind: str, name: str, world: str, way: str = WAY) -> None:
    """The other half, after so many processes have saved the first one.

    From a checkpoint or from a file with whole tensors, made by either way and read by
    either: all end the same, and as if nothing had come between.
    """
    ends: dict[bool, list[Optimizer]] = {False: [], True: []}
    if int(world) == dist.get_world_size():
        ends[False].append(trained(kind, name, "", steps=2 * HALF)[1])
    for by, how, plain in product(("", way), ("", way), ends):
        torch._dynamo.reset()
        folder = folder_of(kind, name, int(world), by)
        whole = torch.load(f"{folder}.pt")
        m = built(kind)
        optimizer = compiled(OPTIMIZERS[name](m.parameters()), how)
        if plain:
            read, options = copy.deepcopy(whole), WHOLE
        else:
            read, options = state_of(m, optimizer), StateDictOptions()
            dcp.load(read, checkpoint_id=folder)
        set_state_dict(
            m,
            optimizer,
            model_state_dict=read["model"],
            optim_state_dict=read["optimizer"],
            options=options,
        )
        held = state_of(m, optimizer, WHOLE)
        assert not difference(held["model"], whole["model"])
        assert not difference(held["optimizer"]["state"], whole["optimizer"]["state"])
        train(m, optimizer, HALF, first=HALF)
        ends[plain].append(optimizer)
    for same in ends.values():
        for end in same[1:]:
            assert_same(end, same[0])
    # of a tuple in a group, torch makes a list where tensors are whole
    some, others = (o[0].param_groups[0]["params"] for o in ends.values())
    assert not difference(some, others)


def state_of(
    m: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(m, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer}


def folder_of(kind: str, name: str, world: int, way: str) -> str:
    return f"{kind}-{name}-{world}-{way or 'eager'}"
