"""Processes that train together over gloo: all have eager's bits, none hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT

#: Seconds after which the processes of a group are ended.
LIMIT = 240


def together(cases: list[str], folder: Path, world: int = 2) -> None:
    """Run cases in as many processes; see tests/shards/processes.py."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.shards.processes", ";".join(cases)]
    logs = [folder / f"log{rank}" for rank in range(world)]
    group = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            group.append(
                subprocess.Popen(
                    [*command, str(rank), str(world), str(folder / "meet")],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + LIMIT
    try:
        while any(p.poll() is None for p in group):
            failed = any(p.poll() not in (None, 0) for p in group)
            if failed or time.monotonic() > end:
                break  # the others would wait for it
            time.sleep(0.05)
    finally:
        for p in group:
            p.kill()
            p.wait()
    texts = [log.read_text()[-3000:] for log in logs]
    assert all(text.endswith("done\n") for text in texts), "\n\n".join(texts)


def test_fully_shard(tmp_path: Path) -> None:
    together(["/FSDP2/AdamW", "/FSDP2/Lion/torch.compile"], tmp_path)


@pytest.mark.slow
def test_tensor_parallel_and_clip(tmp_path: Path) -> None:
    together(["/TP/SGD", "/FSDP2/SGD/fuseopt.compile/torch"], tmp_path)


def test_clip_of_parts(tmp_path: Path) -> None:
    together(["/FSDP2/SGD/fuseopt.compile/fuseopt"], tmp_path)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.slow
def test_clip_of_parts_of_every_kind(tmp_path: Path, world: int) -> None:
    # of two meshes (2-D, some layers not parallel) torch itself takes no norm
    kinds = ["FSDP2", "FSDP2, mixed precision", "HSDP"]
    cases = [f"/{kind}/SGD/fuseopt.compile/fuseopt" for kind in kinds]
    together(cases, tmp_path, world)


def test_checkpoints(tmp_path: Path) -> None:
    together(["checkpoint/FSDP2/AdamW", "no gradients/FSDP2/AdamW"], tmp_path)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adam", "Lion", "Yogi"])
@pytest.mark.slow
def test_every_kind(tmp_path: Path, name: str, world: int) -> None:
    kinds = ["FSDP2", "TP", "DDP", "FSDP2, not resharded", "FSDP2, mixed precision"]
    if world > 1:
        kinds += ["HSDP", "2-D"]
    together([f"/{kind}/{name}" for kind in kinds], tmp_path, world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.slow
def test_zero_redundancy(tmp_path: Path, world: int) -> None:
    together(["ZeRO//AdamW", "ZeRO//SGD"], tmp_path, world)


@pytest.mark.parametrize("kind", ["TP", "HSDP", "2-D"])
@pytest.mark.slow
def test_checkpoints_of_other_meshes(tmp_path: Path, kind: str) -> None:
    together([f"checkpoint/{kind}/{name}" for name in ("AdamW", "SGD")], tmp_path, 4)
