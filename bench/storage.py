"""In: shapes of a model, optimizers. Out: milliseconds a step of packed state.

    python -m bench.storage --model gpt2 --optimizers AdamW Lion
    python -m bench.storage --model gpt2 --optimizers AdamW --storage fp32 8bit --peers

Parameters and gradients of bfloat16 with masters of float32. "torch" casts gradients,
steps with torch's fused kernel (the foreach form where there is none), and casts the
parameters back. "fp32" and "split" are the kinds of masters of
`fuseopt.offload.MasterOptimizer`; "+bf16" and "+stochastic" also keep the state in
bfloat16. "8bit" is the step of `fuseopt.compile(..., storage="8bit")`, over parameters
of float32. "copy" is a copy that moves as many bytes as the first kind that is
measured, "copy 8bit" one for "8bit". A copy reads a line that it writes, so it moves
three bytes for each that it copies.

With `--peers`: "deepspeed" is CPUAdam between two casts, "bitsandbytes" and "torchao"
are their AdamW with state in 8 bits. One that cannot run has a line with the reason.

All are called in turns. One line of JSON for each: the median and the least time of the
thread itself with one thread, bytes an element as the Report has them, and `of_copy`:
the median time of the copy divided by that of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import lion_pytorch
import pytorch_optimizer
import torch

import fuseopt
from bench import peers
from bench.contenders import copied
from bench.peers import Unavailable
from fuseopt.offload import MasterOptimizer

#: Sizes of parameters, and how many there are of each.
MODELS: dict[str, list[tuple[tuple[int, ...], int]]] = {
    "small": [((768, 768), 12), ((768,), 24)],
    "gpt2": [
        ((50257, 768), 1),
        ((1024, 768), 1),
        ((2304, 768), 12),
        ((768, 768), 12),
        ((3072, 768), 24),
        ((768,), 98),
    ],
    "bert-base": [
        ((30522, 768), 1),
        ((512, 768), 1),
        ((768, 768), 48),
        ((3072, 768), 24),
        ((768,), 120),
    ],
    "qwen2-0.5b": [
        ((151936, 896), 1),
        ((896, 896), 48),
        ((128, 896), 48),
        ((4864, 896), 72),
        ((896,), 73),
        ((128,), 48),
    ],
}
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "Lion": (lion_pytorch.Lion, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "ADOPT": (pytorch_optimizer.ADOPT, {}),
    "AdEMAMix": (pytorch_optimizer.AdEMAMix, {}),
    "AdaBelief": (pytorch_optimizer.AdaBelief, {}),
}
#: By name: kind of the masters ("" for parameters of float32), format of the state.
STORAGE: dict[str, tuple[str, str | None]] = {
    "fp32": ("fp32", None),
    "split": ("split", None),
    "split+bf16": ("split", "bf16"),
    "split+stochastic": ("split", "bf16-stochastic"),
    "8bit": ("", "8bit"),
}


def parameters(model: str, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters of a model, with gradients."""
    params = []
    for size, n in MODELS[model]:
        for _ in range(n):
            p = torch.nn.Parameter((0.02 * torch.randn(size)).to(dtype))
            p.grad = (0.01 * torch.randn(size)).to(dtype)
            params.append(p)
    return params


def between_casts(params: list[Any], make: Callable[[Any], Any]) -> Callable[[], None]:
    """The step as trainers write it: gradients to float32, a step, weights back.
    `make` takes masters, and returns the step.
    """
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    for master in masters:
        master.grad = torch.zeros_like(master)
    inner = make(masters)

    def step() -> None:
        with torch.no_grad():
            torch._foreach_copy_([m.grad for m in masters], [p.grad for p in params])
            inner()
            torch._foreach_copy_(params, masters)

    return step


def packed(
    kind: str, make: Make, options: dict[str, Any], params: dict[torch.dtype, Any]
) -> tuple[Callable[[], Any], int]:
    """A step of fuseopt's, warm, and the bytes that it moves."""
    master, storage = STORAGE[kind]
    mine = {k: v for k, v in options.items() if k != "fused"}
    optimizer: Any
    if master:
        narrow = params[torch.bfloat16]
        optimizer = MasterOptimizer(
            narrow, make, master=master, storage=storage, lr=1e-3, **mine
        )
    else:
        optimizer = make(params[torch.float32], lr=1e-3, **mine)
        optimizer = fuseopt.compile(optimizer, storage=storage)
    for _ in range(3):
        optimizer.step()
    report = fuseopt.reports()[-1]
    if report.fallback:
        raise Unavailable(report.fallback)
    # a compiled step does not keep its optimizer alive
    return lambda: optimizer.step(), report.bytes


class Measured(NamedTuple):
    """The steps, the bytes that those of fuseopt move, the reasons of contenders that
    cannot run, and the factors by which times of copies are multiplied.
    """

    steps: dict[str, Callable[[], Any]]
    moved: dict[str, int]
    missing: dict[str, str]
    scale: dict[str, float]


def contenders(
    name: str, kinds: list[str], params: dict[torch.dtype, Any], others: bool
) -> Measured:
    """All who step one optimizer's parameters."""
    make, options = OPTIMIZERS[name]
    narrow = params[torch.bfloat16]
    steps: dict[str, Callable[[], Any]] = {}
    moved: dict[str, int] = {}
    missing: dict[str, str] = {}
    scale: dict[str, float] = {}

    def torchs(masters: Any) -> Any:
        return make(masters, lr=1e-3, **options).step

    def deepspeeds(masters: Any) -> Any:
        return peers.deepspeed(name, masters, "cpu")

    if {*kinds} != {"8bit"}:
        steps["torch"] = between_casts(narrow, torchs)
    for kind in kinds:
        steps[kind], moved[kind] = packed(kind, make, options, params)
    for kind, label in ((kinds[0], "copy"), ("8bit", "copy 8bit")):
        if kind in moved and label[5:] in ("", *kinds[1:]):
            copy = copied(moved[kind])
            steps[label] = copy.call
            # a large copy is of fewer bytes, and its time that of so much less
            scale[label] = moved[kind] / copy.figures["bytes"]
    makes: dict[str, Callable[[], Any]] = {}
    if others and {*kinds} != {"8bit"}:
        makes["deepspeed"] = lambda: between_casts(narrow, deepspeeds)
    if others and "8bit" in kinds:
        wide = params[torch.float32]
        makes["bitsandbytes"] = lambda: peers.bitsandbytes_8bit(name, wide)
        makes["torchao"] = lambda: peers.torchao_8bit(name, wide)
    for peer, made in makes.items():
        try:
            steps[peer] = made()
            steps[peer]()
        except Unavailable as error:
            steps.pop(peer, None)
            missing[peer] = str(error)
    return Measured(steps, moved, missing, scale)


def main() -> None:
    """Time the steps in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--optimizers", nargs="+", default=["AdamW"])
    parser.add_argument("--storage", nargs="+", default=[*STORAGE])
    parser.add_argument("--calls", type=int, default=12)
    parser.add_argument("--peers", action="store_true", help="other packages too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    masters = {STORAGE[kind][0] for kind in arguments.storage}
    params: dict[torch.dtype, Any] = {torch.bfloat16: [], torch.float32: []}
    if masters != {""}:
        params[torch.bfloat16] = parameters(arguments.model, torch.bfloat16)
    if "" in masters:
        params[torch.float32] = parameters(arguments.model, torch.float32)
    n = sum(p.numel() for p in params[torch.bfloat16] or params[torch.float32])
    for name in arguments.optimizers:
        measured = contenders(name, arguments.storage, params, arguments.peers)
        steps, moved, missing, scale = measured
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for k in range(arguments.calls + 2):
            for kind, step in steps.items():
                begin = time.thread_time()
                step()
                if k > 1:
                    taken = 1e3 * (time.thread_time() - begin)
                    times[kind].append(taken * scale.get(kind, 1))
        for kind, found in times.items():
            copy = times.get(f"copy {kind}", times.get("copy", [0.0]))
            row: dict[str, Any] = {
                "optimizer": name,
                "model": arguments.model,
                "kind": kind,
                "ms": round(statistics.median(found), 2),
                "least": round(min(found), 2),
                "bytes": round(moved.get(kind, 0) / n, 1),
            }
            if kind in moved:
                row["of_copy"] = round(statistics.median(copy) / row["ms"], 2)
            print(json.dumps(row), flush=True)
        for peer, reason in missing.items():
            row = {"optimizer": name, "kind": peer, "missing": reason}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
