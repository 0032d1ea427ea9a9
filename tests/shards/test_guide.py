"""The code of docs/shards.md runs, in two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


@pytest.mark.slow
def test_the_code_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "shards.md").read_text(encoding="utf-8")
    # the first block; those that follow name process groups of a mesh of several
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    train = tmp_path / "train.py"
    train.write_text(code, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    try:
        done = subprocess.run(
            [*torchrun, "--nproc-per-node", "2", str(train)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
    except subprocess.TimeoutExpired:
        pytest.fail("the processes hang")
    assert done.returncode == 0, done.stderr[-3000:]
    said = sorted(re.findall(r"process \d: \d launch", done.stdout))
    assert said == ["process 0: 1 launch", "process 1: 1 launch"]
    assert "fuseopt:" not in done.stderr
