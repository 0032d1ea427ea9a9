"""A tail beside the same lines in eager; prints JSON: is each equal, launches."""

from __future__ import annotations

import json

import torch

import fuseopt

SHAPES = ((33, 17), (7,), (4, 3, 2, 2), (1001,), (3, 5))
STEPS = 5


def trained(dtype: torch.dtype, compiled: bool) -> tuple[list[torch.Tensor], int]:
    """All tensors after a few steps with clip, AdamW, average; launches of a step."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in SHAPES]
    average = [p.detach().clone() for p in params]
    opt = torch.optim.AdamW(params, lr=1e-2, eps=1e-4)  # which float16 has
    norms: list[torch.Tensor] = []
    if compiled:
        around = {"ema": [(average, 0.99)], "zero_grad": True}
        tail = fuseopt.tail(opt, clip_grad_norm=1.0, **around)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn_like(p)
        if compiled:
            norms.append(tail().norm.clone())
            continue
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0))
        opt.step()
        torch._foreach_lerp_(average, [p.detach() for p in params], 1 - 0.99)
        opt.zero_grad()
    state = [x for p in params for x in opt.state[p].values()]
    launches = fuseopt.reports()[-1].launches if compiled else 0
    return [*(p.detach() for p in params), *average, *state, *norms], launches


if __name__ == "__main__":
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        want, _ = trained(dtype, False)
        got, launches = trained(dtype, True)
        equal = all(map(torch.equal, want, got))
        found[str(dtype)[6:]] = [equal, len(want) == len(got), launches]
    print(json.dumps(found))
