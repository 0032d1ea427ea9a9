"""docs/capabilities.md: what fuseopt uses of torch without a promise.

    python -m tests.tools.capabilities_page

makes it anew from the table of capabilities.
"""

from __future__ import annotations

from collections.abc import Iterator

from fuseopt import compat
from fuseopt.compat.capability import Capability
from fuseopt.config import CHECKED
from tests import ROOT

PAGE = ROOT / "docs" / "capabilities.md"
INTRO = """\
# What torch does not promise

fuseopt uses parts of torch that torch does not promise to keep. Each use is a
*capability*: a name, a probe, and what a step loses without it. Checked with torch
{first} to {last}.

- **Probes.** A probe checks that a name exists and has the signature that fuseopt
  relies on. Where a changed meaning would be silent, a small test runs. No probe
  compares a version.
- **Missing.** fuseopt switches off a capability that is missing, or that raises an
  error. It warns once, with torch's version, and goes on in the next best way. `python
  -m fuseopt doctor` and each Report list what is missing and what it costs.
- **Bits.** Some capabilities are needed for eager's bits, such as a guard that Dynamo
  lacks. Without one, fuseopt compiles only steps that provably do not need it. All
  other steps run in eager, and a Report says why.
- **Off switch.** `FUSEOPT_WITHOUT=name,name` switches some off, and
  `FUSEOPT_WITHOUT=all` all of them. A test runs some forty kinds of steps with each one
  off, and with all off.
- **The floor.** With all of them off, every step whose plain trace has eager's bits is
  still one launch. Examples are SGD, RMSprop, Adagrad, Adadelta, Rprop, Lion in plain
  code, and Adam with `capturable=True`. Any future torch gives at least that.
- **Hooks.** A hook changes how Dynamo traces. Hooks are in force only while Dynamo
  traces for fuseopt, under the lock that Dynamo traces under. At any other time torch
  is as it was imported; `tests/compat/test_unchanged.py` compares all of it.
"""
HOOKS = """\
## Hooks

In force while Dynamo traces for fuseopt, in this order.
"""
OTHERS = """\
## Other uses
"""
COLUMNS = "| name | what it gives | without it | for the bits |\n|---|---|---|---|"


def page() -> str:
    """The text of docs/capabilities.md."""
    first, end = CHECKED
    intro = INTRO.format(first=f"{first[0]}.{first[1]}", last=f"{end[0]}.{end[1] - 1}")
    hooks = list(compat.HOOKS)
    others = [x for x in compat.switches.table.values() if x not in hooks]
    parts = [
        intro,
        HOOKS,
        "\n".join([COLUMNS, *rows(hooks)]) + "\n",
        OTHERS,
        "\n".join([COLUMNS, *rows(sorted(others, key=lambda x: x.name))]) + "\n",
    ]
    return "\n".join(parts)


def rows(capabilities: list[Capability]) -> Iterator[str]:
    """A line of the table for each."""
    for x in capabilities:
        bits = "yes" if x.bits else ""
        yield f"| `{x.name}` | {x.gives} | {x.without} | {bits} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
