"""Optimizers x storage: the bits of the reference, the launches of the plain step, and
the bytes that the generated text loads and stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt import Storage
from fuseopt.compiler.report import Report
from fuseopt.offload import MasterOptimizer
from fuseopt.storage.formats import FORMATS
from tests.storage.reference import Reference, give_grads, params_of, same_bits

Make = Callable[..., Optimizer]
#: (optimizer, launches of the plain step, tensors of its state of a parameter's sizes).
#: Adafactor reduces, so it reads a gradient several times; 0 stands for "not the same".
OPTIMIZERS: dict[str, tuple[Make, int, int]] = {
    "AdamW": (torch.optim.AdamW, 1, 2),
    "Lion": (lion_pytorch.Lion, 1, 1),
    "ADOPT": (pytorch_optimizer.ADOPT, 1, 2),
    "AdEMAMix": (pytorch_optimizer.AdEMAMix, 1, 3),
    "AdaBelief": (pytorch_optimizer.AdaBelief, 1, 2),
    "Adafactor": (torch.optim.Adafactor, 4, 0),
}
#: By name: kind of the masters, format of the state; the bytes of an element's weight
#: and gradient in a step, and those of one tensor of the state.
STORAGE: dict[str, tuple[str, str, int, int]] = {
    "bf16": ("", "bf16", 12, 4),
    "stochastic": ("", "bf16-stochastic", 12, 4),
    "8bit": ("", "8bit/64", 12, 2),
    "split master": ("split", "", 10, 8),
    "master and copy": ("fp32", "", 12, 8),
    "split master, 8bit": ("split", "8bit/64", 10, 2),
    "master, stochastic": ("fp32", "bf16-stochastic", 12, 4),
}
#: Whole blocks and parts of one, matrices that Adafactor factors, a vector.
SIZES = ((16, 16), (5, 64), (3, 7), (200,), (64,))
slow = pytest.mark.slow
#: Each storage with one of the optimizers; the others are slow.
TABLE = [
    pytest.param(name, storage, marks=() if (i + k) % len(OPTIMIZERS) == 0 else slow)
    for k, name in enumerate(OPTIMIZERS)
    for i, storage in enumerate(STORAGE)
]


class Both:
    """The meaning in eager, and fuseopt's optimizer."""

    def __init__(self, make: Make, kind: str, form: str, n: int, **options: Any):
        self.kind, self.number = kind, 0
        dtype = torch.bfloat16 if kind else torch.float32
        self.theirs, self.ours = (
            params_of(n, dtype=dtype, sizes=SIZES) for _ in range(2)
        )
        self.wide = self.theirs
        if kind:
            self.wide = [torch.nn.Parameter(p.detach().float()) for p in self.theirs]
        storage = Storage(form, least=0) if form else None
        self.reference = Reference(make(self.wide, lr=1e-2), form or {})
        plain = (lambda p: make(p, lr=1e-2)) if kind == "" else make
        self.mine: Any = (
            MasterOptimizer(
                self.ours, make, master=kind, storage=storage, options=options, lr=1e-2
            )
            if kind
            else fuseopt.compile(plain(self.ours), storage=storage, **options)
        )

    def step(self) -> None:
        give_grads(self.number, self.theirs, self.ours)
        self.number += 1
        if self.kind:
            for p, wide in zip(self.theirs, self.wide, strict=True):
                assert p.grad is not None
                wide.grad = p.grad.float()
        self.reference.step()
        self.mine.step()
        for i, (wide, q) in enumerate(zip(self.wide, self.ours, strict=True)):
            assert same_bits(self._narrow(wide.detach()), q), f"parameter {i}"
            want = self.reference.content(wide)
            have = dict(self.mine.state.get(q, {}))
            assert [*want] == [*have]
            for key, value in want.items():
                assert same_bits(value, have[key]), f"state {i} {key}"
        if self.kind:
            held = self.mine._masters.every
            assert all(map(same_bits, (x.wide() for x in held), self.wide))

    def _narrow(self, wide: torch.Tensor) -> torch.Tensor:
        if not self.kind:
            return wide
        if self.kind == "fp32":
            return wide.bfloat16()
        parts = FORMATS["split"].empty(wide, 0)
        FORMATS["split"].pack(wide, parts)
        return parts[""]


@pytest.mark.family(3)
@pytest.mark.parametrize(("name", "storage"), TABLE)
def test_bits_launches_and_bytes(name: str, storage: str, tmp_path: Path) -> None:
    make, launches, states = OPTIMIZERS[name]
    kind, form, of_weight, of_state = STORAGE[storage]
    both = Both(make, kind, form, 10, dump_dir=str(tmp_path))
    for _ in range(5):
        both.step()
    report = fuseopt.reports()[-1]
    assert report.fallback == ""
    assert report.launches == launches
    if states:
        (body,) = {x.bytes_per_element for k in report.kernels for x in k.bodies}
        assert body == of_weight + states * of_state
        check_bytes(report, tmp_path)


# ---------------------------------------------------------------- generated text

SIZE = {"float": 4, "double": 8, "int64_t": 8, "int32_t": 4, "bool": 1}
SIZE |= {"uint16_t": 2, "int16_t": 2, "uint8_t": 1}
ROW = re.compile(r"^static void row(\d+)(?:s\d+)?\((.*?)\) \{$(.*?)^\}$", re.M | re.S)
N_SLOTS = re.compile(r"t\.position\[lane \* (\d+) \+ ")
POINTER = re.compile(r"(\w+)\* __restrict__ p(\d+)")


def moved(text: str) -> dict[int, int]:
    """Return the bytes that a kernel's C++ loads and stores for an element, by the
    number of the variant. Arrays that hold a block are no memory.
    """
    n_slots = int(N_SLOTS.findall(text)[0])
    places: dict[int, dict[tuple[int, str], int]] = {}
    for number, parameters, body in ROW.findall(text):
        of = places.setdefault(int(number), {})
        for kind, slot in POINTER.findall(parameters):
            if int(slot) >= n_slots:
                continue
            place = rf"(?<!&)p{slot}\[i \+ j\]"
            stored = re.search(rf"{place} = |\*w{slot} = ", body)
            loaded = re.search(rf"{place}(?! = )|\(\*w{slot}\)", body)
            assert stored or loaded, f"slot {slot} is handed in vain"
            if stored:
                of[int(slot), "store"] = SIZE[kind]
            if loaded:
                of[int(slot), "load"] = SIZE[kind]
    return {number: sum(of.values()) for number, of in places.items()}


def check_bytes(report: Report, folder: Path) -> None:
    """Do the kernels' texts move what the Report has?"""
    (step, *_) = sorted(folder.glob("step*"), key=lambda x: int(x.name[4:]))[-1:]
    for k, kernel in enumerate(report.kernels):
        found = moved((step / f"kernel{k}.cpp").read_text())
        of_report = [x.bytes_per_element for x in kernel.bodies]
        of_text = [found.get(n, 0) for n in range(len(of_report))]
        assert of_text == of_report
