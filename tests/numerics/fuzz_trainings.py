"""Trainings for fuzz_events.py: published optimizers, stepped in eager or compiled.

A training steps plain state, packed state (`storage=`), or masters of float32 for
parameters of 16 bits. In eager, packed state is what tests/storage/reference.py says,
and a master is a float32 parameter that is cast to and fro.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from fuseopt.offload import MasterOptimizer
from fuseopt.storage.formats import FORMATS
from tests.caller_states import STATES
from tests.papers.adaptive import AdaBelief
from tests.papers.momentum import Lion
from tests.papers.reducing import LAMB
from tests.storage.reference import Reference

Build = Callable[[Any, random.Random], Optimizer]

SHAPES = [(3, 4), (5,), (), (7, 2, 3), (6, 4), (33,), (1,), (3, 4)]
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
WAYS = ("own", "bound", "tail")
#: The key and the attribute of what a user hangs on an optimizer.
HUNG = "hung"


@dataclass(frozen=True)
class Choice:
    """What a seed trains. `storage`: how state is packed, or None; `master`: the kind
    of masters, or None; then arguments of a tail.
    """

    name: str
    lanes: int
    seed: int
    way: str
    storage: str | None = None
    master: str | None = None
    max_norm: float | None = None
    decay: float | None = None
    max_value: float | None = None
    divisor: float | None = None
    zero_grad: bool | str = False
    scaled: bool = False

    @property
    def plain(self) -> bool:
        """Is neither state packed, nor a parameter that of a master?"""
        return not (self.storage or self.master)


def drawn_choice(rng: random.Random, seed: int, sizes: Sequence[int]) -> Choice:
    """The choice of a seed; `sizes`: how many parameters."""
    name, way, kind = rng.choice([*BUILDS]), rng.choice(WAYS), rng.random()
    basic = name, rng.choice(sizes), seed, way
    if way == "tail":
        storage = rng.choice((*FORMATS,)) if kind < 0.15 else None
        return Choice(
            *basic,
            storage,
            max_norm=rng.choice([0.5, 1.0, None]),
            decay=rng.choice([0.9, 0.9, None]),
            max_value=rng.choice([0.25, None, None, None]),
            divisor=rng.choice([4.0, 3.0, None, None, None]),
            zero_grad=rng.choice([False, False, True, "zeros"]),
            scaled=storage is None and rng.random() < 0.3,
        )
    if way == "own" and kind < 0.3:
        return Choice(*basic, rng.choice((*FORMATS,)))
    if way == "own" and kind < 0.5:
        storage = rng.choice((None, None, *FORMATS))
        return Choice(*basic, storage, rng.choice(("fp32", "split")))
    return Choice(*basic)


class Training:
    """An optimizer with its parameters, in eager or compiled in the way of a choice."""

    def __init__(self, choice: Choice, eager: bool) -> None:
        self.choice, self.eager = choice, eager
        rng = random.Random(choice.seed)
        torch.manual_seed(choice.seed)
        shapes = [SHAPES[k % len(SHAPES)] for k in range(choice.lanes)]
        dtype = torch.bfloat16 if choice.master else torch.float32
        self.params = [torch.nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes]
        #: in eager with masters those; else the parameters
        self.wide = [*map(self._wide, self.params)]
        groups: Any = self.wide
        first, rest = groups[: choice.lanes // 3], groups[choice.lanes // 3 :]
        if first and choice.name != "Rprop" and rng.random() < 0.5:
            groups = [{"params": first}, {"params": rest, "weight_decay": 0.05}]
        self.optimizer: Any = self._made(groups, rng)
        self.averages = [p.detach().clone() for p in self.params]
        self.hooks: list[Any] = []
        #: how to take off what hangs on the optimizer
        self.hung: list[Callable[[], object]] = []
        #: what of tests/caller_states.py is around a step
        self.around: str | None = None
        self.reference = Reference(self.optimizer, choice.storage or {})
        self.scaler: Any = None
        if choice.scaled:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=3)
            self.scaler.scale(torch.ones(()))
        self.tail: Any = None
        self.step_itself: Callable[..., Any] = self.optimizer.step
        if not eager:
            self._compile()
        self.saved = self._saved()
        #: steps so far, and when it was saved
        self.steps = self.steps_saved = 0

    @property
    def by_hand(self) -> bool:
        """Are there masters that the training itself casts?"""
        return self.eager and self.choice.master is not None

    @property
    def _storage(self) -> Any:
        """The format, of small parameters too."""
        name = self.choice.storage
        return None if name is None else fuseopt.Storage(name, least=0)

    def _wide(self, p: Any) -> Any:
        return torch.nn.Parameter(p.detach().float()) if self.by_hand else p

    def _made(self, groups: Any, rng: random.Random) -> Any:
        choice = self.choice
        if choice.master and not self.eager:
            kinds: Any = {"master": choice.master, "storage": self._storage}
            return MasterOptimizer(
                groups, lambda g: BUILDS[choice.name](g, rng), **kinds
            )
        return BUILDS[choice.name](groups, rng)

    def _compile(self) -> None:
        choice = self.choice
        if choice.master:
            return
        if choice.way == "own" or choice.storage:
            fuseopt.compile(self.optimizer, storage=self._storage)
            self.step_itself = self.optimizer.step
        elif choice.way == "bound":
            self.step_itself = torch.compile(self.step_itself, backend="fuseopt")
        if choice.way == "tail":
            decay = choice.decay
            self.tail = fuseopt.tail(
                self.optimizer,
                clip_grad_norm=choice.max_norm,
                clip_grad_value=choice.max_value,
                grad_divisor=choice.divisor,
                zero_grad=choice.zero_grad,
                scaler=self.scaler,
                ema=[] if decay is None else [(self.averages, decay)],
            )

    def stepped(self) -> list[Any]:
        """The parameters of the groups, as the user has them."""
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        user = {id(w): p for w, p in zip(self.wide, self.params, strict=True)}
        return [user[id(p)] for p in every]

    def add(self, new: list[Any]) -> None:
        """Another group."""
        wide = [*map(self._wide, new)]
        self.params += new
        if self.wide is not self.params:
            self.wide += wide
        self.optimizer.add_param_group({"params": wide})

    # ------------------------------------------------------------- a step

    def step(self) -> Tensor | None:
        """Clip, step, average within what is around; the total norm."""
        self.steps += 1
        with STATES[self.around]() if self.around else contextlib.nullcontext():
            if self.tail is not None:
                norm: Tensor | None = self.tail().norm
            elif self.choice.way == "tail":
                norm = self._tail_of_eager()
            else:
                norm = self._one_step()
        if self.scaler is not None:
            self.scaler.update()
        return norm

    def _one_step(self) -> None:
        if not (self.eager and (self.choice.storage or self.by_hand)):
            self.step_itself()
        elif not self.by_hand:
            self.reference.step()
        else:
            for p, wide in zip(self.params, self.wide, strict=True):
                wide.grad = None if p.grad is None else p.grad.float()
            self.reference.step()
            with torch.no_grad():
                for p, wide in zip(self.params, self.wide, strict=True):
                    p.copy_(self._rounded(wide.detach()))

    def _rounded(self, wide: Tensor) -> Tensor:
        if self.choice.master == "fp32":
            return wide.to(torch.bfloat16)
        high = (wide.view(torch.int32) + 0x8000) >> 16
        return high.to(torch.int16).view(torch.bfloat16)

    def _tail_of_eager(self) -> Tensor | None:
        choice, norm = self.choice, None
        grads = [p.grad for p in self.stepped() if p.grad is not None]
        with torch.no_grad():
            if choice.divisor is not None and grads:
                torch._foreach_div_(grads, choice.divisor)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if choice.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.stepped(), choice.max_norm)
        if choice.max_value is not None and grads:  # of none torch raises
            torch.nn.utils.clip_grad_value_(self.stepped(), choice.max_value)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
        else:
            self._one_step()
        if choice.decay is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self.averages, self.params, 1 - choice.decay)
        if choice.zero_grad:
            self.optimizer.zero_grad(choice.zero_grad is True)
        return norm

    # ------------------------------------------------------------- what it holds

    def _packed(self) -> dict[tuple[int, str], Any]:
        """In eager what is packed, by the number of a parameter."""
        number = {id(p): k for k, p in enumerate(self.wide)}
        of = self.reference.packed.items()
        return {(number[id(p)], key): parts for (p, key), parts in of}

    def _saved(self) -> Any:
        """A copy of all that a state dict holds, and in eager of what it stands for."""
        more = self._packed(), self.wide if self.by_hand else []
        return copy.deepcopy((self.optimizer.state_dict(), *more, self._order()))

    def _order(self) -> list[int]:
        number = {id(p): k for k, p in enumerate(self.params)}
        return [number[id(p)] for p in self.stepped()]

    def save(self) -> None:
        self.saved, self.steps_saved = self._saved(), self.steps

    def load(self, in_full: bool = False) -> None:
        """Load what was saved; `in_full`: unpacked, as by `fuseopt.full_precision`."""
        if self.saved[-1] != self._order():
            return
        if self.choice.storage == "bf16-stochastic" and not self.steps_saved:
            return  # state that is made anew draws other numbers
        state, packed, wide, _ = copy.deepcopy(self.saved)
        if not self.eager:
            state = fuseopt.full_precision(state) if in_full else state
            self.optimizer.load_state_dict(state)
            return
        place = {k: n for n, k in enumerate(self._order())}
        form = FORMATS.get(self.choice.storage or "")
        for (k, key), parts in packed.items() if form and in_full else ():
            state["state"][place[k]][key] = form.unpack(parts)
        self.optimizer.load_state_dict(state)
        self.reference.packed = {
            (self.wide[k], key): parts
            for (k, key), parts in packed.items()
            if not in_full
        }
        with torch.no_grad():
            for k, x in enumerate(wide):
                self.wide[k].copy_(x)
                self.params[k].copy_(self._rounded(x))

    def forget(self, p: Any) -> None:
        """Drop the state of a parameter."""
        self.optimizer.state.pop(p, None)
        for key in [key for key in self.reference.packed if key[0] is p]:
            del self.reference.packed[key]

    def content(self) -> dict[str, Any]:
        """All that must be the same, with parameters by their number."""
        number = {id(p): k for k, p in enumerate(self.wide)}
        state = self.optimizer.state.items()
        held = {number[id(p)]: s for p, s in state if isinstance(p, Tensor)}
        if self.eager and not self.choice.plain:
            held = {k: self.reference.content(self.wide[k]) for k in held}
        if self.choice.master:  # of masters it is that of each parameter in turn
            held = dict(sorted(held.items()))
        return {
            "parameters": [p.detach() for p in self.params],
            "gradients": [p.grad for p in self.params],
            "averages": self.averages,
            "state": {
                k: {name: x for name, x in s.items() if name != HUNG}
                for k, s in held.items()
            },
            "groups": [
                {name: x for name, x in group.items() if name not in ("params", HUNG)}
                for group in self.optimizer.param_groups
            ],
            "scale": self.scaler and self.scaler.state_dict(),
        }
