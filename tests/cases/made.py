"""Tensors that a step makes of numbers that move: their sizes, their ends, their draws.

Each is a tensor by itself in every lane, and draws take their turn among others.
"""

from __future__ import annotations

import torch

from tests.cases.base import Scenario


class Made(Scenario):
    """A lane keeps what `made` makes of a count and a rate that move."""

    abstract = True

    def before(self, turn, ps):
        self.param_groups[0]["lr"] = 0.1 * (turn + 1)

    def made(self, n, x, t):
        return n

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["first"] = torch.rand_like(p)
                state["made"] = self.made(state["n"], group["lr"], p.grad)
                state["last"] = torch.rand(2)
                p.add_(p.grad, alpha=-group["lr"])


FORMS = {
    "DrawBySize": "torch.rand(n)",
    "DrawBySizeTwice": "(torch.rand(n), torch.rand(n))",
    "DrawPermuted": "torch.randperm(n)",
    "DrawBelow": "torch.randint(0, 5 + n, (3,))",
    "DrawByRate": "torch.normal(0.0, x, (2,))",
    "DrawByRateUsed": "torch.mul(t.flatten()[:3], torch.normal(0.0, x, (3,)))",
    "DrawInPlace": "torch.empty(n).normal_(0.0, x)",
    "FullBySize": "torch.full((n, 0), x)",
    "ZerosBySize": "torch.zeros(n)",
    "EyeBySize": "torch.eye(n)",
    "CountTo": "torch.arange(n)",
    "CountFrom": "torch.sum(torch.arange(n, n + 3))",
    "Line": "torch.linspace(0.0, x, 3)",
    "LineTwice": "(torch.linspace(0.0, x, 3), torch.linspace(0.0, x, 3))",
    "LineUsed": "torch.mul(t.flatten()[:3], torch.linspace(0.0, x, 3))",
    "LineAgain": "(lambda y: (y, y, y + 1))(torch.linspace(0.0, x, 3))",
    "LineBySize": "torch.linspace(0.0, x, n)",
    "Repeated": "t.flatten()[:2].repeat(n)",
    "Expanded": "t.flatten()[:1].expand(n).clone()",
    "Sliced": "t.flatten()[:n].clone()",
    "NewBySize": "t.new_full((n,), x)",
    "Padded": "torch.nn.functional.pad(t, (n, 1))",
    "Widest": "t.flatten().topk(min(n, 3))[0]",
}


def _made(name, form):
    scope = {"torch": torch}
    exec(f"def made(self, n, x, t):\n    return {form}", scope)
    return type(name, (Made,), {"made": scope["made"], "__module__": __name__})


for _name, _form in FORMS.items():
    globals()[_name] = _made(_name, _form)
