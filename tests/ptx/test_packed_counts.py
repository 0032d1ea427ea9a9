"""What packed state and the means of rows and columns cost a GPU: bytes, sectors,
instructions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import Optimizer

import fuseopt
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.runtime.triton.build import compile_offline
from tests.codegen.sass import resources
from tests.codegen.test_triton_code import CUDA
from tests.codegen.test_triton_counts import rendered

from .kernels import Launch, Log

SECTOR = 32
COUNT = 16 * 1024
#: By format: bytes of an element and of a block of the state; instructions of PTX that
#: run for an element of AdamW, of which 38 are AdamW's without packing.
FORMATS = {"8bit/256": (1, 4, 106), "fp8-e4m3/256": (1, 4, 99), "fp8-e4m3": (1, 0, 80)}


def last_launch(log: Log, make: Any, shape: tuple[int, ...], **options: Any) -> Launch:
    """Of some steps of one parameter, on "sim"."""
    p = torch.nn.Parameter(torch.randn(shape, device="sim"))
    optimizer = fuseopt.compile(make([p]), **options)
    for _ in range(3):
        p.grad = torch.randn(shape, device="sim")
        optimizer.step()
    assert not log.faults
    return log.launches[-1]


@pytest.mark.parametrize(
    "name",
    ["8bit/256", *(pytest.param(x, marks=pytest.mark.slow) for x in [*FORMATS][1:])],
)
def test_packed_state(ptx: Log, name: str, monkeypatch: Any, tmp_path: Any) -> None:
    """Each number is moved once, sixteen bytes of float32 at a time; nothing goes to
    the stack, and three programs fit a multiprocessor.
    """
    found = rendered(monkeypatch)
    launch = last_launch(
        ptx,
        lambda ps: optim.AdamW(ps, foreach=True),
        (COUNT,),
        storage=fuseopt.Storage(name, least=0),
        fallback="error",
    )
    of_element, of_block, most = FORMATS[name]
    each = 12 + 4 * of_element  # read p, g, write p; read and write two of the state
    traffic = launch.traffic()
    scales = 4 * COUNT // 256 * of_block
    assert traffic.loaded + traffic.stored >= each * COUNT + scales
    # a warp's threads read their block's scale together, and write it alone
    assert traffic.stored == (4 + 2 * of_element) * COUNT + scales // 2
    least = SECTOR * (traffic.loads + traffic.stores)
    assert each * COUNT <= least <= each * COUNT + 9 * SECTOR * COUNT // 256
    assert launch.run.instructions / COUNT <= most
    source = TritonTarget(cuda=CUDA).render(found[-1])
    made = compile_offline(source, "sm_90", str(tmp_path))
    used = resources(made["cubin"], str(tmp_path))
    assert used["REG"] <= 168
    assert used["STACK"] == used["LOCAL"] == 0


class Means(Optimizer):
    """Keeps the means of rows, or of columns."""

    def __init__(self, params: Iterable[Any], dim: int) -> None:
        super().__init__(params, {"dim": dim})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = p.grad.mean(group["dim"])
                state["mean"].copy_(p.grad.mean(group["dim"]))


@pytest.mark.parametrize(
    ("shape", "dim", "most"),
    [
        ((512, 96), -1, 60),
        ((96, 512), -2, 40),
        ((4096, 64), -2, 30),  # tall: more programs take fewer columns each
        ((64, 32, 3, 3), -1, 110),  # short: a program takes 256 rows
    ],
    ids=["rows", "columns", "tall columns", "short rows"],
)
def test_means(ptx: Log, shape: tuple[int, ...], dim: int, most: int) -> None:
    """A warp's threads take neighbours: it touches whole sectors, each of them once."""
    launch = last_launch(ptx, lambda ps: Means(ps, dim), shape, fallback="error")
    count = torch.Size(shape).numel()
    traffic = launch.traffic()
    assert traffic.loaded == 4 * count
    # rows that do not begin with a sector share it with the row before
    assert SECTOR * traffic.loads <= 4 * count * (1.2 if shape[-1] >= 8 else 3)
    assert launch.run.instructions / count <= most
