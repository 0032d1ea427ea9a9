"""Random sequences of what a user does between two steps, over published optimizers.

`differences(seed)` trains two of them alike, one in eager and one compiled, and tells
what differs after each step: parameters, gradients, averages, state and groups, to the
bit, with types, dtypes, strides and the order of dicts. Each event is done to both.

    python -m tests.numerics.fuzz_events FIRST LAST
"""

from __future__ import annotations

import copy
import os
import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from fuseopt.replicate import worth
from tests.numerics.fuzz_process import settle
from tests.papers.adaptive import AdaBelief
from tests.papers.momentum import Lion
from tests.papers.reducing import LAMB
from tests.steps import same_bits, turned

Build = Callable[[Any, random.Random], Optimizer]
Event = Callable[["Training", random.Random], None]

SHAPES = [(3, 4), (5,), (), (7, 2, 3), (6, 4), (33,), (1,), (3, 4)]
LANES = (1, 3, 6, 24, 40)
#: Where few lanes may be led too: what Dynamo takes goes by the number of lanes.
LED_FROM, FEW_LANES = 6, (1, 3, 6, 9, 12)
FORMS = (None, True, False)


def _torchs(name: str, lr: float = 1e-2, **choices: Sequence[Any]) -> Build:
    def build(params: Any, rng: random.Random) -> Optimizer:
        options = {key: rng.choice(values) for key, values in choices.items()}
        optimizer: Optimizer = getattr(torch.optim, name)(params, lr=lr, **options)
        return optimizer

    return build


BUILDS: dict[str, Build] = {
    "AdamW": _torchs("AdamW", amsgrad=(True, False), foreach=FORMS),
    "SGD": _torchs("SGD", momentum=(0, 0.9), weight_decay=(0, 0.1), foreach=FORMS),
    "RMSprop": _torchs("RMSprop", momentum=(0, 0.9), centered=(True, False)),
    "Adagrad": _torchs("Adagrad", lr_decay=(0, 0.1)),
    "Adafactor": _torchs("Adafactor"),
    "Adadelta": _torchs("Adadelta", lr=1.0),
    "Adamax": _torchs("Adamax"),
    "NAdam": _torchs("NAdam"),
    "RAdam": _torchs("RAdam"),
    "Rprop": _torchs("Rprop"),
    "ASGD": _torchs("ASGD"),
    "Lion": lambda params, rng: Lion(params, 1e-2, weight_decay=0.1),
    "LAMB": lambda params, rng: LAMB(params, 1e-2),
    "AdaBelief": lambda params, rng: AdaBelief(params, 1e-2),
}
WAYS = ("eager", "own", "bound", "tail")


class Training:
    """An optimizer with its parameters, stepped in one of WAYS. `max_norm`: of a clip
    before the step, or None; `decay`: of averages after it, or None.
    """

    def __init__(
        self,
        name: str,
        lanes: int,
        seed: int,
        way: str,
        max_norm: float | None,
        decay: float | None,
    ) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        shapes = [SHAPES[k % len(SHAPES)] for k in range(lanes)]
        self.params = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
        first, rest = self.params[: lanes // 3], self.params[lanes // 3 :]
        several = bool(first) and name != "Rprop" and rng.random() < 0.5
        groups = [{"params": first}, {"params": rest, "weight_decay": 0.05}]
        self.optimizer = BUILDS[name](groups if several else self.params, rng)
        self.averages = [p.detach().clone() for p in self.params]
        self.saved = copy.deepcopy(self.optimizer.state_dict())
        self.hooks: list[Any] = []
        self.max_norm, self.decay = max_norm, decay
        self.tail: Any = None
        self.step_itself: Callable[..., Any] = self.optimizer.step
        if way == "own":
            fuseopt.compile(self.optimizer)
            self.step_itself = self.optimizer.step
        elif way == "bound":
            self.step_itself = torch.compile(self.step_itself, backend="fuseopt")
        elif way == "tail":
            averages = [] if decay is None else [(self.averages, decay)]
            self.tail = fuseopt.tail(
                self.optimizer, clip_grad_norm=max_norm, zero_grad=False, ema=averages
            )

    def stepped(self) -> list[Any]:
        """The parameters of the groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self) -> Tensor | None:
        """Clip, step, average; the total norm."""
        if self.tail is not None:
            norm: Tensor | None = self.tail().norm
            return norm
        norm = None
        if self.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.stepped(), self.max_norm)
        self.step_itself()
        if self.decay is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.params, 1 - self.decay)
        return norm

    def content(self) -> dict[str, Any]:
        """All that must be the same, with parameters by their number."""
        number = {id(p): k for k, p in enumerate(self.params)}
        return {
            "parameters": [p.detach() for p in self.params],
            "gradients": [p.grad for p in self.params],
            "averages": self.averages,
            "state": {number[id(p)]: s for p, s in self.optimizer.state.items()},
            "groups": [
                {name: x for name, x in group.items() if name != "params"}
                for group in self.optimizer.param_groups
            ],
        }


def alike(x: Any, y: Any) -> bool:
    """Are both the same to the bit? Of tensors, with strides."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.stride() == y.stride() and same_bits(x, y)
    if isinstance(x, dict):
        return list(x) == list(y) and all(alike(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(alike, x, y))
    return type(x) is type(y) and (x == y or (x != x and y != y))


# ---------------------------------------------------------------- what a user does


def new_gradients(training: Training, rng: random.Random) -> None:
    """Of some None, some in the old memory, some laid out otherwise."""
    for p in training.stepped():
        how, seed = rng.random(), rng.randrange(1 << 30)
        generator = torch.Generator().manual_seed(seed)
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if how < 0.1:
            p.grad = None
        elif how < 0.5 and p.grad is not None:
            p.grad.copy_(grad)
        else:
            p.grad = turned(grad) if how < 0.55 else grad


def all_gradients(training: Training, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for p in training.stepped():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def odd_gradient(training: Training, rng: random.Random) -> None:
    """One element that is no ordinary number."""
    p = rng.choice(training.stepped())
    x = rng.choice([float("inf"), float("nan"), -0.0, 1e-42])
    if p.grad is not None and p.grad.is_contiguous():
        p.grad.view(-1)[0] = x


def no_gradients(training: Training, rng: random.Random) -> None:
    training.optimizer.zero_grad()


def rates(training: Training, rng: random.Random) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] = rng.choice([1e-3, 2e-2, 0.5, 0.0, -0.0, 1e-30])


#: Options of groups and what a user may set, whatever the optimizer.
OPTIONS: dict[str, Sequence[Any]] = {
    "weight_decay": (0.0, 1e-3, 0.1),
    "eps": (1e-8, 1e-3, 0.5),
    "momentum": (0.1, 0.5, 0.9),
    "betas": ((0.8, 0.99), (0.9, 0.999), (0.0, 0.99)),
    "alpha": (0.5, 0.9),
    "rho": (0.5, 0.9),
    "lambd": (1e-4, 0.1),
    "etas": ((0.4, 1.3), (0.5, 1.2)),
    "maximize": (True, False),
    "foreach": FORMS,
}


def an_option(training: Training, rng: random.Random) -> None:
    group = rng.choice(training.optimizer.param_groups)
    name = rng.choice([x for x in OPTIONS if x in group])
    if not isinstance(group[name], tuple) or isinstance(OPTIONS[name][0], tuple):
        group[name] = rng.choice(OPTIONS[name])


def another_group(training: Training, rng: random.Random) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shapes = [rng.choice(SHAPES) for _ in range(rng.choice([1, 2, 5]))]
    if training.decay is None and len(training.params) < 60:
        new = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        training.params += new
        training.optimizer.add_param_group({"params": new})


def save(training: Training, rng: random.Random) -> None:
    training.saved = copy.deepcopy(training.optimizer.state_dict())


def load(training: Training, rng: random.Random) -> None:
    sizes = [len(group["params"]) for group in training.saved["param_groups"]]
    if sizes == [len(g["params"]) for g in training.optimizer.param_groups]:
        training.optimizer.load_state_dict(copy.deepcopy(training.saved))


def forget_all(training: Training, rng: random.Random) -> None:
    training.optimizer.state.clear()


def forget_one(training: Training, rng: random.Random) -> None:
    if training.optimizer.state:
        del training.optimizer.state[rng.choice([*training.optimizer.state])]


def other_memory(training: Training, rng: random.Random) -> None:
    p = rng.choice(training.params)
    p.data = p.data.clone()


def other_layout(training: Training, rng: random.Random) -> None:
    p = rng.choice(training.params)
    p.data, p.grad = turned(p.data), None


def other_dtype(training: Training, rng: random.Random) -> None:
    p = rng.choice(training.params)
    dtype = rng.choice([torch.bfloat16, torch.float64])
    if training.decay is None:
        p.data, p.grad = p.data.to(dtype), None
        training.optimizer.state.pop(p, None)


def a_frozen_one(training: Training, rng: random.Random) -> None:
    p = rng.choice(training.params)
    p.requires_grad_(not p.requires_grad)


def _a_state(training: Training, rng: random.Random) -> dict[str, Any]:
    held = [s for s in training.optimizer.state.values() if s]
    return rng.choice(held) if held else {}


def other_state(training: Training, rng: random.Random) -> None:
    state = _a_state(training, rng)
    names = [name for name, x in state.items() if isinstance(x, Tensor)]
    if names:
        name = rng.choice(names)
        state[name] = state[name].clone()


def another_count(training: Training, rng: random.Random) -> None:
    state, count = _a_state(training, rng), rng.choice([0, 5, 100])
    if isinstance(state.get("step"), Tensor):
        state["step"].fill_(count)
    elif "step" in state:
        state["step"] = count


def another_order(training: Training, rng: random.Random) -> None:
    params = rng.choice(training.optimizer.param_groups)["params"]
    if training.decay is None:
        params.insert(0, params.pop(rng.randrange(len(params))))


def threads(training: Training, rng: random.Random) -> None:
    torch.set_num_threads(rng.choice([1, 2]))


def a_hook(training: Training, rng: random.Random) -> None:
    """One that halves gradients before the step, or the last one is removed."""

    def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in training.stepped():
            if p.grad is not None:
                p.grad.mul_(0.5)

    if training.hooks and rng.random() < 0.6:
        training.hooks.pop().remove()
    else:
        training.hooks.append(training.optimizer.register_step_pre_hook(halve))


#: How often each is done, beside the others.
EVENTS: dict[Event, float] = {
    **dict.fromkeys((new_gradients, all_gradients), 12.0),
    **dict.fromkeys((rates, an_option, other_layout, load), 3.0),
    **dict.fromkeys((other_memory, other_state, another_count, another_group), 1.5),
    **dict.fromkeys((save, forget_one, odd_gradient, a_hook), 1.0),
    **dict.fromkeys((forget_all, other_dtype, a_frozen_one, another_order), 0.7),
    **dict.fromkeys((threads, no_gradients), 0.5),
}


# ---------------------------------------------------------------- both beside


def _done(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return error


def differences(seed: int, sizes: Sequence[int] = LANES) -> list[str]:
    """Train both as `seed` says: [] if nothing differs, else what, and what was done
    before. An error ends both; the other must have one as well. `sizes`: how many
    parameters.
    """
    rng = random.Random(seed)
    name, way = rng.choice([*BUILDS]), rng.choice(WAYS[1:])
    lanes = rng.choice(sizes)
    is_tail = way == "tail"
    max_norm = rng.choice([0.5, 1.0, None]) if is_tail else None
    decay = 0.9 if is_tail and rng.random() < 0.6 else None
    of_both = name, lanes, seed
    pair = [Training(*of_both, w, max_norm, decay) for w in (WAYS[0], way)]
    told = [f"{name}, {lanes} lanes, {way}, {max_norm}, {decay}"]
    before = torch.get_num_threads()
    try:
        for _ in range(rng.choice([8, 15, 25])):
            for _ in range(rng.choice([0, 1, 1, 2, 3])):
                (event,) = rng.choices([*EVENTS], [*EVENTS.values()])
                told.append(event.__name__)
                of_event = rng.randrange(1 << 30)
                for training in pair:
                    event(training, random.Random(of_event))
            results = [_done(training.step) for training in pair]
            told.append("step")
            raised = [isinstance(x, Exception) for x in results]
            if all(raised):
                return []
            if any(raised) or not alike(*results):
                return [f"results: {results}", *told]
            mine, theirs = (training.content() for training in pair)
            found = [key for key in mine if not alike(mine[key], theirs[key])]
            if found:
                return [*found, *told]
    finally:
        torch.set_num_threads(before)
    return []


def main(first: int, last: int) -> int:
    """Print what became of the seeds from `first` to before `last`; 1: one differs.

    Of most seeds the optimizer has few lanes, which are led as many are.
    """
    # every step is to be a compiled one, also where eager would be faster
    os.environ["FUSEOPT_EAGER_IF_FASTER"] = "0"
    warnings.simplefilter("ignore")
    settle()
    failed, many = 0, worth.FEW
    for seed in range(first, last):
        torch._dynamo.reset()
        worth.FEW = LED_FROM if seed % 5 else many
        found = differences(seed, FEW_LANES if seed % 5 else LANES)
        failed |= bool(found)
        print(seed, found or "alike", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
