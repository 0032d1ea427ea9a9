"""Models, and how their users spread them over the processes of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def model(lanes: int = 6) -> nn.Sequential:
    """Rows even and uneven over two and four processes; the last ones have none of
    some. `lanes`: how many parameters there are, which is even.
    """
    torch.manual_seed(0)
    widths = (4, 8, 7, 1) * lanes
    layers: list[nn.Module] = []
    for k in range(lanes // 2):
        layers += [nn.Linear(widths[k], widths[k + 1]), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


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


def offload() -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy(pin_memory=False)


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


def in_parallel(m: nn.Module, mesh: Any, every: bool) -> None:
    """`every`: all layers, of which the last has uneven parts; else two of three."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if every:
        plan["4"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(m, mesh, plan)


def tensor_parallel(m: nn.Module, every: bool = False) -> nn.Module:
    in_parallel(m, init_device_mesh("cpu", (dist.get_world_size(),)), every)
    return m


def two_dimensions(m: nn.Module, every: bool = False) -> nn.Module:
    from torch.distributed.fsdp import fully_shard as shard

    shape = (2, 1) if dist.get_world_size() == 2 else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    in_parallel(m, mesh["tp"], every)
    shard(m, mesh=mesh["dp"])
    return m


def data_parallel(m: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(m, gradient_as_bucket_view=True)


def flat_parameters(m: nn.Module) -> nn.Module:
    """Parameters are views of one flat tensor, of which a process has a piece."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(
        m, use_orig_params=True, device_id=torch.device("cpu")
    )


MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "FSDP2": fully_shard(),
    "FSDP2, not resharded": fully_shard(reshard_after_forward=False),
    "FSDP2, mixed precision": fully_shard(mp_policy=mixed_precision),
    "FSDP2, offloaded": fully_shard(offload_policy=offload),
    "HSDP": replicated_shards,
    "TP": tensor_parallel,
    "TP, every layer": lambda m: tensor_parallel(m, every=True),
    "2-D": two_dimensions,
    "2-D, every layer": lambda m: two_dimensions(m, every=True),
    "DDP": data_parallel,
    "FSDP1": flat_parameters,
}
#: Whose parameters are plain tensors.
PLAIN = ("DDP", "FSDP1")
#: Whose parameters have several meshes, or are plain in part: torch takes no lists of
#: them, and so no norm.
NO_LISTS = ("TP", "2-D")
