"""Modules with a step that reads a source; see table.py."""

from __future__ import annotations

import textwrap
from typing import Any

from tests.sources.holders import CONSUMED, FILLED, MEMORY
from tests.sources.objects import INTERPRETER, OBJECTS
from tests.sources.table import CLOCKS, ITERATORS, RANDOM, SYSTEM, Source

FRAME = '''\
"""Reads {name}."""
import array, collections, contextvars, ctypes, dataclasses, datetime, decimal, enum
import fractions, functools, gc, heapq, io, itertools, logging, math, operator, os
import pathlib, queue, random, secrets, struct, sys, threading, time, types, uuid
import warnings, weakref
import numpy as np
import torch
from torch.optim import Optimizer

KEY = 2

class Base(Optimizer):
    r = 1.0
{filled}
{around}

class Drawn(Base):
    def __init__(self, params):
        super().__init__(params, dict(lr=0.125))
        {setup}

    @torch.no_grad()
    def step(self, closure=None):
{body}

def _before(opt, turn):
    {before}

def _begin(opt, turn):
    {begin}

def _left(opt):
    return {left}

def _bounds(opt):
    return {low}, {high}

def _build(lanes, dtype):
    global PS
    PS = []
    for n in range(lanes):
        drawn = torch.Generator().manual_seed(n)
        PS.append(torch.nn.Parameter(torch.randn((5,), generator=drawn, dtype=dtype)))
    return PS, Drawn(PS)
'''
#: Where a step reads it.
BODIES = {
    "once": """\
        group = self.param_groups[0]
        p = group["params"][0]
        r = {read}
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * r)
""",
    "each": """\
        for group in self.param_groups:
            for p in group["params"]:
                r = {read}
                p.add_(p.grad, alpha=-group["lr"] * r)
""",
    "tensor": """\
        group = self.param_groups[0]
        p = group["params"][0]
        r = {read}
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * r)
""",
    "kept": """\
        group = self.param_groups[0]
        p = group["params"][0]
        r = {read}
        self.kept = r
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["kept"] = r
                p.mul_(0.5)
""",
}

SOURCES: dict[str, Source] = {
    **RANDOM,
    **CLOCKS,
    **SYSTEM,
    **ITERATORS,
    **CONSUMED,
    **MEMORY,
    **OBJECTS,
    **INTERPRETER,
}


def text(name: str, where: str) -> str:
    """The module of a step that reads a source."""
    source = SOURCES[name]
    parts: dict[str, Any] = {
        "name": name,
        "filled": FILLED,
        "around": source.around,
        "setup": source.setup,
        "body": BODIES[where].format(read=source.read),
        "before": source.before,
        "begin": source.begin,
        "left": source.left,
        "low": source.low or "0",
        "high": source.high or "0",
    }
    return textwrap.dedent(FRAME).format(**parts)
