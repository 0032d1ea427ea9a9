"""Random sequences of what a user does between two steps, over published optimizers.

`differences(seed)` trains two of them alike, one in eager and one compiled, and tells
what differs after each step: parameters, gradients, averages, state and groups, to the
bit, with types, dtypes, strides and the order of dicts. Each event is done to both. A
pair goes through several sequences, since Dynamo's traces are what a sequence costs.

    python -m tests.tools.fuzz events --first FIRST --count COUNT
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fuseopt.replicate import worth
from tests import hung
from tests.caller_states import STATES
from tests.numerics.fuzz_trainings import (
    FORMS,
    HUNG,
    SHAPES,
    Choice,
    Training,
    drawn_choice,
)
from tests.steps import same_bits, turned

Event = Callable[[Training, random.Random], None]

LANES = (1, 3, 6, 24, 40)
#: Where few lanes may be led too: what Dynamo takes goes by the number of lanes.
LED_FROM, FEW_LANES = 4, (1, 3, 4, 6, 9)
#: So many sequences of events go over one pair.
SEQUENCES = 3


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


def some_gradients(training: Training, rng: random.Random) -> None:
    """One of a few patterns: what had none has one in the next, and again none."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    every, first = rng.choice([2, 3, 3]), rng.randrange(2)
    for k, p in enumerate(training.stepped()):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if k % every == first else grad


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
    if training.by_hand:  # the optimizer has other tensors than the user
        for p in training.stepped():
            p.grad = None


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
    if training.choice.decay is None and len(training.params) < 60:
        drawn = [torch.randn(s, generator=generator) for s in shapes]
        dtype = torch.bfloat16 if training.choice.master else torch.float32
        training.add([torch.nn.Parameter(x.to(dtype)) for x in drawn])


def save(training: Training, rng: random.Random) -> None:
    if not training.hung:
        training.save()


def load(training: Training, rng: random.Random) -> None:
    if not training.hung:
        training.load()


def load_in_full(training: Training, rng: random.Random) -> None:
    if not training.hung and training.choice.storage != "bf16-stochastic":
        training.load(in_full=True)


def _with_state(training: Training) -> list[Any]:
    return [p for p in training.optimizer.state if isinstance(p, Tensor)]


def forget_all(training: Training, rng: random.Random) -> None:
    for p in _with_state(training):
        training.forget(p)


def forget_one(training: Training, rng: random.Random) -> None:
    if training.optimizer.state:
        training.forget(rng.choice(_with_state(training)))


def other_memory(training: Training, rng: random.Random) -> None:
    p = rng.choice(training.params)
    p.data = p.data.clone()


def other_layout(training: Training, rng: random.Random) -> None:
    p = rng.choice(training.params)
    p.data, p.grad = turned(p.data), None


def other_dtype(training: Training, rng: random.Random) -> None:
    p = rng.choice(training.params)
    dtype = rng.choice([torch.bfloat16, torch.float64])
    if training.choice.decay is None:
        p.data, p.grad = p.data.to(dtype), None
        training.forget(p)


def a_frozen_one(training: Training, rng: random.Random) -> None:
    p = rng.choice(training.params)
    p.requires_grad_(not p.requires_grad)


def _a_state(training: Training, rng: random.Random) -> dict[str, Any]:
    held = [training.optimizer.state[p] for p in _with_state(training)]
    held = [state for state in held if state]
    return rng.choice(held) if held else {}


def other_state(training: Training, rng: random.Random) -> None:
    state = _a_state(training, rng)
    names = [k for k, x in state.items() if isinstance(x, Tensor) and k != HUNG]
    if names:
        name = rng.choice(names)
        state[name] = state[name].clone()


def another_count(training: Training, rng: random.Random) -> None:
    state, count = _a_state(training, rng), rng.choice([0, 5, 100])
    if isinstance(state.get("step"), Tensor):
        with torch.inference_mode(state["step"].is_inference()):
            state["step"].fill_(count)
    elif "step" in state:
        state["step"] = count


def another_order(training: Training, rng: random.Random) -> None:
    params = rng.choice(training.optimizer.param_groups)["params"]
    if training.choice.decay is None:
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


def hang(training: Training, rng: random.Random) -> None:
    """Something that no step reads."""
    optimizer = training.optimizer
    place, value = rng.choice([*hung.PLACES]), rng.choice([*hung.VALUES])
    second = optimizer.param_groups[0]["params"][1:2]
    if place != "state" or (second and optimizer.state.get(second[0])):
        undo = hung.PLACES[place](optimizer, hung.VALUES[value](optimizer))
        training.hung.append(undo)


#: Other types of what torch makes, which every step takes.
TYPES = (
    *("group: ordered", "groups: list", "state: dict", "state: ordered"),
    *("state of one: ordered", "betas: list", "betas: namedtuple", "lr: numpy"),
)


def another_type(training: Training, rng: random.Random) -> None:
    with contextlib.suppress(KeyError, IndexError):
        training.hung.append(hung.FORMS[rng.choice(TYPES)](training.optimizer))


def take_off(training: Training, rng: random.Random) -> None:
    while training.hung:
        # the user has loaded or forgotten it meanwhile
        with contextlib.suppress(KeyError, AttributeError, IndexError):
            training.hung.pop()()


def around(training: Training, rng: random.Random) -> None:
    """The caller's state from now on."""
    training.around = rng.choice([None, *STATES])


def nothing_around(training: Training, rng: random.Random) -> None:
    training.around = None


#: How often each is done, beside the others: whatever is trained,
EVENTS: dict[Event, float] = {
    **dict.fromkeys((new_gradients, all_gradients), 10.0),
    **dict.fromkeys((some_gradients,), 4.0),
    **dict.fromkeys((rates, an_option, load, nothing_around), 3.0),
    **dict.fromkeys((another_group, save, odd_gradient, around), 1.0),
    **dict.fromkeys((load_in_full, threads, no_gradients), 0.7),
}
#: where parameters are stepped as they are, which masters are not,
WITHOUT_MASTERS: dict[Event, float] = {
    **dict.fromkeys((hang, take_off), 2.0),
    **dict.fromkeys((other_memory, other_state, another_count), 1.5),
    **dict.fromkeys((forget_one, a_hook, another_type), 1.0),
    **dict.fromkeys((forget_all, a_frozen_one, another_order), 0.7),
}
#: and where state is not packed.
OF_PLAIN: dict[Event, float] = {other_layout: 3.0, other_dtype: 0.7}


def events_of(choice: Choice) -> dict[Event, float]:
    """What may be done to what is trained."""
    found = EVENTS if choice.master else {**EVENTS, **WITHOUT_MASTERS}
    if choice.storage == "bf16-stochastic":
        # state that is forgotten draws other numbers when it is made anew
        found = {k: v for k, v in found.items() if k not in (forget_one, forget_all)}
    return {**found, **OF_PLAIN} if choice.plain else found


# ---------------------------------------------------------------- both beside


def _done(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return error


def anew(training: Training, first: Sequence[Tensor]) -> None:
    """Begin a sequence: numbers as at first, nothing hung, options as left."""
    take_off(training, random.Random(0))
    while training.hooks:
        training.hooks.pop().remove()
    training.around = None
    with torch.no_grad():
        for p, x in zip(training.params, first, strict=False):
            p.copy_(x)
        for p, average in zip(training.params, training.averages, strict=False):
            average.copy_(p)
    for state in map(training.optimizer.state.get, _with_state(training)):
        for x in state.values():
            if isinstance(x, Tensor) and x.is_floating_point():
                with torch.inference_mode(x.is_inference()):  # made in that mode
                    x.nan_to_num_(1.0, 2.0, -2.0)


def differences(
    seed: int,
    sizes: Sequence[int] = LANES,
    sequences: int = SEQUENCES,
    told: list[str] | None = None,
) -> list[str]:
    """Train both as `seed` says: [] if nothing differs, else what, and what was done
    before. An error ends both; the other must have one as well. `sizes`: how many
    parameters. What is done is appended to `told`.
    """
    told = [] if told is None else told
    rng = random.Random(seed)
    choice = drawn_choice(rng, seed, sizes)
    pair = [Training(choice, eager) for eager in (True, False)]
    told.append(str(choice))
    before = torch.get_num_threads()
    first = [p.detach().clone() for p in pair[0].params]
    try:
        for n in range(sequences if choice.plain else 1):
            if n:
                told.append("anew")
                for training in pair:
                    anew(training, first)
            found = sequence(pair, rng, told)
            if found:
                return [*found, *told]
            if told[-1] == "raised":
                break
    finally:
        torch.set_num_threads(before)
    return []


def sequence(
    pair: Sequence[Training], rng: random.Random, told: list[str]
) -> list[str]:
    """What differs after one of some steps, with a few events before each."""
    events = events_of(pair[0].choice)
    for _ in range(rng.choice([8, 15, 25])):
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            (event,) = rng.choices([*events], [*events.values()])
            told.append(event.__name__)
            of_event = rng.randrange(1 << 30)
            for training in pair:
                event(training, random.Random(of_event))
        told.append(f"step {pair[0].around or ''}".strip())
        results = [_done(training.step) for training in pair]
        raised = [isinstance(x, Exception) for x in results]
        # eager's new state is of inference mode, and cannot be stepped outside of it
        if all(raised) or "inference tensor" in str(results[0]):
            told.append("raised")
            return []
        if any(raised) or not alike(*results):
            return [f"results: {results}"]
        theirs, mine = (training.content() for training in pair)
        found = [key for key in mine if not alike(mine[key], theirs[key])]
        if found:
            return found
    return []


def judge_seed(seed: int) -> dict[str, Any]:
    """Judge a seed for tests/tools/fuzz.py: how many sequences, and that all are alike.
    Raises AssertionError with what differs.

    Of most seeds the optimizer has few lanes, which are led as many are.
    """
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    many, told = worth.FEW, list[str]()
    worth.FEW = LED_FROM if seed % 5 else many
    try:
        found = differences(seed, FEW_LANES if seed % 5 else LANES, told=told)
    finally:
        worth.FEW = many
    assert not found, f"Silent difference, seed {seed}: {found}"
    return {"ways": {"events": "alike"}, "sequences": 1 + told.count("anew")}
