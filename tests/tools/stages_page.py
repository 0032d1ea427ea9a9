"""docs/stages.md: one step through every stage, as it is dumped.

    python -m tests.tools.stages_page

makes it anew. What the kernel looks like depends on the processor a little, so that a
test holds the page's text and the first lines of each stage, and not all of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import ROOT

PAGE = ROOT / "docs" / "stages.md"
#: What is followed: the page shows it, and it is what runs.
CODE = """\
import torch, fuseopt

params = [torch.nn.Parameter(torch.randn(40, 50)), torch.nn.Parameter(torch.randn(50))]
opt = torch.optim.AdamW(params, lr=1e-3)
step = torch.compile(opt.step, backend="fuseopt")
for _ in range(2):
    for p in params:
        p.grad = torch.randn_like(p)
    step()
print(fuseopt.reports()[-1])
"""
INTRO = """\
# One step through every stage

Two parameters and an optimizer of torch's; nothing here is special to it. With
`FUSEOPT_DEBUG=4` and `FUSEOPT_DUMP_DIR` each stage leaves a file, and what follows is
from those files ([usage.md](usage.md) lists them).

```python
{code}```

"""
STAGES = """\
## 1. What Dynamo hands over

Dynamo follows the optimizer's own Python and writes down the calls of torch. Each
parameter has its calls; there is no memory plan and no shape in them yet. Rates and
betas are arguments, so that a schedule compiles nothing anew.

```text
{dynamo}
```

## 2. Captured: calls become bodies over columns of lanes

`capture/` runs the graph once on tensors without contents, below ATen's decompositions
and with eager's formulas ([numerics.md](numerics.md)). A call that all parameters share
is one node: a *body*, written once, and columns that say which buffers each lane uses.

```text
{captured}
```

## 3. Scheduled: nodes become a variant of one kernel

The rules of `scheduler/legality.py` let a producer and its consumer be one body where
no other lane, no view and no order of writes stands between them. What depends on no
element (the bias corrections) is computed once for each lane, and numbers of the host
once for each call. A slot is what a lane reads or writes: five here, so 28 bytes an
element.

```text
{scheduled}
```

## 4. Generated: one kernel, and a table

The text holds no shape, no number of parameters and no hyperparameter: those are in a
table that the kernel is given, so that the same text serves any model, and a changed
rate is eight bytes. This is what one row of elements goes through, on a CPU; on a GPU
the same body is a Triton kernel.

```cpp
{kernel}
```

## 5. Run

At each call one pass in C compares what the optimizer holds with what the table was
made for; gradients that moved are written into it; then the kernel is started once.
`fuseopt.reports()` says what it was:

```text
{report}
```
"""
#: Longest part of a file that is shown.
LINES = 46


def page() -> str:
    """The text of the page."""
    with tempfile.TemporaryDirectory() as name:
        told = _run(Path(name))
        step = Path(name) / "dump" / "step0"
        kernel = _row((step / "kernel0.cpp").read_text("utf-8"))
        captured = (step / "0_captured.txt").read_text("utf-8")
        scheduled = (step / "1_scheduled.txt").read_text("utf-8")
    dynamo, _, report = told.partition("\n@@@\n")
    parts = {
        "dynamo": _short(dynamo, 26),
        "captured": _short(captured),
        "scheduled": _short(scheduled, 70),
        "kernel": kernel,
        "report": _unplaced(report.partition("seconds:")[0]),
    }
    filled = STAGES
    for key, text in parts.items():
        filled = filled.replace(f"{{{key}}}", text.strip("\n"))
    return INTRO.replace("{code}", CODE) + filled


def _run(folder: Path) -> str:
    """Dump the step's stages; what Dynamo hands over, then the Report."""
    script = folder / "step.py"
    options = {"debug": 4, "dump_dir": str(folder / "dump")}
    code = CODE.replace('"fuseopt")', f'"fuseopt", options={options})')
    code = code.replace("print(", "print('@@@')\nprint(")
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_LOGS": "graph_code"},
        capture_output=True,
        text=True,
        check=True,
    )
    return _calls(done.stderr) + "\n@@@\n" + done.stdout.partition("@@@\n")[2]


def _calls(log: str) -> str:
    """Of a graph that torch logs its calls, without types and places of source."""
    found = []
    for line in log.splitlines():
        text = line.partition("[__graph_code]")[2].strip()
        text = re.sub(r': "[^"]*"', "", text).split(";  ")[0]
        if re.match(r"\w+ = (?!L_|self\.)", text) or re.match(r"\w+ \+= ", text):
            found.append(text)
    return "\n".join(found)


def _unplaced(report: str) -> str:
    """A Report without the folder of its dump, whose name may go on in a next line."""
    cell = re.compile(r"│ /[^│]*│")
    report = re.sub(r"(?m)^│[^│]*(?:│ +){5}│\n", "", report)
    return cell.sub(lambda x: f"│ kernel0{' ' * (len(x[0]) - 10)}│", report)


def _row(kernel: str) -> str:
    """The function that goes through a row of elements."""
    begin = kernel.index("static void row0(")
    text = kernel[begin : kernel.index("\n}", begin) + 2]
    return re.sub(r"count, [^\n]*\) {\n", "count, ...) {\n", text, count=1)


def _short(text: str, most: int = LINES) -> str:
    lines = [x[:88].rstrip() for x in text.strip("\n").split("\n")]
    if len(lines) <= most:
        return "\n".join(lines)
    return "\n".join([*lines[:most], f"... {len(lines) - most} lines more"])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
