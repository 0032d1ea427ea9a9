"""Frames and instructions as newer Pythons have them."""

from __future__ import annotations

import dis
from types import SimpleNamespace
from typing import Any

import pytest

from fuseopt.backend import attach
from fuseopt.compat import symbol_uses, window
from fuseopt.compat.symbol_uses import ANSWERS


class Names(dict[str, Any]):
    """Local variables of a frame, from Python 3.13 on."""

    def keys(self) -> Any:
        return [*super().keys()]


def test_the_keys_of_local_variables_are_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = object()
    outer = SimpleNamespace(f_locals=Names(frame=traced, compiler_fn=1), f_back=None)
    inner = SimpleNamespace(f_locals=Names(frame=1), f_back=outer)
    fake = SimpleNamespace(_getframe=lambda depth: inner)
    monkeypatch.setattr(window, "sys", fake)
    assert window.frame_traced() is traced


def test_an_instruction_that_dynamo_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.14 lists some that no code has."""
    attach()
    monkeypatch.setitem(dis.opmap, "PSEUDO_JUMP_IF_TRUE", 300)
    assert ANSWERS.probe_again() == ""


def test_a_list_whose_value_cannot_be_read_has_no_own_truth() -> None:
    """Before torch 2.13 Dynamo's lists compute `value`, and fail for tensors."""

    class Listed:
        def realize(self) -> Listed:
            return self

        @property
        def value(self) -> Any:
            raise NotImplementedError("a tensor is not a constant")

    class Held(Listed):
        def __init__(self, value: Any) -> None:
            vars(self)["value"] = value

    class Truth:
        def __bool__(self) -> bool:
            return True

    assert not symbol_uses._has_own_truth(Listed())
    assert symbol_uses._has_own_truth(Held(Truth()))
    assert not symbol_uses._has_own_truth(Held([1]))
