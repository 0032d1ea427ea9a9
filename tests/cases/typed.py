"""The type of each number that a step stores: int, float, bool, one of numpy's."""

from __future__ import annotations

import math

import numpy as np
import torch

from tests.cases.base import Scenario


class Stored(Scenario):
    """A step stores what `stored` makes of an integer, a float and a truth value that
    move: in an attribute, a group and a state.
    """

    abstract = True

    def ready(self, ps):
        self.i, self.x, self.f = 1, 0.25, True
        for group in self.param_groups:
            group["i"] = 3

    def before(self, turn, ps):
        self.i, self.x, self.f = turn + 2, self.x * 2, turn % 3 == 0
        self.param_groups[0]["lr"] *= 0.5
        for k, p in enumerate(ps):
            self.state[p]["n"] = turn + k % 2

    def stored(self, i, x, f, t):
        return i

    def n(self, t):
        """A number of elements."""
        return t.gt(0).sum().item()

    def _flag(self, t):
        """A truth value of a lane, as a tensor."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is t:
                    return self.state[p].setdefault("f", torch.tensor(True))
        return None

    @torch.no_grad()
    def step(self, closure=None):
        self.last = self.stored(self.i, self.x, self.f, None)
        for group in self.param_groups:
            group["last"] = self.stored(group["i"], group["lr"], self.f, None)
            group["i"] += 1
            for p in group["params"]:
                state = self.state[p]
                made = self.stored(state["n"], group["lr"], self.f, p.grad)
                state["last"] = made
                p.add_(p.grad, alpha=-group["lr"])


#: Expressions of an integer, a float, a truth value.
FORMS = {
    "Copy": "(i, x, f)",
    "Choice": "0 if i > 3 else i",
    "ChoiceOfFloat": "0 if x > 1.0 else x",
    "ChoiceOfThree": "0 if f else (x if i > 2 else i)",
    "ChoiceMixed": "1 if x > i else 2.0",
    "Whole": "int(x)",
    "WholeOfQuotient": "int(i / 2)",
    "Quotient": "i / 1",
    "Floor": "(i // 2, x // 1, i // 2.0, i % 2, x % 1, i % 2.0)",
    "Power": "(i ** 2, i ** -1, i ** 0.5, x ** 2, 2 ** i, i ** 2.0)",
    "Largest": "(max(i, x), min(i, x), max(0, i), max(0.0, i), min(1, x))",
    "Sum": "(sum((i, i)), sum((i, x)), sum((f, f)), sum((), 0))",
    "OfTruth": "(f + 1, f + f, f * x, f and i, i and f, f or i, not i, i or x)",
    "Compared": "(i > 2, x > 1.0, i == 3, i > 2 and x, not x)",
    "Cast": "(int(f), float(i), bool(i), bool(x), float(f), int(i))",
    "Absolute": "(abs(-i), abs(-x), abs(f), -f, +f, ~i)",
    "Rounded": "(round(x), round(x, 1), round(i))",
    "Function": "(math.floor(x), math.ceil(x), math.sqrt(i), math.trunc(x))",
    "Function2": "(math.pow(i, 2), math.fabs(i), math.gcd(i, 4), math.copysign(i, -1))",
    "Pair": "(divmod(i, 2), divmod(x, 1))",
    "Bits": "(i & 3, i | 8, i ^ 1, i << 1, i >> 1, f & True, f | False)",
    "Added": "(i + 0.0, i + 0, x * 1, i * 1.0, i - i, x - x, i * 0, 0 * x)",
    "OfNumpy": "(np.float64(x), np.float64(i), np.int64(i))",
    "NumpyArithmetic": "(np.float64(x) * i, np.sqrt(x), np.int64(i) + 1)",
    "NumpyFunction": "(np.maximum(i, x), np.floor(x), np.abs(i))",
    "IsInteger": "(x.is_integer(), x.hex(), x.as_integer_ratio())",
    "Complex": "(complex(i, x), i + 1j, (1j * x).imag)",
    "Length": "(len(self.param_groups), len((i, x)), isinstance(i, int))",
    "Known": "(type(i) is int, type(x) is float, isinstance(f, int))",
    "List": "[i, x, f]",
    "Dict": "{'i': i, 'x': x, i: f}",
}
#: Of a lane's gradient as well: the attribute and the group store None.
TENSORS = {
    "Item": "t.sum().item()",
    "ItemOfWhole": "t.numel() + t.ne(0).sum().item()",
    "ItemOfTruth": "t.gt(0).any().item()",
    "FloatOf": "(float(t.sum()), int(t.sum()), bool(t.sum() > 0))",
    "ByBranch": "(0 if t.sum() > 0 else i)",
    "ByBranchOfFloat": "(0 if t.sum() > 0 else x)",
    "ByBranchMixed": "(0 if t.sum() > 0 else x, i if t.max() > 1 else 2.5)",
    "ByBranchTruth": "(True if t.sum() > 0 else i)",
    "ByBranchOfTruth": "(f if t.sum() > 0 else False)",
    "ByBranchNone": "(None if t.sum() > 0 else i)",
    "ByItem": "(0 if t.sum().item() > 0 else i)",
    "ByTruth": "(0 if bool(t.sum() > 0 and i > 1) else i)",
    "ByBranchAdded": "(1 if t.sum() > 0 else x) + 1",
    "ByBranchFloated": "float(1 if t.sum() > 0 else x)",
    "ByBranchCut": "int(1 if t.sum() > 0 else x)",
    "ByBranchAsked": "isinstance(1 if t.sum() > 0 else x, int)",
    "ByBranchTyped": "type(1 if t.sum() > 0 else x) is int",
    "ByBranchTensor": "torch.tensor(1 if t.sum() > 0 else x)",
    "ByBranchFull": "torch.full((2,), 1 if t.sum() > 0 else 2)",
    "ByBranchFilled": "t.new_full((2,), 1 if t.sum() > 0 else x)",
    "ByBranchScale": "t * (1 if t.sum() > 0 else x)",
    "ByBranchScaleWhole": "t.int() * (2 if t.sum() > 0 else 3)",
    "ByBranchMask": "(t > 0) * (2 if t.sum() > 0 else 3)",
    "ByBranchWhere": "torch.where(t > 0, 2 if t.sum() > 0 else 3, 0)",
    "ByBranchText": "str(1 if t.sum() > 0 else x)",
    "ByBranchKey": "{1: 'a', 2: 'b'}[1 if t.sum() > 0 else 2]",
    "ByBranchIndex": "(x, i)[1 if t.sum() > 0 else 0]",
    "ByBranchFloor": "(7 if t.sum() > 0 else x) // 2",
    "ByBranchPower": "2 ** (3 if t.sum() > 0 else x)",
    "ByBranchRange": "len(range(2 if t.sum() > 0 else 3))",
    "OfFlag": "self._flag(t).item()",
    "OfFlagChosen": "(2 if self._flag(t) else 3)",
    "CountArithmetic": "(self.n(t) + 1, self.n(t) * 0.5, self.n(t) / 2, -self.n(t))",
    "CountPower": "(self.n(t) ** 2, 2 ** self.n(t))",
    "CountNegativePower": "(self.n(t) + 1) ** -1",
    "CountFloor": "(self.n(t) // 2, self.n(t) % 2)",
    "CountMost": "(max(self.n(t), 2), min(self.n(t), 4))",
    "CountMostMixed": "max(self.n(t), 4.5)",
    "ItemMost": "max(t.sum().item(), 0)",
    "ItemLeast": "min(1, t.sum().item())",
    "ItemMostFloat": "max(t.sum().item(), 0.0)",
    "ItemMostCast": "float(max(t.sum().item(), 0))",
    "CountCompared": "(self.n(t) > 2, (self.n(t) > 2) + 1, not self.n(t))",
    "CountTruth": "((self.n(t) > 2) * 2, (self.n(t) > 2) * 0.5)",
    "ItemArithmetic": "(t.sum().item() + 1, t.sum().item() * 0, -t.sum().item())",
    "Sizes": "(t.dim(), t.numel(), t.shape[0], t.size(0) / 2)",
}


def _made(name, form):
    scope = {"math": math, "np": np, "torch": torch}
    exec(f"def stored(self, i, x, f, t):\n    return {form}", scope)
    return type(name, (Stored,), {"stored": scope["stored"], "__module__": __name__})


for _name, _form in TENSORS.items():
    FORMS[_name] = f"None if t is None else ({_form})"
globals().update({name: _made(name, form) for name, form in FORMS.items()})
