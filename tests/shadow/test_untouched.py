"""The user's optimizer is whole at any moment: before a step or after it.

What stands for it while Dynamo traces, and while the compiled step runs, is a shadow.
A signal, a thread or an exception at any instruction finds the optimizer as it was or
as it will be, and the next step is that of eager.
"""

from __future__ import annotations

import contextvars
import copy
import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from fuseopt.replicate import worth
from tests.steps import make_params, same_bits, set_grads

SHAPES = [(3, 4), (5,)] * 4
HOME = os.path.dirname(fuseopt.__file__)


@pytest.fixture(params=["led", "whole"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """How Dynamo traces: some lanes, or all."""
    monkeypatch.setattr(worth, "FEW", 6 if request.param == "led" else 999)
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def gradients_are_recorded() -> Iterator[None]:
    yield
    sys.settrace(None)
    torch.set_grad_enabled(True)


class Counts(Optimizer):
    """Numbers of Python in its groups and in the state of each lane."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "seen": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p)
                state["t"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                p.sub_(state["m"], alpha=group["lr"] / state["t"] ** 0.5)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)


BUILDS: list[Callable[[Any], Optimizer]] = [sgd, Counts]


def content(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    return copy.copy(x)


def taken(opt: Optimizer, params: list[Any]) -> Any:
    """All that an optimizer holds."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    states = [
        {k: content(v) for k, v in opt.state[p].items()} if p in opt.state else None
        for p in params
    ]
    lists = [[id(p) for p in g["params"]] for g in opt.param_groups]
    assert lists == [[*map(id, params)]]
    assert set(map(id, opt.state)) <= set(map(id, params))
    return [content(p) for p in params], states, groups, len(opt.state)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same_bits(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


class Twins:
    """An optimizer in eager and one of fuseopt.compile."""

    def __init__(self, build: Callable[[Any], Optimizer], steps: int = 0) -> None:
        self.theirs, self.mine = make_params(SHAPES), make_params(SHAPES)
        self.plain = build(self.theirs)
        self.opt = fuseopt.compile(build(self.mine))
        self.seed = 0
        for _ in range(steps):
            self.begin()
            self.opt.step()
            self.plain.step()
            assert same(self.now(), taken(self.plain, self.theirs))

    def now(self) -> Any:
        return taken(self.opt, self.mine)

    def begin(self) -> None:
        self.seed += 1
        set_grads(self.theirs, self.mine, self.seed)

    def cut(self, run: Callable[[], None]) -> bool:
        """A step that `run` may cut off; did it end? Then the step is as eager's."""
        self.begin()
        before = taken(self.plain, self.theirs)
        self.plain.step()
        after = taken(self.plain, self.theirs)
        done = False
        try:
            run()
            done = True
        except KeyboardInterrupt:
            torch.set_grad_enabled(True)
        found = self.now()
        if not same(found, after):
            assert not done
            assert same(found, before), "neither before the step nor after it"
            self.opt.step()
            assert same(self.now(), after)
        return done


# ---------------------------------------------------------------- at every instruction


class CutOff:
    """Raises KeyboardInterrupt at the k-th event in fuseopt's code, or what it made.

    `look` is called at each event until then.
    """

    def __init__(self, k: int, opcodes: bool, look: Callable[[], None] | None) -> None:
        self.left = k
        self.opcodes = opcodes
        self.look = look

    def local(self, frame: Any, event: str, _: Any) -> Any:
        if event == ("opcode" if self.opcodes else "line"):
            self.left -= 1
            if self.look is not None:
                sys.settrace(None)
                self.look()
                sys.settrace(self.trace)
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.local

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        frame.f_trace_opcodes = self.opcodes
        return self.local

    def run(self, step: Callable[[], object]) -> None:
        sys.settrace(self.trace)
        try:
            step()
        finally:
            sys.settrace(None)


def exhaust(twins: Twins, opcodes: bool, stride: int = 1) -> int:
    """Cut a steady step off at every event; how many there are."""
    k = 0
    while True:
        k += stride
        for _ in range(3):
            twins.begin()
            twins.opt.step()
            twins.plain.step()
        if twins.cut(partial(CutOff(k, opcodes, None).run, twins.opt.step)):
            return k


@pytest.mark.family(4)
@pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)
def test_a_steady_step_is_cut_off_at_every_line(build: Any, way: str) -> None:
    assert exhaust(Twins(build, 4), opcodes=False) > 100


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)
def test_a_steady_step_is_cut_off_at_every_instruction(build: Any, way: str) -> None:
    assert exhaust(Twins(build, 4), opcodes=True) > 500


@pytest.mark.slow
@pytest.mark.parametrize(("moves", "least"), [(True, 200), (False, 40)])
def test_calls_that_follow_each_other_are_cut_off(
    way: str, moves: bool, least: int
) -> None:
    """What the first left put off was done by the second, beside its own.

    A step whose rate rests becomes one call of C, with few instructions of Python.
    """
    twins = Twins(sgd, 4)
    for k in range(2000):
        for opt in (twins.plain, twins.opt) if moves else ():
            opt.param_groups[0]["lr"] = 0.1 / (k + 1)
        if twins.cut(partial(CutOff(3 * k + 1, True, None).run, twins.opt.step)):
            break
    assert k > least


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)
def test_at_every_line_the_optimizer_is_whole(build: Any, way: str) -> None:
    """As the handler of a signal, which may save a checkpoint, would find it."""
    twins = Twins(build, 4)
    twins.begin()
    before = taken(twins.plain, twins.theirs)
    twins.plain.step()
    after = taken(twins.plain, twins.theirs)
    seen = []

    def look() -> None:
        found = twins.now()
        seen.append(same(found, after))
        assert seen[-1] or same(found, before)

    CutOff(-1, False, look).run(twins.opt.step)
    assert seen == sorted(seen)
    assert seen.count(False) > 50


@pytest.mark.family(6)
@pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)
def test_a_first_step_is_cut_off(build: Any, way: str) -> None:
    """While it is traced, planned, rehearsed; state that tracing made is nobody's."""
    for k in (5, 100, 1000, 20_000, 60_000):
        twins = Twins(build)
        twins.cut(partial(CutOff(k, False, None).run, twins.opt.step))
        twins.cut(twins.opt.step)
        twins.cut(twins.opt.step)


def test_a_trace_that_fails_makes_no_state(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo makes it for real before it traces what comes after."""
    from fuseopt.compiler import pipeline

    def fails(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    params = make_params(SHAPES)
    set_grads(params, params, 1)
    opt = fuseopt.compile(torch.optim.AdamW(params, foreach=True))
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "plan_graph", fails)
        with pytest.raises(KeyboardInterrupt):
            opt.step()
    assert not opt.state
    opt.step()
    assert len(opt.state) == len(params)


# ---------------------------------------------------------------- real signals


def interrupted(build: Any, times: int) -> Counter[str]:
    """Real signals at random moments of steps, among them first ones."""
    chance = random.Random(7)
    told: Counter[str] = Counter()
    twins = Twins(build, 3)
    longest = 2e-3

    def run() -> None:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, longest))
        try:
            twins.opt.step()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def handle(*_: Any) -> None:
        raise KeyboardInterrupt

    known = signal.signal(signal.SIGALRM, handle)
    try:
        while told["cut"] < times:
            if chance.random() < 0.003:
                twins = Twins(build)
                longest = 1.0
            try:
                told["whole" if twins.cut(run) else "cut"] += 1
            except KeyboardInterrupt:
                # between the end of the step and that of the timer
                told["late"] += 1
                twins = Twins(build, 3)
            longest = 2e-3
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, known)
    return told


#: Python drops what a handler raises while the callback of a weak reference runs, says
#: so, and goes on: then the step is a whole one.
DROPPED = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
@DROPPED
@pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)
def test_signals_at_random_moments(build: Any, way: str) -> None:
    assert interrupted(build, 50)["cut"] == 50


@DROPPED
@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)
@pytest.mark.timeout(1200)
def test_5000_signals_at_random_moments(build: Any, way: str) -> None:
    assert interrupted(build, 1250)["cut"] == 1250


# ---------------------------------------------------------------- other threads


@pytest.mark.family(4)
@pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)
def test_a_thread_that_saves_sees_all_parameters(build: Any, way: str) -> None:
    twins = Twins(build, 2)
    ended = threading.Event()
    sizes: Counter[tuple[int, int]] = Counter()

    def save() -> None:
        while not ended.is_set():
            saved = twins.opt.state_dict()
            known = len(saved["param_groups"][0]["params"]), len(saved["state"])
            sizes[known] += 1

    thread = threading.Thread(target=save)
    thread.start()
    try:
        for _ in range(300):
            twins.begin()
            twins.opt.step()
            twins.plain.step()
    finally:
        ended.set()
        thread.join()
    assert set(sizes) == {(len(SHAPES), len(SHAPES))}
    assert same(twins.now(), taken(twins.plain, twins.theirs))


def test_threads_step_one_optimizer(way: str) -> None:
    """Each step is done once, by whoever comes."""
    twins = Twins(sgd, 2)
    twins.begin()

    def work() -> None:
        for _ in range(20):
            twins.opt.step()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for _ in range(60):
        twins.plain.step()
    assert same(twins.now(), taken(twins.plain, twins.theirs))


# ---------------------------------------------------------------- what a step sees


@pytest.mark.family(4)
def test_groups_that_ask_for_fused_kernels_say_so_all_the_while(way: str) -> None:
    params = make_params(SHAPES)
    set_grads(params, params, 1)
    opt = fuseopt.compile(torch.optim.AdamW(params, fused=True))
    group = opt.param_groups[0]
    seen = set()

    def look() -> None:
        seen.add((group["fused"], group["foreach"]))

    for _ in range(3):
        CutOff(-1, False, look).run(opt.step)
    assert seen == {(True, None)}
    losses = [opt.step(lambda: 3.0) for _ in range(2)]
    assert losses == [3.0, 3.0]
    assert (group["fused"], group["foreach"]) == (True, None)


class Keeps(Counts):
    """Gives itself away."""

    kept: list[Any] = []  # noqa: RUF012

    @torch.no_grad()
    def step(self) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)
        self.kept.append(self)
        return self


class IsKnown(Counts):
    """Asks for itself in a table."""

    known: dict[Any, float] = {}  # noqa: RUF012

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rate = self.known.get(self, 1.0)
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=rate)


def test_a_step_that_gives_itself_away_gives_the_optimizer(way: str) -> None:
    Keeps.kept.clear()
    params = make_params(SHAPES)
    set_grads(params, params, 1)
    opt = fuseopt.compile(Keeps(params))
    for _ in range(2):
        assert opt.step() is opt
    assert [x is opt for x in Keeps.kept] == [True, True]


def test_a_step_that_asks_for_itself_finds_the_optimizer(way: str) -> None:
    theirs, mine = make_params(SHAPES), make_params(SHAPES)
    plain, opt = IsKnown(theirs), fuseopt.compile(IsKnown(mine))
    IsKnown.known.update({plain: 0.5, opt: 0.5})
    try:
        for seed in range(2):
            set_grads(theirs, mine, seed)
            plain.step()
            opt.step()
            assert all(map(same_bits, theirs, mine))
    finally:
        IsKnown.known.clear()


def test_hooks_get_the_optimizer(way: str) -> None:
    twins = Twins(sgd, 2)
    seen: list[Any] = []
    twins.opt.register_step_pre_hook(lambda o, *_: seen.append(o))
    twins.opt.register_step_post_hook(lambda o, *_: seen.append(o))
    twins.begin()
    twins.opt.step()
    assert [x is twins.opt for x in seen] == [True, True]


def test_what_the_user_changes_between_steps_is_seen(way: str) -> None:
    twins = Twins(Counts, 3)
    for opt, params in ((twins.opt, twins.mine), (twins.plain, twins.theirs)):
        opt.state[params[5]]["m"] = torch.ones_like(params[5].detach())
        opt.state[params[0]]["t"] = 40
        opt.param_groups[0]["lr"] = 0.3
        opt.param_groups[0]["seen"] = 7
    for _ in range(3):
        twins.cut(twins.opt.step)
    again = pickle.loads(pickle.dumps(twins.opt))
    assert again.param_groups[0]["seen"] == 10
    assert "step" not in vars(again)


# ---------------------------------------------------------------- what is left behind


def test_an_optimizer_that_is_nobodys_steps() -> None:
    params = make_params([(3,)])
    set_grads(params, params, 1)
    before = params[0].detach().clone()
    known = weakref.WeakSet[Any]()

    def build() -> Optimizer:
        made = torch.optim.SGD(params, lr=0.1)
        known.add(made)
        return made

    fuseopt.compile(build()).step()
    assert torch.equal(params[0].detach(), before - 0.1 * params[0].grad)
    assert not known  # at once: no collector of garbage has to find it
    step = fuseopt.compile(build()).step
    for _ in range(3):
        step()
    want = before.clone()
    for _ in range(4):
        want -= 0.1 * params[0].grad
    assert torch.equal(params[0].detach(), want)


def objects() -> Counter[str]:
    for _ in range(3):
        gc.collect()
    return Counter(type(x).__qualname__ for x in gc.get_objects() if not _is_of_abc(x))


def _is_of_abc(x: Any) -> bool:
    """Is it what abstract classes remember of who is an instance of theirs? There is
    one for each class that was ever asked about.
    """
    if isinstance(x, weakref.ReferenceType):
        x = x.__callback__
    return getattr(x, "__name__", "") == "_destroy" if callable(x) else False


def drop(kind: str, seed: int) -> None:
    params = make_params(SHAPES[:2] if kind == "few" else SHAPES)
    opt = fuseopt.compile(sgd(params))
    for n in range(3):
        set_grads(params, params, seed + n)
        opt.step()


#: What is kept of a compilation and has a bound.
BOUNDED = frozenset({"CompilationMetrics", "Report", "KernelReport"})


def resident() -> float:
    """MB of memory that this process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def left(way: str, first: int, then: int) -> tuple[float, float, Counter[str]]:
    """What each of `then` optimizers leaves after the `first`: MB, and objects once
    garbage is collected.
    """
    worth.FEW = 6 if way == "led" else 999
    for k in range(first):
        drop(way, k)
    before, memory = objects(), resident()
    for k in range(then):
        drop(way, k)
    # what is garbage counts, too
    memory = resident() - memory
    more = objects() - before
    # each of torch's records of a compilation, of which it keeps 64, has these
    told = more["CompilationMetrics"]
    more -= Counter(dict=told, set=3 * told, list=told)
    for name in BOUNDED:
        more.pop(name, None)
    return memory / then, sum(more.values()) / then, more


def alone(*arguments: object) -> tuple[float, float]:
    """Memory and objects that are left, in a process of its own: this one notes all
    that is logged.
    """
    told = subprocess.run(
        [sys.executable, "-m", "tests.shadow.test_untouched", *map(str, arguments)],
        cwd=os.path.dirname(HOME),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]
    memory, count = map(float, told.split()[:2])
    return memory, count


@pytest.mark.parametrize("way", ["led", "whole", "few"])
@pytest.mark.slow
def test_dropped_optimizers_leave_nothing(way: str) -> None:
    """Each left about a thousand objects and 0.6 MB."""
    _, count = alone(way, 20, 8)
    assert count < 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["led", "whole", "few"])
def test_300_dropped_optimizers_leave_nothing(way: str) -> None:
    memory, count = alone(way, 20, 280)
    assert count < 0.5
    assert memory < 0.06


def steps(way: str, first: int, then: int) -> tuple[float, float, Counter[str]]:
    """What `then` steps of one optimizer leave after the `first`: MB, objects.

    The rate changes at each step, gradients lie elsewhere at each; where no lanes are
    led, one is gone now and then.
    """
    worth.FEW = 6 if way == "led" else 999
    params = make_params(SHAPES)
    opt: Optimizer = torch.optim.AdamW(params, lr=0.1, foreach=True)
    if way == "backend":
        opt.step = torch.compile(opt.step, backend="fuseopt")  # type: ignore[method-assign]
    else:
        opt = fuseopt.compile(opt)
    generator = torch.Generator().manual_seed(1)

    def run(times: int) -> None:
        for n in range(times):
            opt.param_groups[0]["lr"] = 0.1 / (1 + n % 1000)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            if way != "led" and n % 100 == 50:
                params[3].grad = None
            opt.step()

    run(first)
    before, memory = objects(), resident()
    run(then)
    more, memory = objects() - before, resident() - memory
    if way == "led":
        assert "they stand for the others" in fuseopt.reports()[-1].traced
    return memory, sum(more.values()), more


@pytest.mark.slow
@pytest.mark.parametrize("way", ["led", "whole", "backend"])
def test_10000_steps_leave_nothing(way: str) -> None:
    memory, count = alone("steps", way, 3000, 10_000)
    assert count < 10
    assert memory < 2.5  # Python takes memory by the MB; a tensor a step would be 5


def variables(opt: Optimizer, params: list[Any], closure: Any) -> int:
    """How many context variables there are after three steps."""
    for n in range(3):
        set_grads(params, params, n)
        opt.step(closure)
    return len(contextvars.copy_context())


@pytest.mark.family(3)
@pytest.mark.parametrize("closure", [None, lambda: 1.0], ids=["", "closure"])
@pytest.mark.parametrize("way", ["compile", "backend"])
def test_a_trace_leaves_no_context_variables(way: str, closure: Any) -> None:
    """Each setting that is patched for a trace left one in the user's context."""
    found = []
    for _ in range(4):
        params = make_params(SHAPES)
        opt = sgd(params)
        if way == "compile":
            opt = fuseopt.compile(opt)
        else:
            opt.step = torch.compile(opt.step, backend="fuseopt")  # type: ignore[method-assign]
        found.append(variables(opt, params, closure))
    assert found[1:] == found[1:2] * 3


def test_what_a_trace_sets_in_the_context_stays() -> None:
    from fuseopt.compat.contexts import within_copy

    known = contextvars.ContextVar[int]("known")
    new = contextvars.ContextVar[tuple[int, ...]]("new")
    patch = contextvars.ContextVar[tuple[int, ...]]("torch.config.ConfigPatch[1]")
    begun = contextvars.ContextVar[tuple[int, ...]]("torch.config.ConfigPatch[2]")

    def work(fails: bool) -> int:
        known.set(2)
        new.set(())
        patch.set((1,))
        patch.set(())
        begun.set((1,))
        if fails:
            raise KeyError
        return 7

    def look(fails: bool) -> None:
        known.set(1)
        if fails:
            with pytest.raises(KeyError):
                within_copy(work, fails)
        else:
            assert within_copy(work, fails) == 7
        assert known.get() == 2
        assert new.get(None) == ()
        assert begun.get(None) == (1,)
        assert patch.get(None) is None

    for fails in (False, True):
        contextvars.Context().run(look, fails)


@pytest.mark.slow
def test_a_program_finds_the_reports_of_all_its_optimizers() -> None:
    kept = []
    for _ in range(20):
        params = make_params([(3,)])
        set_grads(params, params, 1)
        opt = fuseopt.compile(torch.optim.SGD(params, lr=0.1))
        opt.step()
        kept.append(opt)
    assert len(fuseopt.reports()) == 20
    kept.clear()
    del opt
    gc.collect()
    assert len(fuseopt.reports()) == 16


if __name__ == "__main__":
    told = steps if sys.argv[1] == "steps" else left
    print(*told(*sys.argv[-3:-2], *map(int, sys.argv[-2:])))


class OfOnes(torch.optim.Optimizer):
    """Makes state that is the same for all lanes, and changes it in the same step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if len(state) == 0:
                state["a"], state["b"] = torch.ones_like(p), torch.ones(())
            state["a"].mul_(0.5)
            p.sub_(state["a"] * p.grad * state["b"])


def test_state_that_all_lanes_share_is_copied_when_it_is_filled() -> None:
    """It was copied before the launch, so that led lanes had memory of nobody."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(3, 2 + i % 2)) for i in range(20)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    opt, plain = fuseopt.compile(OfOnes(ours)), OfOnes(theirs)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        opt.step()
        plain.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q)
            assert torch.equal(opt.state[p]["a"], plain.state[q]["a"])
            assert torch.equal(opt.state[p]["b"], plain.state[q]["b"])
    assert "of 20 lanes" in fuseopt.reports()[0].traced
