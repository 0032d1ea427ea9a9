"""In: shapes of a model, optimizers. Out: milliseconds a step of packed state.

    python -m bench.storage --model gpt2 --optimizers AdamW Lion

Parameters and gradients of bfloat16 with masters of float32. "torch" casts gradients,
steps with torch's fused kernel (the foreach form where there is none), and casts the
parameters back. "fp32" and "split" are the kinds of masters of
`fuseopt.offload.MasterOptimizer`; "+bf16" and "+stochastic" also keep the state in
bfloat16. "copy" reads and writes as many bytes as the step of "fp32" moves. All are
called in turns. One line of JSON for each: the median and the least time of the thread
itself with one thread, and bytes an element as the Report has them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import fuseopt
from fuseopt.offload import MasterOptimizer
from tests.papers import Lion

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
}
Make = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "Lion": (Lion, {}),
}
STORAGE = {
    "fp32": ("fp32", None),
    "split": ("split", None),
    "split+bf16": ("split", "bf16"),
    "split+stochastic": ("split", "bf16-stochastic"),
}


def parameters(model: str) -> list[torch.nn.Parameter]:
    """Parameters of a model in bfloat16, with gradients."""
    params = []
    for size, n in MODELS[model]:
        for _ in range(n):
            p = torch.nn.Parameter((0.02 * torch.randn(size)).bfloat16())
            p.grad = (0.01 * torch.randn(size)).bfloat16()
            params.append(p)
    return params


def with_casts(params: list[Any], make: Make, options: Any) -> Callable[[], None]:
    """The step as trainers write it with torch's own optimizer."""
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = make(masters, lr=1e-3, **options)
    for master in masters:
        master.grad = torch.empty_like(master)

    def step() -> None:
        with torch.no_grad():
            grads = [m.grad for m in masters]
            torch._foreach_copy_(grads, [p.grad for p in params])
            optimizer.step()
            torch._foreach_copy_(params, masters)

    return step


def main() -> None:
    """Time the steps in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--optimizers", nargs="+", default=["AdamW"])
    parser.add_argument("--storage", nargs="+", default=[*STORAGE])
    parser.add_argument("--calls", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.optimizers:
        make, options = OPTIMIZERS[name]
        steps: dict[str, Callable[[], Any]] = {}
        moved: dict[str, float] = {}
        steps["torch"] = with_casts(parameters(arguments.model), make, options)
        for kind in arguments.storage:
            master, storage = STORAGE[kind]
            mine = {k: v for k, v in options.items() if k != "fused"}
            params = parameters(arguments.model)
            optimizer = MasterOptimizer(
                params, make, master=master, storage=storage, lr=1e-3, **mine
            )
            for _ in range(3):
                optimizer.step()
            steps[kind] = optimizer.step
            report = fuseopt.reports()[-1]
            n = sum(p.numel() for p in params)
            moved[kind] = report.bytes / n
        source = torch.empty(int(n * moved[arguments.storage[0]] / 8))
        target = torch.empty_like(source)
        steps["copy"] = lambda s=source, t=target: t.copy_(s)
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for k in range(arguments.calls + 2):
            for kind, step in steps.items():
                begin = time.thread_time()
                step()
                if k > 1:
                    times[kind].append(1e3 * (time.thread_time() - begin))
        for kind, found in times.items():
            row = {
                "optimizer": name,
                "model": arguments.model,
                "kind": kind,
                "ms": round(statistics.median(found), 2),
                "least": round(min(found), 2),
                "bytes": round(moved.get(kind, 0), 1),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
