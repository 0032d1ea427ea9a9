"""Which optimizers are recorded, with the bits of eager, at which sizes."""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

import fuseopt
from tests.steps import differences, make_params, set_grads

from .way import recorded

SHAPES = ((8,), (3, 4), (5,))
ELEVEN = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta"),
    *("RMSprop", "ASGD", "Rprop"),
)
OPTIONS = {"SGD": {"lr": 0.1, "momentum": 0.9}}
PACKAGES = (
    ("lion_pytorch", "Lion", {}),
    ("schedulefree", "AdamWScheduleFree", {}),
    ("pytorch_ranger", "Ranger", {}),
    ("torch_optimizer", "Yogi", {}),
    ("torch_optimizer", "AdaBound", {}),
    ("torch_optimizer", "Lamb", {}),
    ("torch_optimizer", "QHAdam", {"lr": 1e-3}),
    ("pytorch_optimizer", "AdaBelief", {}),
    ("pytorch_optimizer", "Adan", {}),
    ("pytorch_optimizer", "StableAdamW", {}),
)
Make = Callable[[list[Any]], Optimizer]


def optimizers() -> Iterator[tuple[str, Make]]:
    """All of them, by name."""
    import importlib

    from tests.papers import ELEMENTWISE, INEXACT, REDUCING

    for name in ELEVEN:
        for foreach in (True, False):
            kind, options = getattr(torch.optim, name), OPTIONS.get(name, {})
            form = "foreach" if foreach else "loop"
            yield (
                f"{name} {form}",
                lambda ps, k=kind, o=options, f=foreach: k(ps, foreach=f, **o),
            )
    for case in (*ELEMENTWISE, *REDUCING, *INEXACT):
        yield f"papers.{case[0].__name__}", case[0]
    for home, name, options in PACKAGES:
        kind = getattr(importlib.import_module(home), name)
        yield f"{home}.{name}", lambda ps, k=kind, o=options: k(ps, **o)


def run(make: Make, lanes: int, record: bool, turns: int = 4) -> dict[str, Any]:
    """Some steps beside eager; what became of them, thread seconds of the first two."""
    torch._dynamo.reset()
    fuseopt.reset() if hasattr(fuseopt, "reset") else None
    shapes = [SHAPES[i % len(SHAPES)] for i in range(lanes)]
    theirs, mine = make_params(shapes), make_params(shapes)
    plain, opt = make(theirs), make(mine)
    for o in (plain, opt):
        if callable(getattr(o, "train", None)):
            o.train()
    found: dict[str, Any] = {}
    seconds = []
    with recorded() if record else nullcontext([]) as every:
        try:
            fuseopt.compile(opt)
            for turn in range(turns):
                set_grads(theirs, mine, turn)
                plain.step()
                begin = time.thread_time()
                opt.step()
                seconds.append(round(time.thread_time() - begin, 3))
                wrong = differences(theirs, plain, mine, opt)
                if wrong:
                    found["wrong"] = wrong[:2]
                    break
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:200]
        told = fuseopt.reports()
        found["led"] = any("do as these" in r.traced for r in told)
        found["fallback"] = [r.fallback for r in told if r.fallback][:1]
        found["launches"] = told[-1].launches if told else None
        found["seconds"] = seconds
        if every:
            step = every[-1]
            found["steps"], found["why"] = step.steps, step.recorder.why
            found["recordings"] = step.recorder.recorded
    return found


def main() -> None:
    """Print a line of JSON for each optimizer, size and way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lanes", nargs="+", type=int)
    parser.add_argument("--way", choices=("recorder", "today"), default="recorder")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, make in optimizers():
        if given.only in name:
            for lanes in given.lanes:
                line = run(make, lanes, given.way == "recorder")
                print(json.dumps([name, lanes, given.way, line]), flush=True)


if __name__ == "__main__":
    main()
