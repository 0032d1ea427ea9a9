"""Reductions where eager's registers are not those of x86-64."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch

from fuseopt.codegen.cpp.headers import header
from fuseopt.compiler import pipeline
from fuseopt.errors import EagerOnly
from fuseopt.runtime.tables import reduction_layout
from fuseopt.runtime.tables.reduction_layout import register_bytes


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    register_bytes.cache_clear()
    yield
    monkeypatch.undo()
    register_bytes.cache_clear()


def capable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)


def test_registers_of_neon_have_half_the_bytes() -> None:
    assert reduction_layout.register_bytes() == 16
    text = header("folds")
    assert "#ifdef __aarch64__\nstatic const int64_t REGISTER = 16;" in text


def test_sums_of_other_registers_are_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    capable(monkeypatch, "SVE256")
    pipeline._refuse_folds(["no sums"])
    with pytest.raises(EagerOnly, match="SVE256 registers"):
        pipeline._refuse_folds(["no sums", header("folds")])


def test_sums_of_neon_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    capable(monkeypatch, "DEFAULT")
    pipeline._refuse_folds([header("folds")])
