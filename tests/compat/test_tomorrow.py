"""A torch of tomorrow lacks a name, or has another signature: steps keep their bits.

Each private name that the package looks up is taken away, one at a time; each signature
that it compares is another one; each hook raises as if what it reads were gone.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from fuseopt import compat
from tests import ROOT
from tests.compat.private import elsewhere, looked_up

PATCHES = sorted(patch.name for patch in compat.HOOKS)
#: More than there are, so that a new one is asked as well.
SIGNATURES = 180
FEW = 2


def parts(things: list[str]) -> list[list[str]]:
    return [things[i : i + FEW] for i in range(0, len(things), FEW)]


def came_to(things: list[str]) -> dict[str, str]:
    """What each thing came to, in a process that is forked once for each."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.compat.tomorrow", *things],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=290,
    )
    assert "ok" in ended.stdout or ended.returncode, ended.stderr[-2000:]
    if ended.returncode:
        pytest.fail(ended.stdout[-6000:])
    lines = ended.stdout.splitlines()
    return dict(line.split(" ", 1) for line in lines if line)


def test_no_line_names_a_private_part_but_by_looking_it_up() -> None:
    assert elsewhere() == []
    assert len(looked_up()) > 100


def test_the_list_of_names_sees_what_it_should() -> None:
    paths = looked_up()
    for path in (
        "torch._dynamo.guards:GuardBuilder.ID_MATCH",
        "torch._C:_dynamo.eval_frame.reset_code",
        "torch.optim.optimizer:_use_grad_for_differentiable",
    ):
        assert path in paths


@pytest.mark.slow
@pytest.mark.parametrize("paths", parts(looked_up()), ids=lambda x: x[0])
def test_a_name_that_is_gone(paths: list[str]) -> None:
    assert came_to(paths) == dict.fromkeys(paths, "ok")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SIGNATURES, FEW))
def test_a_signature_that_is_another(first: int) -> None:
    things = [f"takes:{i}" for i in range(first, first + FEW)]
    assert came_to(things) == dict.fromkeys(things, "ok")


@pytest.mark.slow
@pytest.mark.parametrize("names", parts(PATCHES), ids=lambda x: x[0])
def test_a_hook_that_raises(names: list[str]) -> None:
    things = [f"raises:{name}" for name in names]
    assert came_to(things) == dict.fromkeys(things, "ok")


@pytest.mark.slow
def test_there_are_no_more_signatures() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.compat.tomorrow", "signatures"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=290,
    )
    assert 50 < int(ended.stdout.split()[-1]) <= SIGNATURES, ended.stderr[-2000:]
