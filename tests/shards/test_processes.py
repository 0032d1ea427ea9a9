"""Processes that train together over gloo: all have eager's bits, none hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.shards.between import EVENTS
from tests.shards.models import NO_LISTS
from tests.shards.training import LISTS, NORMS, OPTIMIZERS

#: Seconds after which the processes of a group are ended.
LIMIT = 240


def together(cases: list[str], folder: Path, world: int = 2) -> None:
    """Run cases in as many processes; see tests/shards/processes.py.

    They write into the folder, where those of another call find it.
    """
    meet = folder / f"meet{len([*folder.iterdir()])}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # whoever aborts, if only when Python ends, says where
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.shards.processes"]
    command.append(";".join(cases))
    logs = [folder / f"log{rank}" for rank in range(world)]
    group = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            group.append(
                subprocess.Popen(
                    [*command, str(rank), str(world), str(meet)],
                    cwd=folder,
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


@pytest.mark.slow
def test_fully_shard_and_clip(tmp_path: Path) -> None:
    cases = ["/FSDP2/AdamW", "/FSDP2/Lion/torch.compile"]
    cases += ["/FSDP2/SGD/fuseopt.compile/fuseopt", "torch's clip/FSDP2/SGD"]
    together(cases, tmp_path)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.slow
def test_clip_of_parts_of_every_kind(tmp_path: Path, world: int) -> None:
    kinds = ["FSDP2", "FSDP2, mixed precision", "FSDP2, offloaded", "HSDP"]
    kinds += ["TP, every layer", "2-D, every layer"]
    cases = [f"/{kind}/SGD/fuseopt.compile/fuseopt" for kind in kinds]
    together(cases, tmp_path, world)


@pytest.mark.slow
def test_a_clip_over_several_meshes(tmp_path: Path) -> None:
    cases = ["groups/2", "groups/inf", "groups/1", "groups/3", "groups, tail"]
    together([*cases, "groups, wrong"], tmp_path, 4)


@pytest.mark.slow
def test_a_clip_over_several_meshes_of_dtensors(tmp_path: Path) -> None:
    cases = ["groups, spread/2", "groups, spread/inf", "groups, spread/3"]
    together([*cases, "groups, spread, tail"], tmp_path, 4)


def test_gradients_that_are_missing(tmp_path: Path) -> None:
    together(["between/FSDP2/SGD/no_gradients_of_two"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "LAMB"])
@pytest.mark.parametrize("kind", ["FSDP2", "FSDP2, mixed precision"])
def test_what_users_do_between_steps(tmp_path: Path, kind: str, name: str) -> None:
    """By the step of either way in, and by a tail."""
    # where one process alone steps, LAMB's norms would wait for the others
    events = [x for x in EVENTS if (name, x) != ("LAMB", "one_raises")]
    cases = [f"between/{kind}/{name}/{event}" for event in events]
    cases += [f"{case}/torch.compile" for case in cases]
    cases.append(f"between/{kind}/{name}/nothing/tail")
    cases.append(f"between/{kind}/{name}/no_gradients_of_two/tail")
    together(cases, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 18, 34])
@pytest.mark.parametrize("way", ["fuseopt.compile", "torch.compile", "tail"])
def test_what_users_do_between_steps_of_other_numbers(
    tmp_path: Path, way: str, lanes: int
) -> None:
    """Of parameters: fewer, and so many that a few lead."""
    events = ["nothing", "no_gradients_of_two"]
    events += ["a_group_is_added", "reloaded", "one_raises"] if way != "tail" else []
    cases = [f"between/FSDP2/AdamW/{event}/{way}/{lanes}" for event in events]
    cases += [f"between/FSDP2/LAMB/nothing/{way}/{lanes}"]
    cases += [f"between/FSDP2, mixed precision/Lion/nothing/{way}/{lanes}"]
    together(cases, tmp_path)


@pytest.mark.slow
def test_steps_of_whole_tensors(tmp_path: Path) -> None:
    """Norms of parameters, in each process, and in all but one, which is eager."""
    together(["/FSDP2/LAMB", "eager elsewhere/FSDP2/LAMB"], tmp_path)


@pytest.mark.slow
def test_steps_of_whole_tensors_beside_eagers(tmp_path: Path) -> None:
    """What is told, and in which order, is eager's; four numbers may be added up in
    several orders, which give other bits.
    """
    cases = [f"eager elsewhere/{kind}/LAMB" for kind in ("FSDP2", "2-D, every layer")]
    cases += ["eager elsewhere/HSDP/MARS", "eager elsewhere/TP, every layer/LARS"]
    cases += ["eager elsewhere/FSDP2/NovoGrad", "tail/FSDP2/LARS", "/2-D/NovoGrad"]
    together(cases, tmp_path, 4)


@pytest.mark.slow
def test_tails(tmp_path: Path) -> None:
    """In each process, and in one of them."""
    together(["tail/FSDP2/AdamW", "tail/FSDP2/SGD/torch"], tmp_path)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.slow
def test_tails_of_every_kind(tmp_path: Path, world: int) -> None:
    kinds = ["FSDP2", "FSDP2, mixed precision", "FSDP2, offloaded", "HSDP"]
    kinds += ["TP, every layer", "2-D, every layer"]
    cases = [f"tail/{kind}/{name}" for kind in kinds for name in ("AdamW", "Lion")]
    together([*cases, "tail/HSDP/SGD/torch", "tail/FSDP2/LAMB/torch"], tmp_path, world)


#: Spread over processes in one dimension, then in two.
KINDS = [
    *("FSDP2", "FSDP2, not resharded", "FSDP2, mixed precision", "FSDP2, offloaded"),
    *("TP", "TP, every layer", "DDP", "FSDP1"),
]
OF_TWO = ["HSDP", "2-D", "2-D, every layer"]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", [x for x in OPTIMIZERS if x not in NORMS])
@pytest.mark.slow
def test_every_kind(tmp_path: Path, name: str, world: int) -> None:
    cases = []
    for kind in KINDS + OF_TWO * (world > 1):
        if kind in NO_LISTS and name in LISTS:
            continue  # torch raises
        clip = "" if kind in NO_LISTS else "/fuseopt.compile/torch"
        cases.append(f"/{kind}/{name}{clip}")
    cases.append(f"ZeRO//{name}/fuseopt.compile/torch")
    together(cases, tmp_path, world)


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    """What two processes save, one reads."""
    cases = ["checkpoint/FSDP2/AdamW", "save/FSDP2/AdamW"]
    together([*cases, "no gradients/FSDP2/AdamW"], tmp_path)
    together(["load/FSDP2/AdamW/2"], tmp_path, 1)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adam"])
@pytest.mark.slow
def test_checkpoints_between_worlds(tmp_path: Path, name: str) -> None:
    worlds = (1, 2, 4)
    for world in worlds:
        together([f"save/FSDP2/{name}"], tmp_path, world)
    for world in worlds:
        together([f"load/FSDP2/{name}/{saved}" for saved in worlds], tmp_path, world)


@pytest.mark.parametrize("kind", ["TP", "HSDP", "2-D"])
@pytest.mark.slow
def test_checkpoints_of_other_meshes(tmp_path: Path, kind: str) -> None:
    cases = [f"checkpoint/{kind}/{name}" for name in ("AdamW", "SGD")]
    together([*cases, f"save/{kind}/AdamW"], tmp_path, 4)
    together([f"load/{kind}/AdamW/4"], tmp_path, 2)


@pytest.mark.parametrize("at", [0, 2, "none"])
@pytest.mark.slow
def test_a_process_that_raises_keeps_no_other_waiting(tmp_path: Path, at: Any) -> None:
    together([f"raises/FSDP2/AdamW/{at}"], tmp_path)
