"""In: an optimizer, a way to step. Out: bytes at the peak of a training step of GPT-2.

    python -m bench.memory in_backward AdamW 32

The measuring process, one for each way: the small GPT-2 of transformers' default
configuration with random weights, a batch of one text of so many tokens. Ways:

    for-loop, foreach   loss.backward(); opt.step(); opt.zero_grad(), in eager
    compiled            the same with fuseopt.compile(opt)
    in_backward         fuseopt.in_backward(model, ...), default buckets

The last of four steps counts: state is made, and all is compiled. `peak_bytes` is what
torch's allocator had given at the peak of that step; `resident_bytes` is the most
memory that the process had in it, libraries and all, in a run of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from bench.allocations import Allocations
from bench.counting import peak_resident
from bench.models import ModelMissing
from bench.results import Figures

WAYS = ("for-loop", "foreach", "compiled", "in_backward")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, **form: torch.optim.AdamW(params, 1e-4, **form),
    "SGD": lambda params, **form: torch.optim.SGD(params, 1e-4, momentum=0.9, **form),
    "Adafactor": lambda params, **form: torch.optim.Adafactor(params, 1e-4, **form),
}
STEPS = 4


def network() -> torch.nn.Module:
    """GPT-2 with 124 million parameters, without dropout. Raises ModelMissing."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise ModelMissing("transformers is not installed") from error
    torch.manual_seed(0)
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made: torch.nn.Module = GPT2LMHeadModel(GPT2Config(**none))
    return made


def training_step(
    model: torch.nn.Module, way: str, optimizer: str, tokens: int
) -> Callable[[], None]:
    """A step of the training loop in one of the ways."""
    import fuseopt

    make = OPTIMIZERS[optimizer]
    ids = torch.randint(0, 50257, (1, tokens))

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(ids, labels=ids, use_cache=False).loss
        return found

    if way == "in_backward":
        handle = fuseopt.in_backward(model, make)

        def in_backward() -> None:
            loss().backward()
            handle.zero_grad()

        return in_backward
    form = {"foreach": way != "for-loop"}
    opt = make(model.parameters(), **form)
    if way == "compiled":
        opt = fuseopt.compile(opt)

    def plainly() -> None:
        loss().backward()
        opt.step()
        opt.zero_grad()

    return plainly


def measure(way: str, optimizer: str, tokens: int, resident: bool) -> Figures:
    """The figures of one way, in this process."""
    counted = Allocations()
    with contextlib.nullcontext() if resident else counted:
        model = network()
        step = training_step(model, way, optimizer, tokens)
        for _ in range(STEPS - 1):
            with counted.region("step"):
                step()
        if resident:
            return {"resident_bytes": peak_resident(step)}
        with counted.region("step"):
            step()
    elements = sum(p.numel() for p in model.parameters())
    return {"peak_bytes": counted.peaks("step")[-1], "elements": elements}


def figures_of(way: str, optimizer: str, tokens: int) -> Figures:
    """The figures of one way, from two processes of its own."""
    found: Figures = {}
    for how in ((), ("--resident",)):
        done = subprocess.run(
            (sys.executable, "-m", "bench.memory", way, optimizer, str(tokens), *how),
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
            cwd=Path(__file__).parent.parent,
            check=True,
        )
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Iterable[str] | None = None) -> None:
    """Measure one way and print its figures as JSON."""
    parser = argparse.ArgumentParser(description="bytes at the peak of a step")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("optimizer", choices=OPTIMIZERS)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--resident", action="store_true")
    told: Any = parser.parse_args(None if arguments is None else [*arguments])
    print(json.dumps(measure(told.way, told.optimizer, told.tokens, told.resident)))


if __name__ == "__main__":
    main()
