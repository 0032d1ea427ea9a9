"""What on_device.py does, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT, simulated


@pytest.mark.slow
def test_on_a_device() -> None:
    if simulated.compiler() is None:
        pytest.skip("the simulated accelerator needs a C++ compiler")
    command = [sys.executable, "-m", "tests.backward.on_device"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
