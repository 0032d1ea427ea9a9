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

This page follows the step of two parameters through every stage. The optimizer is one
of torch's; the stages treat any other one in the same way. With `FUSEOPT_DEBUG=4` and
`FUSEOPT_DUMP_DIR` each stage writes a file ([usage.md](usage.md) lists them). The
listings below are from those files.

```python
{code}```

"""
STAGES = """\
## 1. What Dynamo hands over

Dynamo traces the optimizer's Python code and records the calls of torch. Each parameter
has its calls, without a memory plan and without shapes. Rates and betas are arguments,
so a schedule compiles nothing.

```text
{dynamo}
```

## 2. Captured: calls become bodies over columns of lanes

`capture/` runs the graph once on tensors without contents, below ATen's decompositions
and with eager's formulas ([numerics.md](numerics.md)). A call that all parameters share
is one node. The node has a *body*, written once, and columns with the buffers of each
lane.

```text
{captured}
```

## 3. Scheduled: nodes become a variant of one kernel

The rules of `scheduler/legality.py` fuse a producer and its consumer into one body.
They forbid it if another lane, a view or an order of writes stands between the two. The
kernel computes what depends on no element (the bias corrections) once for each lane.
The host computes its numbers once for each call. A slot is what a lane reads or writes:
five here, so 28 bytes an element.

```text
{scheduled}
```

## 4. Generated: one kernel, and a table

The text holds no shape, no number of parameters and no hyperparameter. Those are in a
table, which is an argument of the kernel. So the same text serves any model, and a
changed rate is eight bytes. The listing shows what happens to one row of elements on a
CPU. On a GPU the same body is a Triton kernel.

```cpp
{kernel}
```

## 5. Run

At each call one pass in C compares the optimizer with the table. It writes the
addresses of gradients that moved into the table. Then one launch runs the kernel.
`fuseopt.reports()` returns this Report:

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
