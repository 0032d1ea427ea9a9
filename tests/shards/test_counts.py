"""What a steady step asks for: one launch in each process, and no collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from fuseopt.runtime.commit import Pending
from tests.shards.steps import WAYS, give, parameters, step_of


class Calls(TorchDispatchMode):
    """Counts the calls of ATen. Compiled code runs within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class Talk(CommDebugMode):
    """Counts collectives. Compiled code runs within it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@pytest.mark.family(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [6, 30])
def test_one_launch_no_collective_no_dispatch(
    mesh: DeviceMesh, n: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters(mesh, n)
    optimizer = AdamW(params)
    step = step_of(optimizer, way)
    generator = torch.Generator().manual_seed(0)
    launches: list[int] = []
    put_off = Pending.put_off

    def counted(self: Pending, given: Any, *rest: Any) -> None:
        launches.append(len(given))
        put_off(self, given, *rest)

    for _ in range(3):
        give(params, generator)
        step()
    monkeypatch.setattr(Pending, "put_off", counted)
    give(params, generator)
    with Talk() as talk:
        step()
    assert talk.get_total_counts() == 0
    give(params, generator)
    with Calls() as calls:
        step()
    assert launches == [1, 1]
    assert not [x for x in calls.names if not x.startswith("profiler.")]
