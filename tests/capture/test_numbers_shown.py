"""Numbers of the host are shown as formulas, in Reports and in dumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fuseopt
from fuseopt.capture.fx.inputs import short_names


def corrected(p: list[torch.Tensor], g: list[torch.Tensor], c: dict[str, Any]) -> None:
    c["t"] += 1
    size = c["lr"] / (1 - 0.9 ** c["t"])
    for x, y in zip(p, g, strict=True):
        x.add_(y, alpha=size)


def test_a_rate_reads_as_its_formula(tmp_path: Path) -> None:
    p, g = [torch.ones(3)], [torch.ones(3)]
    c = {"t": 0, "lr": 0.5}
    want = p[0].clone()
    options = {"dump_dir": str(tmp_path)}
    step = torch.compile(corrected, backend="fuseopt", options=options)
    for _ in range(4):
        c["lr"] *= 0.75
        want.add_(g[0], alpha=c["lr"] / (1 - 0.9 ** (c["t"] + 1)))
        step(p, g, c)
    assert torch.equal(p[0], want)
    report = fuseopt.reports()[-1]
    assert report.numbers == ["lr / (1 - 0.9 ** (t + 1))"]
    assert "numbers of each call" in str(report)
    assert report.dump_dir is not None
    for name in ("0_captured.txt", "1_scheduled.txt"):
        text = (Path(report.dump_dir) / name).read_text()
        assert " = lr / (1 - 0.9 ** (t + 1))\n" in text


def test_numbers_are_named_as_the_user_names_them() -> None:
    sources = {
        0: "L['self'].param_groups[0]['lr']",
        1: "L['self'].param_groups[1]['lr']",
        2: "L['c']['t']",
        3: "L['self'].eps",
        4: "L['self'].state[3]['lambda']",
        5: "",
    }
    assert short_names(sources) == {
        0: "param_groups[0]['lr']",
        1: "param_groups[1]['lr']",
        2: "t",
        3: "eps",
        4: "state[3]['lambda']",
        5: "",
    }
