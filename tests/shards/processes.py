"""What the processes of a group do: `python -m tests.shards.processes CASES RANK WORLD
FILE` runs some cases, one after another, and prints "done".

Each builds a model as its users do, trains it with the plain optimizer, and again with
the compiled one, and compares all bits of parameters and state.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adam, AdamW, Optimizer

import fuseopt
from tests.papers import Lion, Yogi
from tests.shards import assert_same

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "Adam": lambda ps: Adam(ps, lr=0.1, foreach=True),
    "Lion": lambda ps: Lion(ps, lr=0.1),
    "Yogi": lambda ps: Yogi(ps, lr=0.1),
}


def model() -> nn.Sequential:
    """Rows even and uneven over two and four processes; the last ones have none of
    some.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1)
    )


def fully_shard(**policies: Any) -> Callable[[nn.Module], nn.Module]:
    def build(m: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import fully_shard as shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        given = {k: v() if callable(v) else v for k, v in policies.items()}
        for layer in m.children():
            if isinstance(layer, nn.Linear):
                shard(layer, mesh=mesh, **given)
        shard(m, mesh=mesh, **given)
        return m

    return build


def mixed_precision() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def replicated_shards(m: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard as shard

    names = ("replicas", "shards")
    shape = (1, 2) if dist.get_world_size() == 2 else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    shard(m, mesh=mesh)
    return m


def tensor_parallel(m: nn.Module) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(m, mesh, plan)
    return m


def two_dimensions(m: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard as shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    shape = (2, 1) if dist.get_world_size() == 2 else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(m, mesh["tp"], plan)
    shard(m, mesh=mesh["dp"])
    return m


def data_parallel(m: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)


MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "FSDP2": fully_shard(),
    "FSDP2, not resharded": fully_shard(reshard_after_forward=False),
    "FSDP2, mixed precision": fully_shard(mp_policy=mixed_precision),
    "HSDP": replicated_shards,
    "TP": tensor_parallel,
    "2-D": two_dimensions,
    "DDP": data_parallel,
}


def train(
    m: nn.Module,
    optimizer: Optimizer,
    steps: int,
    first: int = 0,
    clip: Callable[..., Any] | None = None,
) -> None:
    whole = isinstance(m, nn.parallel.DistributedDataParallel) or any(
        type(p).__name__ == "DTensor" for p in m.parameters()
    )
    assert whole
    for k in range(first, first + steps):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(6, 4, generator=generator)
        m(x).square().sum().backward()
        if clip is not None:
            clip(m.parameters(), 0.5 + k)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + k % 3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=k % 2 == 0)


def trained(
    kind: str,
    name: str,
    way: str,
    clip: Callable[..., Any] | None = None,
    steps: int = 6,
) -> Optimizer:
    m = MODELS[kind](model())
    optimizer = OPTIMIZERS[name](m.parameters())
    if way == "fuseopt.compile":
        fuseopt.compile(optimizer)
    elif way:
        optimizer.step = torch.compile(  # type: ignore[method-assign]
            optimizer.step, backend="fuseopt"
        )
    train(m, optimizer, steps, clip=clip)
    optimizer.model = m  # type: ignore[attr-defined]
    return optimizer


def case(kind: str, name: str, way: str = "fuseopt.compile", clip: str = "") -> None:
    """One kind of model, one optimizer; `clip`: "torch" or "fuseopt"."""
    torch._dynamo.reset()
    plain = nn.utils.clip_grad_norm_
    want = trained(kind, name, "", plain if clip else None)
    first = len(fuseopt.reports())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        clips = {"": None, "torch": plain, "fuseopt": fuseopt.clip_grad_norm_}
        got = trained(kind, name, way, clips[clip])
    assert_same(got, want)
    texts = [str(w.message) for w in told]
    assert not [x for x in texts if "fuseopt" in x], texts
    reports = fuseopt.reports()[first:]
    assert not any(r.fallback for r in reports), [str(r) for r in reports]
    of_clips = [r for r in reports if r.externs]
    steps = [r for r in reports if not r.externs]
    assert bool(of_clips) == (clip == "fuseopt"), [str(r) for r in reports]
    assert {r.launches for r in steps} == {1}, [str(r) for r in reports]
    assert len(of_clips) <= 1, [str(r) for r in of_clips]
    assert all(r.launches <= 4 for r in of_clips)


def checkpoint(kind: str, name: str, way: str = "fuseopt.compile") -> None:
    """Eager's checkpoint read by a compiled optimizer, and the other way round."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    ends = []
    for first, second in (("", ""), ("", way), (way, "")):
        torch._dynamo.reset()
        early = trained(kind, name, first, steps=3)
        m = early.model  # type: ignore[attr-defined]
        saved = copy.deepcopy(get_optimizer_state_dict(m, early))
        late = OPTIMIZERS[name](m.parameters())
        if second:
            fuseopt.compile(late)
            train(m, OPTIMIZERS[name](m.parameters()), 0)
        set_optimizer_state_dict(m, late, saved)
        train(m, late, 3, first=3)
        ends.append(late)
        again = get_optimizer_state_dict(m, late)
        assert list(again["state"]) == list(saved["state"])
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


def zero_redundancy(kind: str, name: str, way: str = "fuseopt.compile") -> None:
    """`ZeroRedundancyOptimizer` steps an optimizer of its own, which is compiled."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ends = []
    for compiled in (False, True):
        m = data_parallel(model())
        kinds = {"AdamW": AdamW, "SGD": SGD}
        optimizer = ZeroRedundancyOptimizer(
            m.parameters(), optimizer_class=kinds[name], lr=0.1
        )
        if compiled:
            fuseopt.compile(optimizer.optim)
        train(m, optimizer, 6)
        ends.append(optimizer)
        optimizer.model = m
    assert_same(ends[1].optim, ends[0].optim)
    pairs = zip(*(o.model.parameters() for o in ends), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert fuseopt.reports()[-1].launches == 1


def no_gradients_here(kind: str, name: str, way: str = "fuseopt.compile") -> None:
    """One process has no gradients: nobody waits for it."""
    ends = []
    for how in ("", way):
        torch._dynamo.reset()
        optimizer = trained(kind, name, how, steps=2)
        for k in range(2):
            train_without = dist.get_rank() == k
            for p in optimizer.param_groups[0]["params"]:
                p.grad = None if train_without else torch.ones_like(p)
            optimizer.step()
        ends.append(optimizer)
    assert_same(ends[1], ends[0])


CASES: dict[str, Callable[..., None]] = {
    "": case,
    "checkpoint": checkpoint,
    "ZeRO": zero_redundancy,
    "no gradients": no_gradients_here,
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
    dist.destroy_process_group()
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
