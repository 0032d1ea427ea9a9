"""What a call's tensors are compared with: the helper says what torch says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuseopt import compat
from fuseopt.compat import fields
from fuseopt.runtime.build import Builder
from fuseopt.runtime.probe import CHANGED, MOVED, PROBE, Probe

Places = tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def helper() -> ctypes.PyDLL:
    return ctypes.PyDLL(Builder().load(PROBE, None, False)._name)


def tensors() -> list[Tensor]:
    return [
        torch.zeros(3, 5),
        torch.zeros(()),
        torch.zeros(0, 4),
        torch.zeros(2, 1, 2, 1, 2, 1, 2),  # more dims than a tensor keeps in itself
        torch.zeros(8, dtype=torch.bfloat16)[3:],
        torch.zeros(4, 6).t(),
        torch.zeros(9, requires_grad=True),
    ]


def places(ts: list[Tensor]) -> Places:
    """Where a call finds them: two dicts and a tuple."""
    return {"a": ts[0], "b": ts[1]}, {"c": ts[2]}, tuple(ts[3:])


def probe_of(ts: list[Tensor], helper: ctypes.PyDLL | None) -> Probe:
    probe = Probe(ts, helper, [i for i, t in enumerate(ts) if t.requires_grad])
    probe.look(*places(ts))
    probe.accept()
    return probe


@pytest.fixture(params=["fields", "functions", "python"])
def asked(
    request: pytest.FixtureRequest,
    helper: ctypes.PyDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> ctypes.PyDLL | None:
    """Each of the three ways to ask."""
    if request.param == "functions":
        monkeypatch.setattr(fields, "fields", fields.Fields)
    return helper if request.param != "python" else None


def test_the_fields_of_a_tensor_are_found_in_this_torch() -> None:
    assert fields.fields().words > 0


def test_unchanged_tensors_are_unchanged(asked: ctypes.PyDLL | None) -> None:
    ts = tensors()
    probe = probe_of(ts, asked)
    for _ in range(3):
        assert probe.look(*places(ts)) == 0
    assert probe.addresses.tolist() == [t.data_ptr() for t in ts]


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "moved": (torch.clone, MOVED),
    "dtype": (lambda t: t.view(torch.int32) if t.dim() else t.int(), CHANGED),
    "strides": (lambda t: t.as_strided(t.shape, [2 * s for s in t.stride()]), CHANGED),
    "shape": (lambda t: t[:1] if t.dim() else t.view(1), CHANGED),
    "dims": (lambda t: t.unsqueeze(0), CHANGED),
    "offset": (lambda t: t.as_strided(t.shape, t.stride(), t.storage_offset() + 1), 1),
}


@pytest.mark.parametrize(
    ("which", "change"),
    [(w, c) for w in (0, 1, 3, 5) for c in CHANGES if (w, c) != (1, "strides")],
)
def test_each_change_is_seen(
    asked: ctypes.PyDLL | None, which: int, change: str
) -> None:
    ts = tensors()
    for i in (0, 1, 3, 5):  # room for views of other strides and offsets
        t = ts[i]
        room = torch.zeros(64, dtype=t.dtype)
        ts[i] = room.as_strided(t.shape, t.stride())
    probe = probe_of(ts, asked)
    own = ts[which].detach()
    for _ in range(2):
        assert probe.look(*places(ts)) == 0
        ts[which].data = CHANGES[change][0](own)
        assert probe.look(*places(ts)) & CHANGES[change][1]
        ts[which].data = own
    assert probe.look(*places(ts)) == 0


def test_a_tensor_that_comes_back_to_an_older_address(
    asked: ctypes.PyDLL | None,
) -> None:
    ts = tensors()
    probe = probe_of(ts, asked)
    here, there = ts[0].detach(), torch.ones(3, 5)
    for _ in range(2):
        for place in (there, here):
            ts[0].data = place
            assert probe.look(*places(ts)) == MOVED
            # not accepted: it has still moved
            assert probe.look(*places(ts)) == MOVED
            probe.accept()
            assert probe.look(*places(ts)) == 0
            assert probe.addresses[0] == place.data_ptr()


def test_other_tensor_objects_at_the_same_address(asked: ctypes.PyDLL | None) -> None:
    ts = tensors()
    probe = probe_of(ts, asked)
    again = [t.detach().requires_grad_(t.requires_grad) for t in ts]
    for _ in range(2):
        assert probe.look(*places(again)) == 0


def test_a_lazy_clone_is_not_written(asked: ctypes.PyDLL | None) -> None:
    ts = tensors()
    probe = probe_of(ts, asked)
    assert probe.look(*places(ts)) == 0
    clone = torch._lazy_clone(ts[0])
    assert probe.look(*places(ts)) in (0, MOVED)
    # whoever writes at the address that was asked for must not write the clone
    assert ts[0].data_ptr() != torch._C._data_address(clone)


def test_a_dict_that_lost_its_tensors(helper: ctypes.PyDLL) -> None:
    ts = tensors()
    probe = probe_of(ts, helper)
    buffers, parameters, given = places(ts)
    assert probe.look({}, parameters, given) == CHANGED | MOVED
    assert probe.look({**buffers, **parameters}, parameters, given) == CHANGED | MOVED
    assert probe.look(buffers, parameters, given) == 0


def test_versions_count_up(asked: ctypes.PyDLL | None) -> None:
    ts = tensors()
    probe = probe_of(ts, asked)
    before = [t._version for t in ts]
    bumped = probe.bump()
    assert bumped == (asked is not None)
    if not bumped:
        compat.bump_versions([ts[i] for i in probe.mutated])
    assert [t._version - b for t, b in zip(ts, before, strict=True)] == [0] * 6 + [1]


def test_a_tensor_without_a_version_counter(helper: ctypes.PyDLL) -> None:
    with torch.inference_mode():
        ts = [*tensors()[:-1], torch.zeros(9, requires_grad=True)]
    probe = Probe(ts, helper, [6])
    probe.look(*places(ts))
    assert not probe.bump()
