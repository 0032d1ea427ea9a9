"""fuseopt.compile: isolation, and all that works on the plain optimizer works here."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fuseopt
from fuseopt.errors import ConfigError, FuseoptError, NotAnOptimizer, UnsupportedInput
from tests.steps import (
    differences,
    eager_step,
    has,
    make,
    make_params,
    same_bits,
    set_grads,
)
from tests.versions import limit_counts_the_dead

SHAPES = [(3, 4), (5,)]


class Pair:
    """A plain optimizer and one of fuseopt.compile, over equal parameters."""

    def __init__(
        self,
        build: str | Callable[[Any, bool], torch.optim.Optimizer] = "AdamW",
        compiled: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.theirs, self.mine = make_params(SHAPES), make_params(SHAPES)
        if isinstance(build, str):
            self.plain = make(build, self.theirs, reference=True, **options)
            made = make(build, self.mine, **options)
        else:
            self.plain, made = build(self.theirs, True), build(self.mine, False)
        self.opt = fuseopt.compile(made, **(compiled or {}))
        assert self.opt is made
        self.seed = 0

    def grads(self) -> None:
        self.seed += 1
        set_grads(self.theirs, self.mine, self.seed)

    def step(self) -> None:
        self.grads()
        eager_step(self.plain)
        self.opt.step()
        self.check()

    def check(self) -> None:
        assert differences(self.theirs, self.plain, self.mine, self.opt) == []

    @property
    def both(self) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return self.plain, self.opt


def launches() -> list[int]:
    """Launches of each graph compiled so far; none may have been given up."""
    reports = fuseopt.reports()
    assert [r.fallback for r in reports] == [""] * len(reports)
    return [r.launches for r in reports]


# ---------------------------------------------------------------- isolation


@pytest.mark.slow
def test_ten_optimizers_of_a_class_stay_compiled() -> None:
    pairs = [Pair() for _ in range(10)]
    for _ in range(2):
        for pair in pairs:
            pair.step()
    assert launches() == [1] * 10


def test_the_two_optimizers_of_a_gan() -> None:
    pairs = [Pair("Adam"), Pair("Adam", lr=3e-4, betas=(0.5, 0.9))]
    for pair in pairs:
        for options in ({"step_size": 2}, {"step_size": 3}):
            for opt in pair.both:
                lr_scheduler.StepLR(opt, **options)
    for _ in range(4):
        for pair in pairs:
            pair.step()
    assert launches() == [1, 1]


def test_an_optimizer_dies_with_its_last_reference() -> None:
    pair = Pair("SGD")
    pair.step()
    dead = weakref.ref(pair.opt)
    step = pair.opt.step
    del pair
    gc.collect()
    assert dead() is None
    with pytest.raises(ReferenceError, match="no longer"):
        step()


def test_a_beta_that_differs_between_optimizers() -> None:
    """Dynamo then makes it a symbol, and a tensor of it by another function."""
    for betas in ((0.9, 0.99), (0.5, 0.9), (0.3, 0.7)):
        pair = Pair("Adam", betas=betas)
        pair.step()
    assert launches() == [1, 1, 1]


def test_dynamos_reset_is_survived() -> None:
    pair = Pair("SGD", momentum=0.9)
    pair.step()
    torch._dynamo.reset()
    pair.step()
    pair.step()


@pytest.mark.slow
def test_threads_step_an_optimizer_each() -> None:
    pairs = [Pair("Adam") for _ in range(4)]
    failed: list[BaseException] = []

    def work(pair: Pair) -> None:
        try:
            for _ in range(5):
                pair.opt.step()
        except BaseException as error:
            failed.append(error)

    for pair in pairs:
        pair.grads()
        for _ in range(5):
            eager_step(pair.plain)
    threads = [threading.Thread(target=work, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for pair in pairs:
        pair.check()
    assert launches() == [1] * 4


# ---------------------------------------------------------------- the limit


def warned(run: Callable[[], None]) -> list[str]:
    """What fuseopt warns of, under a limit of two compilations."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch._dynamo.config.patch(recompile_limit=2):
            run()
    texts = [str(w.message) for w in caught]
    return [t for t in texts if t.startswith("fuseopt:")]


def test_a_step_inside_another_function_warns_when_dynamo_gives_up() -> None:
    def run(backend: Any) -> None:
        for _ in range(4):
            params = make_params(SHAPES)
            opt = make("SGD", params)
            set_grads(params, params, 1)

            def train(opt: Any = opt) -> None:
                opt.step()

            torch.compile(train, backend=backend)()

    (text,) = warned(lambda: run("fuseopt"))
    assert text.startswith("fuseopt: torch hit its recompile limit for SGD.step")
    assert "fuseopt.compile(optimizer) compiles each separately" in text
    assert len(fuseopt.reports()) == 2
    torch._dynamo.reset()
    assert warned(lambda: run("eager")) == []


def test_an_isolated_step_warns_when_dynamo_gives_up() -> None:
    def run() -> None:
        pair = Pair("SGD", weight_decay=0.1)
        for n in (1, 2, 3, 4):
            pair.grads()
            for p in pair.mine:
                if n == 3:
                    p.grad = None
            pair.opt.param_groups[0]["nesterov"] = n % 2 == 0
            pair.opt.param_groups[0]["momentum"] = 0.9
            pair.opt.step()

    (text,) = warned(run)
    assert text.startswith("fuseopt: torch hit its recompile limit for the step of one")
    assert "TORCH_LOGS=recompiles" in text


@pytest.mark.parametrize("way", ["own", "bound", "tail"])
def test_a_steady_step_goes_on_when_dynamo_gives_up(way: str) -> None:
    """Its graphs are compiled whole, so that Dynamo raises beyond its limit."""

    def parameters() -> list[Any]:
        return [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]

    def run() -> None:
        (plain, eager), (params, opt) = (
            (ps, SGD(ps, lr=0.1, momentum=0.9)) for ps in (parameters(), parameters())
        )
        step: Any = opt.step
        if way == "own":
            fuseopt.compile(opt)
            step = opt.step
        elif way == "bound":
            step = torch.compile(step, backend="fuseopt")
        else:
            step = fuseopt.tail(opt)
        for n in range(12):
            if n % 3 == 0:
                for p, q in zip(plain, params, strict=True):
                    p.grad = torch.full_like(p, n - 5.0)
                    q.grad = p.grad.clone()
                for group in (eager.param_groups[0], opt.param_groups[0]):
                    group["nesterov"], group["maximize"] = n % 2 == 1, n > 5
            eager.step()
            step()
            assert all(map(same_bits, params, plain))

    (text,) = warned(run)
    assert text.startswith("fuseopt: torch hit its recompile limit for the step of one")


def test_any_function_warns_when_dynamo_gives_up() -> None:
    @torch.compile(backend="fuseopt", dynamic=False)
    def double(x: torch.Tensor) -> None:
        x.mul_(2)

    def run() -> None:
        for n in (2, 3, 4, 5):
            double(torch.ones(n))

    (text,) = warned(run)
    assert f"double ({__file__}:" in text


# ---------------------------------------------------------------- arguments


def test_called_again_it_replaces_the_options() -> None:
    pair = Pair("SGD")
    step = pair.opt.step
    pair.step()
    assert fuseopt.compile(pair.opt) is pair.opt
    pair.step()
    assert len(fuseopt.reports()) == 1
    fuseopt.compile(pair.opt, numerics="fast")
    assert pair.opt.step is step
    pair.grads()
    pair.opt.step()
    assert len(fuseopt.reports()) == 2


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), torch.optim.SGD, None, "sgd"])
def test_what_is_no_optimizer_is_refused(thing: Any) -> None:
    with pytest.raises(NotAnOptimizer, match=r"torch\.optim\.Optimizer") as caught:
        fuseopt.compile(thing)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, FuseoptError)


def test_an_unknown_option_is_an_error_at_once() -> None:
    opt = make("SGD", make_params(SHAPES))
    with pytest.raises(ConfigError, match="did you mean 'verify'"):
        fuseopt.compile(opt, verfy=True)
    assert "step" not in vars(opt)


def test_verify_is_passed_on() -> None:
    pair = Pair(compiled={"verify": True})
    pair.step()
    pair.step()


def test_steps_that_torch_disables_are_refused_in_one_sentence() -> None:
    for opt in (
        torch.optim.LBFGS(make_params(SHAPES)),
        torch.optim.SparseAdam(make_params(SHAPES)),
    ):
        with pytest.raises(UnsupportedInput) as caught:
            fuseopt.compile(opt)
        assert str(caught.value) == (
            f"{type(opt).__name__}.step is disabled under Dynamo, so torch never "
            "calls a backend. Leave this optimizer uncompiled."
        )
        assert "step" not in vars(opt)


@pytest.mark.slow
def test_disabled_steps_are_known_in_a_fresh_process() -> None:
    """torch marks them when it compiles its first function, not before."""
    code = (
        "import torch, fuseopt\n"
        "p = [torch.nn.Parameter(torch.ones(2))]\n"
        "try: fuseopt.compile(torch.optim.LBFGS(p))\n"
        "except fuseopt.errors.UnsupportedInput: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "refused", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "take",
    [
        "from fuseopt.backend import fuseopt as backend",
        "import importlib.metadata as m\n"
        "entry = 'fuseopt', 'fuseopt.backend:fuseopt', 'torch_dynamo_backends'\n"
        "m.EntryPoint(*entry).load()\n"
        "backend = 'fuseopt'",
    ],
)
def test_what_took_the_backend_before_dynamo_is_told_what_others_are(
    take: str,
) -> None:
    """Dynamo is told of the backend when it is there, and before it first traces."""
    code = (
        "import sys, torch, fuseopt\n"
        f"{take}\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "p = torch.nn.Parameter(torch.ones(2))\n"
        "p.grad = torch.ones(2)\n"
        "opt = torch.optim.Adam([p], fused=True)\n"
        "step = torch.compile(lambda: opt.step(), backend=backend)\n"
        "torch._dynamo.reset()\n"
        "try: step()\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "was made with fused=True" in done.stdout, done.stderr


# ---------------------------------------------------------------- schedulers


@pytest.mark.family(4)
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_schedulers_made_before_or_after(before: bool, tensor: bool) -> None:
    options = {"lr": torch.tensor(0.1)} if tensor else {"lr": 0.1}
    pair = Pair("Adam", **options)
    if before:
        plain = make("Adam", pair.mine, **options)
        schedules = [lr_scheduler.ExponentialLR(o, 0.9) for o in (pair.plain, plain)]
        pair.opt = fuseopt.compile(plain)
    else:
        schedules = [lr_scheduler.ExponentialLR(o, 0.9) for o in pair.both]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            pair.step()
            for schedule in schedules:
                schedule.step()
    assert launches() == [1]
    fuseopt.compile(pair.opt)
    pair.step()
    assert len(fuseopt.reports()) == 1


@pytest.mark.parametrize("before", [False, True])
def test_a_scheduler_warns_of_a_wrong_order_as_ever(before: bool) -> None:
    opt = make("SGD", make_params(SHAPES))
    if before:
        schedule = lr_scheduler.StepLR(opt, 2)
        fuseopt.compile(opt)
    else:
        fuseopt.compile(opt)
        schedule = lr_scheduler.StepLR(opt, 2)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()


# ---------------------------------------------------------------- hooks


def test_hooks_see_what_they_see_on_the_plain_optimizer() -> None:
    pair = Pair("SGD", momentum=0.9)
    seen: dict[int, list[Any]] = {id(opt): [] for opt in pair.both}

    def hook(name: str) -> Any:
        def record(opt: Any, args: Any, kwargs: Any) -> None:
            assert args[0] is opt
            first = opt.param_groups[0]["params"][0]
            seen[id(opt)].append((name, args[1:], kwargs, first.detach().clone()))

        return record

    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
    ]
    for opt in pair.both:
        opt.register_step_pre_hook(hook("pre"))
        opt.register_step_post_hook(hook("post"))
    pair.step()
    for handle in handles:
        handle.remove()
    pair.step()
    theirs, mine = (seen[id(opt)] for opt in pair.both)
    order = ["global pre", "pre", "post", "global post", "pre", "post"]
    assert [x[0] for x in mine] == [x[0] for x in theirs] == order
    for a, b in zip(theirs, mine, strict=True):
        assert a[1:3] == b[1:3]
        assert torch.equal(a[3], b[3])


def test_a_pre_hook_that_changes_gradients_or_arguments() -> None:
    pair = Pair("SGD")

    def double(opt: Any, args: Any, kwargs: Any) -> Any:
        for p in opt.param_groups[0]["params"]:
            p.grad.mul_(2)
        return (args[0], lambda: 7.0), kwargs

    for opt in pair.both:
        opt.register_step_pre_hook(double)
    pair.grads()
    assert pair.plain.step() == pair.opt.step() == 7.0  # type: ignore[func-returns-value]
    pair.check()


def test_the_profiler_names_the_step() -> None:
    pair = Pair("SGD")
    pair.step()
    with torch.profiler.profile() as profile:
        pair.step()
    counts = {e.key: e.count for e in profile.key_averages()}
    assert counts["Optimizer.step#SGD.step"] == 2


# ---------------------------------------------------------------- state


@pytest.mark.slow
def test_state_dicts_are_the_same_and_load_any_number_of_times() -> None:
    pair = Pair()
    pair.step()
    saved = [copy.deepcopy(opt.state_dict()) for opt in pair.both]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    assert saved[0]["param_groups"] == saved[1]["param_groups"]
    pair.step()
    for _ in range(10):
        for opt, state in zip(pair.both, saved, strict=True):
            opt.load_state_dict(state)
        pair.step()
    assert launches() == [1] * 11


def test_a_state_dict_moves_between_plain_and_compiled() -> None:
    pair = Pair("SGD", momentum=0.9)
    pair.step()
    plain = torch.optim.SGD(pair.mine, lr=1.0)
    plain.load_state_dict(pair.opt.state_dict())
    pair.opt = fuseopt.compile(plain)
    pair.step()
    assert plain.param_groups[0]["momentum"] == 0.9


def test_a_parameter_group_is_added() -> None:
    pair = Pair("Adam")
    pair.step()
    for group, params in zip(pair.both, (pair.theirs, pair.mine), strict=True):
        new = make_params([(2, 3)])
        params.extend(new)
        group.add_param_group({"params": new, "lr": 0.3})
    pair.step()
    pair.step()
    assert launches() == [1, 1]


@pytest.mark.family(3)
@pytest.mark.parametrize("way", ["pickle", "deepcopy", "torch.save"])
def test_a_copy_is_a_plain_optimizer(way: str) -> None:
    pair = Pair()
    pair.step()
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(pair.opt))
    elif way == "deepcopy":
        twin = copy.deepcopy(pair.opt)
    else:
        file = io.BytesIO()
        torch.save(pair.opt, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert "step" not in vars(twin)
    pair.mine = twin.param_groups[0]["params"]
    pair.opt = fuseopt.compile(twin)
    pair.step()


class KeepsItsDict(torch.optim.SGD):
    """Pickles all its attributes, the compiled step among them."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_of_all_attributes_is_plain_too(way: str) -> None:
    opt = fuseopt.compile(KeepsItsDict(make_params(SHAPES), lr=0.1))
    twin = pickle.loads(pickle.dumps(opt)) if way == "pickle" else copy.deepcopy(opt)
    assert twin.step.__self__ is twin
    assert inspect.ismethod(twin.step)
    twin.step()
    assert opt.step.__self__ is opt


# ---------------------------------------------------------------- closures


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_closures_run_once_with_gradients_on(name: str) -> None:
    pair = Pair(name)
    calls: list[bool] = []

    def closure_of(params: Any, opt: torch.optim.Optimizer, scale: float) -> Any:
        def closure() -> torch.Tensor:
            opt.zero_grad()
            calls.append(torch.is_grad_enabled())
            loss = sum((p * p * scale).sum() for p in params)
            loss.backward()
            return loss

        return closure

    for i in range(12):
        want = pair.plain.step(closure_of(pair.theirs, pair.plain, 1.0 + i))
        closure = closure_of(pair.mine, pair.opt, 1.0 + i)
        got = pair.opt.step(closure) if i % 2 else pair.opt.step(closure=closure)
        assert torch.equal(got, want)
        assert got.requires_grad
        pair.check()
    assert calls == [True] * 24
    assert set(launches()) == {1}
    assert len(launches()) <= 2  # by position and by keyword
    pair.step()


def test_a_compiled_model_inside_a_closure_stays_compiled() -> None:
    pair = Pair("SGD")
    ran: list[int] = []

    def backend(gm: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(1)
            return gm.forward(*args)

        return run

    model = torch.compile(lambda x, y: (x * x).sum() + (y * y).sum(), backend=backend)

    def closure() -> Any:
        pair.opt.zero_grad()
        loss = model(*pair.mine)
        loss.backward()
        return loss

    for _ in range(3):
        pair.opt.step(closure)
    assert ran == [1, 1, 1]
    assert set(launches()) == {1}


def test_an_error_in_a_closure_reaches_the_caller() -> None:
    pair = Pair("SGD")

    def closure() -> float:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pair.opt.step(closure)
    pair.step()
    assert torch.is_grad_enabled()


# ---------------------------------------------------------------- grad mode, AMP, fused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_grad_mode_is_as_before(enabled: bool) -> None:
    pair = Pair("Adam")
    with torch.set_grad_enabled(enabled):
        pair.step()
        assert torch.is_grad_enabled() is enabled
    with torch.set_grad_enabled(not enabled):
        pair.step()
        assert torch.is_grad_enabled() is not enabled
    assert launches() == [1]


def test_zero_grad() -> None:
    pair = Pair("SGD")
    pair.step()
    pair.opt.zero_grad()
    assert [p.grad for p in pair.mine] == [None, None]


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_unscales_and_skips(fused: bool) -> None:
    def build(params: Any, plain: bool) -> torch.optim.Optimizer:
        how = {"fused": True} if fused and not plain else {"foreach": True}
        return torch.optim.SGD(params, lr=0.1, **how)

    pair = Pair(build)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for broken in (False, True, False):
        pair.grads()
        before = [p.detach().clone() for p in pair.mine]
        for scaler, opt in zip(scalers, pair.both, strict=True):
            scaler.scale(torch.ones(()))
            if broken:
                opt.param_groups[0]["params"][0].grad.fill_(float("inf"))
            scaler.step(opt)
            scaler.update()
        pair.check()
        same = all(map(torch.equal, before, pair.mine))
        assert same is broken
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert launches() == [1]


@pytest.mark.family(4)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_becomes_our_own(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def build(params: Any, plain: bool) -> torch.optim.Optimizer:
        if plain:
            return make(name, params, reference=True)
        return make(name, params, fused=True, foreach=None)

    with caplog.at_level(logging.INFO, "fuseopt"):
        pair = Pair(build)
    assert [r.message for r in caplog.records] == [
        f"{name} asks for torch's fused kernels; its step runs in fuseopt's instead"
    ]
    pair.step()
    pair.step()
    assert launches() == [1]
    assert pair.opt.state_dict()["param_groups"][0]["fused"] is True
    pair.opt.load_state_dict(pair.opt.state_dict())
    pair.step()
    assert launches() == [1, 1]
    report = fuseopt.explain(pair.opt.step)
    assert (report.launches, report.fallback) == (1, "")


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_fused_with_a_tensor_as_rate(name: str) -> None:
    """Adam's foreach step takes none."""
    kind = getattr(torch.optim, name)

    def build(params: Any, plain: bool) -> torch.optim.Optimizer:
        return kind(params, lr=torch.tensor(1e-2), fused=not plain)

    pair = Pair(build)
    for _ in range(3):
        pair.step()
    assert launches() == [1]


# ---------------------------------------------------------------- others' optimizers


class Own(torch.optim.Optimizer):
    """A for-loop optimizer with a signature of its own and an int counter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, scale: float = 1.0, *, twice: bool = False, closure: Any = None):  # type: ignore[override, no-untyped-def]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p)
                state["t"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                for _ in range(2 if twice else 1):
                    p.sub_(state["m"], alpha=group["lr"] * scale / state["t"] ** 0.5)
        return loss


class Younger(Own):
    """Calls the step it inherits."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
        return super().step(*args, **kwargs)


class Decayed(torch.optim.AdamW):
    """Inherits a step that breaks the graph: two graphs, the second of shared code."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.999)
        return super().step(closure)


class WithoutDecorator(torch.optim.Optimizer):
    """Switches gradients off inside."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad.sign(), alpha=-0.1)


@pytest.mark.family(3)
@pytest.mark.parametrize("kind", [Own, Younger, WithoutDecorator])
def test_steps_of_others(kind: Any) -> None:
    pairs = [Pair(lambda params, plain: kind(params)) for _ in range(9)]
    for pair in pairs:
        pair.step()
    assert launches() == [1] * 9
    assert {r.lanes for r in fuseopt.reports()} == {2}
    for _ in range(4):
        pairs[0].step()
    assert len(launches()) <= 9 + 3  # a counter that Dynamo makes a symbol


@pytest.mark.slow
@limit_counts_the_dead
def test_ten_that_inherit_their_step_stay_compiled() -> None:
    def build(params: Any, plain: bool) -> torch.optim.Optimizer:
        return Decayed(params, foreach=True)

    pairs = [Pair(build) for _ in range(10)]  # held: of dropped ones few Reports stay
    for pair in pairs:
        pair.step()
    assert launches() == [1, 1] * 10


def test_a_step_that_is_no_function_is_refused() -> None:
    class Odd(torch.optim.SGD):
        pass

    opt = Odd(make_params(SHAPES))
    opt.step = len  # type: ignore[method-assign, assignment]
    with pytest.raises(UnsupportedInput, match="a builtin_function_or_method, not"):
        fuseopt.compile(opt)


def test_arguments_of_any_signature_arrive() -> None:
    pair = Pair(lambda params, plain: Own(params))
    assert inspect.signature(pair.opt.step) == inspect.signature(pair.plain.step)
    pair.grads()
    for opt in pair.both:
        assert opt.step(0.5, twice=True, closure=lambda: 3) == 3  # type: ignore[call-arg]
    pair.check()
    for opt in pair.both:
        with pytest.raises(TypeError, match="unknown"):
            opt.step(unknown=1)  # type: ignore[call-arg]


def test_a_step_inside_a_compiled_function() -> None:
    pair = Pair("Adam")

    @torch.compile(backend="eager")
    def train(params: Any) -> None:
        for p in params:
            p.grad.mul_(0.5)
        pair.opt.step()
        for p in params:
            p.grad.add_(1)

    for _ in range(3):
        pair.grads()
        for p in pair.theirs:
            p.grad.mul_(0.5)
        eager_step(pair.plain)
        with torch.no_grad():
            train(pair.mine)
        pair.check()
    assert launches() == [1]


def test_explain_takes_a_compiled_step() -> None:
    pair = Pair()
    report = fuseopt.explain(pair.opt.step)
    assert (report.launches, report.lanes) == (1, 2)
    assert fuseopt.reports() == []
    assert not pair.opt.state


@pytest.mark.family(10)
@pytest.mark.parametrize("name", ["Adadelta", "NAdam", "RAdam", "Rprop", "ASGD"])
@pytest.mark.parametrize("foreach", [True, False])
def test_other_optimizers_of_torch(name: str, foreach: bool) -> None:
    assert has(name, "foreach")
    pair = Pair(name, foreach=foreach)
    pair.step()
    pair.step()
    assert launches() == [1]
