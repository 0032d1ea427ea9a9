"""docs/conformance.md is what its generator makes of the record, which is whole."""

from __future__ import annotations

import json

import pytest

import fuseopt
from tests.tools import conformance, conformance_aarch64
from tests.tools.conformance import (
    MODULES,
    OUTCOMES,
    PAGE,
    classes,
    nowhere,
    page,
    read,
)
from tests.tools.conformance_aarch64 import read_record
from tests.tools.kernels_aarch64 import targets

RECORD = read()
ROWS = RECORD["rows"]


def test_the_page_is_that_of_the_record() -> None:
    """To mend: `python -m tests.tools.conformance --page`."""
    assert page(RECORD) == PAGE.read_text(encoding="utf-8")


def test_the_record_is_of_this_release() -> None:
    assert RECORD["fuseopt"] == fuseopt.__version__


def test_the_record_names_no_folder_of_a_machine() -> None:
    text = json.dumps(RECORD)
    assert "site-packages" not in text
    assert nowhere("at /a/b-c/d.py:3: if x / y (/e/f.py)") == (
        "at d.py:3: if x / y (f.py)"
    )


def test_every_optimizer_of_torch_is_there() -> None:
    names = {x["target"] for x in ROWS}
    assert names >= {f"torch.optim:{name}" for name in classes("torch.optim")}


def test_equal_means_compiled_and_compared() -> None:
    """Each has launches, all steps, and a control that the comparison saw."""
    equal = [x for x in ROWS if x["outcome"] == "equal"]
    for row in equal:
        assert row["launches"] >= 1, row
        assert " moved; " in row["control"]
        assert " ulp at most" in row["control"]
        assert "no difference" not in row["control"]
        assert row["steps"] == 12
        assert row["differences"] == []
    packages = {x["target"] for x in equal if not x["target"].startswith("torch.")}
    assert len(packages) >= 40


def test_everything_else_has_its_reason() -> None:
    for row in ROWS:
        assert row["outcome"] in OUTCOMES
        assert (row["outcome"] == "equal") == (not row["reason"]), row
        assert row["target"].split(":")[0] in MODULES


def test_rows_of_the_emulator_are_rows_of_the_table() -> None:
    """Compiled, compared, and with a control, as those of this machine."""
    known = {(x["target"], x["dtype"]): x for x in ROWS}
    for row in conformance_aarch64.read_record()["rows"]:
        assert row["outcome"] in OUTCOMES
        if row["outcome"] == "equal":
            assert row["launches"] >= 1
            assert "no difference" not in row["control"]
            assert " moved; " in row["control"]
        if row["dtype"] != "float16":
            assert known[row["target"], row["dtype"]]["outcome"] == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_a_row_is_what_a_run_gives(name: str) -> None:
    made = json.loads(json.dumps(conformance.work("torch.optim", name, "float32")))
    (known,) = [
        x
        for x in ROWS
        if (x["target"], x["dtype"]) == (f"torch.optim:{name}", "float32")
    ]
    for key in ("outcome", "launches", "reason", "done", "left_out", "differences"):
        assert made[key] == known[key], key


def test_each_row_ran_on_aarch64() -> None:
    """Its kernels have the bits of the reference, or its whole run has eager's."""
    record = read_record()
    kernels = {x["target"]: x["outcome"] for x in record["kernels"]}
    runs = {
        x["target"]: x["outcome"] for x in record["rows"] if x["dtype"] == "float32"
    }
    judged = "equal", "another order of sums"
    assert kernels.keys() == {*targets()}
    others = [x for x, outcome in kernels.items() if outcome not in judged]
    assert [x for x in others if runs.get(x) != "equal"] == []
