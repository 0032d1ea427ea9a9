"""What the processes of a group do: `python -m tests.shards.processes CASES RANK WORLD
FILE` runs some cases, one after another, and prints "done".

Most train a model of their users' kind with the plain optimizer, and again with the
compiled one, and compare all bits of parameters and state.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fuseopt
from tests.shards import assert_same
from tests.shards.between import between
from tests.shards.checkpoints import checkpoint, load, save
from tests.shards.failures import (
    eager_elsewhere,
    no_gradients_here,
    raises_elsewhere,
    torchs_clip_elsewhere,
)
from tests.shards.gloo import wait_for_workers
from tests.shards.groups import clipped, spread, spread_refused, wrong
from tests.shards.groups import tailed as tailed_over_groups
from tests.shards.models import PLAIN, data_parallel, model
from tests.shards.training import OF_WHOLES, OPTIMIZERS, built, train, trained


def case(kind: str, name: str, way: str = "fuseopt.compile", clip: str = "") -> None:
    """One kind of model, one optimizer; `clip`: "torch" or "fuseopt"."""
    torch._dynamo.reset()
    plain = nn.utils.clip_grad_norm_
    clips = {"": None, "torch": plain, "fuseopt": fuseopt.clip_grad_norm_}
    if name == "Adafactor" and kind not in PLAIN:
        said = [refused(kind, name, how) for how in ("", way)]
        assert said[0] == said[1]
        return
    _, want = trained(kind, name, "", plain if clip else None)
    first = len(fuseopt.reports())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, got = trained(kind, name, way, clips[clip])
    assert_same(got, want)
    texts = [str(w.message) for w in told if "fuseopt" in str(w.message)]
    reports = fuseopt.reports()[first:]
    of_clips = [r for r in reports if "all_reduce" in str(r.externs) and not r.traced]
    steps = [r for r in reports if r not in of_clips]
    assert bool(of_clips) == (clip == "fuseopt"), [str(r) for r in reports]
    assert len(of_clips) <= 1, [str(r) for r in of_clips]
    assert all(r.launches <= 3 and not r.fallback for r in of_clips)
    assert not texts, texts
    assert not any(r.fallback for r in steps), [str(r) for r in steps]
    if name not in OF_WHOLES:
        assert {r.launches for r in steps} == {1}, [str(r) for r in steps]


def refused(kind: str, name: str, way: str) -> str:
    """What torch says of a step that it does not do to DTensors; all processes raise
    it, and before the first collective.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(RuntimeError, match="placement") as raised:
            trained(kind, name, way)
    return str(raised.value).splitlines()[0]


def zero_redundancy(
    kind: str, name: str, way: str = "fuseopt.compile", clip: str = ""
) -> None:
    """`ZeroRedundancyOptimizer` steps an optimizer of its own, which is compiled."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ends: list[Any] = []
    for compiled in (False, True):
        m = data_parallel(model())
        made = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1))])
        optimizer = ZeroRedundancyOptimizer(
            m.parameters(), optimizer_class=type(made), lr=0.1
        )
        if compiled:
            fuseopt.compile(optimizer.optim)
        train(m, optimizer, 6, clip=nn.utils.clip_grad_norm_ if clip else None)
        ends.append((optimizer, m))
    (want, one), (got, other) = ends
    assert_same(got.optim, want.optim)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    last = fuseopt.reports()[-1]
    assert not last.fallback
    assert name in OF_WHOLES or last.launches == 1


def tailed(kind: str, name: str, elsewhere: str = "") -> None:
    """A tail of DTensors beside torch's lines; `elsewhere`: the last process has
    these, too.
    """
    torch._dynamo.reset()
    _, want = trained(kind, name, "", nn.utils.clip_grad_norm_)
    first = len(fuseopt.reports())
    lines = bool(elsewhere) and dist.get_rank() == dist.get_world_size() - 1
    if lines:
        _, got = trained(kind, name, "", nn.utils.clip_grad_norm_)
    else:
        m = built(kind)
        got = OPTIMIZERS[name](m.parameters())
        tail = fuseopt.tail(got, clip_grad_norm=1.0)
        groups, zero_grad = got.param_groups, got.zero_grad
        both: Any = SimpleNamespace(param_groups=groups, step=tail, zero_grad=zero_grad)

        def limit(params: Any, most: float) -> None:
            tail.clip_grad_norm = most

        train(m, both, 6, clip=limit)
    assert_same(got, want)
    reports = fuseopt.reports()[first:]
    if lines or name in OF_WHOLES:
        return
    assert not any(r.fallback for r in reports), [str(r) for r in reports]
    # between two sums over processes stands one more
    twice = kind == "2-D, every layer" and dist.get_world_size() > 2
    assert {r.launches for r in reports} == {2 + twice}, [str(r) for r in reports]


CASES: dict[str, Callable[..., None]] = {
    "": case,
    "tail": tailed,
    "ZeRO": zero_redundancy,
    "between": between,
    "checkpoint": checkpoint,
    "save": save,
    "load": load,
    "no gradients": no_gradients_here,
    "torch's clip": torchs_clip_elsewhere,
    "eager elsewhere": eager_elsewhere,
    "raises": raises_elsewhere,
    "groups": clipped,
    "groups, tail": tailed_over_groups,
    "groups, wrong": wrong,
    "groups, spread": spread,
    "groups, spread, tail": spread_refused,
}


def main(cases: str, rank: int, world: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    for one in cases.split(";"):
        what, *given = one.split("/")
        print(one, flush=True)
        CASES[what](*given)
    dist.barrier()
    wait_for_workers()
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
