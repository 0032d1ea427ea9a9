"""The page of a Report: what a stranger finds there, and in which browsers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adafactor, AdamW, Optimizer

import fuseopt
from fuseopt.cli.main import main
from fuseopt.compiler.page import ADVICE
from fuseopt.compiler.report import Report
from fuseopt.scheduler.legality import RULES
from tests.beside import load

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """The text of a page, whose tags must be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") and v]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert not reader.open
    reader.text = re.sub(r"\s+", " ", reader.text)
    return reader


def params(n: int = 4) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(8, 4)) for _ in range(n)]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


class Simple(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class Total(Simple):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [p for group in self.param_groups for p in group["params"]]
        norms = torch.stack(torch._foreach_norm([p.grad for p in every]))
        scale = 1.0 / (norms.norm() + 1.0)
        for p in every:
            p.add_(p.grad * scale, alpha=-0.1)


class Bessel(Simple):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.special.bessel_j0(p.grad * 2), alpha=-0.1)


class Columns(Simple):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rows = p.grad.square().mean(dim=1, keepdim=True)
                columns = p.grad.square().mean(dim=0, keepdim=True)
                p.addcdiv_(p.grad, (rows * columns).sqrt() + 1e-8, value=-0.1)


@pytest.mark.family(3)
@pytest.mark.parametrize(
    ("build", "code", "code_line"),
    [
        (Total, "shared_scalar", "p.add_(p.grad * scale, alpha=-0.1)"),
        (Bessel, "extern", "torch.special.bessel_j0(p.grad * 2)"),
        (Columns, "index_space", "p.addcdiv_(p.grad, (rows * columns)"),
    ],
)
def test_why_an_optimizer_takes_several_launches(
    build: Callable[[Any], Optimizer], code: str, code_line: str, tmp_path: Path
) -> None:
    """The reason, what to do about it and the line of Python, in words alone."""
    report = fuseopt.explain(build(params()))
    assert report.launches > 1
    report.save_html(tmp_path / "step.html")
    text = read((tmp_path / "step.html").read_text()).text
    assert f"{report.launches} launches a step" in text
    why, advice = ADVICE[code]
    assert why in text
    assert advice in text
    assert code_line in text
    assert Path(__file__).name in text


def test_every_rule_has_its_words() -> None:
    assert {rule.code for rule in RULES} | {"reduction", "extern"} == set(ADVICE)


def test_bytes_beside_the_least(tmp_path: Path) -> None:
    """AdamW reads and writes what it must; a total norm reads gradients twice."""
    adamw = fuseopt.explain(AdamW(params()))
    elements = 4 * 8 * 4
    assert adamw.bytes == 28 * elements
    # and a counter of each parameter, which is read and written
    assert adamw.least_bytes == adamw.bytes + 4 * 2 * 4
    total = fuseopt.explain(Total(params()))
    assert total.least_bytes == 12 * elements
    assert total.bytes >= 16 * elements
    assert "times that" in read(total._repr_html_()).text


def test_what_runs_is_in_order() -> None:
    report = fuseopt.explain(Bessel(params()))
    kernels = [k.name for k in report.kernels]
    bessel = [x for x in report.order if "bessel" in x]
    assert len(bessel) == 4
    assert report.order == [kernels[0], *bessel, *kernels[1:]]
    text = read(report._repr_html_()).text
    assert "4 times" in text


@pytest.mark.slow
def test_no_network_and_no_lanes(tmp_path: Path) -> None:
    """As large for 200 lanes as for 20, and without a link to elsewhere."""
    sizes = []
    for n in (20, 200):
        page = tmp_path / f"{n}.html"
        fuseopt.explain(AdamW(params(n))).save_html(page)
        sizes.append(page.stat().st_size)
        assert not read(page.read_text()).links
    assert sizes[1] < 1.01 * sizes[0]


def test_a_cell_has_no_source() -> None:
    report = fuseopt.explain(Adafactor(params()))
    cell = report._repr_html_()
    assert "#include" not in cell
    assert len(cell) < 20_000
    read(cell)


def test_what_runs_elsewhere_is_said_and_escaped() -> None:
    report = Report(fallback="It runs in eager: <script>alert(1)</script>")
    cell = report._repr_html_()
    assert "<script>" not in cell
    assert "not compiled" in read(cell).text


def test_names_that_are_tags_are_escaped(tmp_path: Path) -> None:
    """Of a class, of its file, of a group's key, in its source."""
    path = tmp_path / "a<b onmouseover=alert(1)>.py"
    path.write_text(
        "import torch\n"
        "class Named(torch.optim.Optimizer):\n"
        "    @torch.no_grad()\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']:\n"
        "                p.sub_(torch.cumsum(p.grad, 0))  # </pre><script>alert(2)\n"
    )
    module = load(path)
    cls = module.Named
    cls.__name__ = cls.__qualname__ = "<script>alert(3)"
    for kind in (cls, type("<script>alert(4)", (AdamW,), {})):
        held = params()
        opt = kind(held) if kind is not cls else kind(held, {})
        opt.param_groups[0]["<script>key"] = "'\"><script>alert(5)"
        report = fuseopt.explain(opt)
        page = tmp_path / "page.html"
        report.save_html(page)
        for text in (page.read_text(), report._repr_html_()):
            assert not re.findall("<script|<b onmouseover", text)
            read(text)


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    report = fuseopt.explain(AdamW(params()))
    with pytest.raises(OSError, match="nowhere"):
        report.save_html(tmp_path / "nowhere" / "step.html")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made.py"
    made.write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])\n"
    )
    page = tmp_path / "seite_ä.html"
    assert main(["explain", f"{made}:make", "--html", str(page)]) == 0
    assert "1 launch a step" in read(page.read_text()).text
    assert main(["explain", f"{made}:make", "--html", str(tmp_path / "no" / "x")]) == 1
    assert "no/x" in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("chromium"), reason="there is no chromium")
@pytest.mark.parametrize("width", [500, 1200])
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    """Laid out without a bar to scroll sideways, on a phone as well."""
    page = tmp_path / "step.html"
    fuseopt.explain(Adafactor(params())).save_html(page)
    asks = "<script>document.title = document.documentElement.scrollWidth + ' of ' + "
    asks += "innerWidth + ' ' + document.querySelectorAll('.launch').length</script>"
    page.write_text(page.read_text().replace("</body>", f"{asks}</body>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command += [f"--window-size={width},900", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>(\d+) of (\d+) (\d+)</title>", done.stdout)
    assert found, done.stderr[-2000:]
    taken, given, launches = map(int, found.groups())
    assert taken <= given
    assert launches == 4
