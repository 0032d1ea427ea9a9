"""docs/conformance-aarch64.json: `python -m tests.tools.conformance_aarch64`.

The runs of docs/conformance.md with torch's build for aarch64, under an emulator (see
`tests/tools/aarch64.py`): a minute or more for each. Rows that are not run again stay.

    python -m tests.tools.conformance_aarch64 torch.optim:AdamW:bfloat16
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from typing import Any

from tests import ROOT
from tests.tools import aarch64

RECORD = ROOT / "docs" / "conformance-aarch64.json"
_TORCH = (
    "AdamW Adafactor SGD Muon Adagrad RMSprop NAdam RAdam Adadelta Adamax Adam Rprop "
    "ASGD"
).split()
#: What is run if nothing is named.
RUNS = (
    *(f"torch.optim:{name}:float32" for name in _TORCH),
    "torch.optim:AdamW:bfloat16",
    "torch.optim:AdamW:float16",
    "lion_pytorch:Lion:float32",
    "pytorch_optimizer:Lamb:float32",
    "schedulefree:AdamWScheduleFree:float32",
)
SECTION = """
## On aarch64

torch's build for aarch64 ran these under an emulator of a Neoverse N1 (`qemu-aarch64`),
with kernels from GCC's cross compiler: `python -m tests.tools.conformance_aarch64`. The
emulator shows bits and not speed. No aarch64 processor has run them yet. All runs have
the events and the control of the runs above. Where torch takes SVE registers, its sums
have another order, and it calls other vector functions. A step with sums, or with `exp`
or `pow` of tensors, runs in eager there.
[conformance-aarch64.json](conformance-aarch64.json) has every row in full.

| dtype | outcome | optimizers |
|---|---|---|
"""


def read_record() -> dict[str, Any]:
    """The record: `rows` of whole runs, and `kernels` (see `kernels_aarch64.py`)."""
    if not RECORD.exists():
        return {"emulated": aarch64.PROCESSOR, "rows": []}
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def write_record(record: dict[str, Any]) -> None:
    """Replace the record."""
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def write(rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to the record."""
    record = read_record()
    known = {(x["target"], x["dtype"]): x for x in [*record["rows"], *rows]}
    every = [known[k] for k in sorted(known, key=lambda k: (k[1], k[0].lower()))]
    write_record({**record, "rows": every})


KERNELS = """
The kernels of all float32 rows of this page ran there on made-up numbers, compiled from
the graphs of the runs above: `python -m tests.tools.kernels_aarch64`. They were
compared with the interpreter of the IR. It adds up in another order than eager, so sums
are compared within {bound:.0e} of the largest number. It rounds `exp` and `pow`
correctly, which eager's vector functions do not. Made-up numbers are also outside of
the range of some steps. So optimizers that are not equal here were run whole, in the
table above.

| kernels | optimizers | number |
|---|---|---:|
"""
#: What the outcomes of kernels are called, in the order of the page.
OUTCOMES = {
    "equal": "equal bits",
    "another order of sums": "equal but for the order of sums",
    "differs": "other bits than the interpreter's",
    "raises": "raises, for made-up numbers",
    "not run": "not run alone: ATen calls run between them",
}


def kernels_section(rows: list[dict[str, Any]]) -> str:
    """The part of the section on kernels; "" without rows."""
    if not rows:
        return ""
    from fuseopt.compiler.alone import FAR

    text = KERNELS.format(bound=FAR)
    for outcome, title in OUTCOMES.items():
        some = [named(x["target"]) for x in rows if x["outcome"] == outcome]
        if some:
            text += f"| {title} | {', '.join(some)} | {len(some)} |\n"
    return text


def named(target: str) -> str:
    """The name of an optimizer, with its package if that is not torch."""
    of, _, name = target.partition(":")
    return name if of == "torch.optim" else f"{of}'s {name}"


def section() -> str:
    """The section of docs/conformance.md; "" without a record."""
    record = read_record()
    found: dict[tuple[str, str], list[str]] = {}
    for row in record["rows"]:
        at = row["dtype"], row["outcome"]
        found.setdefault(at, []).append(named(row["target"]))
    if not found:
        return ""
    lines = [f"| {d} | {o} | {', '.join(x)} |" for (d, o), x in found.items()]
    kernels = kernels_section(record.get("kernels", []))
    return SECTION + "\n".join(lines) + "\n" + kernels


def worker(names: Iterable[str]) -> None:
    """Under the emulator: a line of JSON for each run."""
    from tests.tools.conformance import work

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in names:
        module, made, dtype = name.split(":")
        try:
            row = work(module, made, dtype)
        except Exception as error:
            why = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
            row = {"target": f"{module}:{made}", "dtype": dtype, "outcome": "not run"}
            row["reason"] = why
        print(json.dumps(row), file=out, flush=True)


def main() -> None:
    """Run what was named, and add to the record after each run."""
    names = sys.argv[1:]
    if names[:1] == ["--worker"]:
        worker(names[1:])
        return
    if aarch64.missing():
        sys.exit(aarch64.missing())
    command = aarch64.command("-m", "tests.tools.conformance_aarch64", "--worker")
    child = subprocess.Popen(
        [*command, *(names or RUNS)],
        cwd=ROOT,
        env=aarch64.environment(ROOT),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        row = json.loads(line)
        print(row["target"], row["dtype"], row["outcome"], row["reason"], flush=True)
        write([row])
    sys.exit(child.wait())


if __name__ == "__main__":
    main()
