"""Averages of other packages: their own updates, traced; stand-ins of their shape."""

from __future__ import annotations

import ast
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from tests.tails.packages import module_of, path_of
from tests.tails.twins import same


class Whole(torch.nn.Module):
    """An average of all that a model holds, whole numbers as well."""

    def __init__(self, model: torch.nn.Module, decay: float = 0.99) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.decay = decay
        self.device = None

    def _update(self, model: Any, function: Callable[[Any, Any], Any]) -> None:
        pairs = zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        )
        with torch.no_grad():
            for own, new in pairs:
                own.copy_(function(own, new))

    def update(self, model: torch.nn.Module) -> None:
        self._update(model, lambda a, p: self.decay * a + (1.0 - self.decay) * p)


class Warming(torch.nn.Module):
    """An average whose decay grows with the step that it is told."""

    def __init__(self, model: torch.nn.Module, decay: float = 0.99) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.decay = decay
        self.begin = 1

    def get_decay(self, step: int | None = None) -> float:
        if step is None:
            return self.decay
        step = max(0, step - self.begin)
        return 0.0 if step == 0 else min(1 - (1 + step) ** -0.7, self.decay)

    @torch.no_grad()
    def update(self, model: torch.nn.Module, step: int | None = None) -> None:
        decay = self.get_decay(step)
        own, new = [], []
        pairs = zip(
            self.module.state_dict().values(), model.state_dict().values(), strict=True
        )
        for a, p in pairs:
            if a.is_floating_point():
                own.append(a)
                new.append(p)
            else:
                a.copy_(p)
        torch._foreach_lerp_(own, new, weight=1.0 - decay)


class Shadows:
    """An average of a list of parameters, which counts its updates."""

    def __init__(self, parameters: Any, decay: float = 0.99) -> None:
        self.shadow_params = [p.clone().detach() for p in parameters]
        self.decay = decay
        self.optimization_step = 0
        self.cur_decay_value: float | None = None
        self.temp_stored_params = None

    def get_decay(self, optimization_step: int) -> float:
        step = max(0, optimization_step - 1)
        return 0.0 if step == 0 else min((1 + step) / (10 + step), self.decay)

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        if isinstance(parameters, torch.nn.Module):
            parameters = parameters.parameters()
        parameters = list(parameters)
        self.optimization_step += 1
        decay = self.get_decay(self.optimization_step)
        self.cur_decay_value = decay
        for a, p in zip(self.shadow_params, parameters, strict=True):
            with contextlib.nullcontext():
                if p.requires_grad:
                    a.sub_((1 - decay) * (a - p))
                else:
                    a.copy_(p)


def timm(name: str) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        return getattr(module_of("timm", "utils/model_ema.py"), name)(*args, **kwargs)

    return make


def diffusers(*args: Any, **kwargs: Any) -> Any:
    """The class alone: its module loads half of the package."""
    tree = ast.parse(path_of("diffusers", "training_utils.py").read_text())
    (node,) = [x for x in tree.body if getattr(x, "name", "") == "EMAModel"]
    space: dict[str, Any] = {
        "torch": torch,
        "contextlib": contextlib,
        "is_transformers_available": lambda: False,
    }
    head = "from __future__ import annotations\nfrom typing import Any, Iterable\n"
    exec(head + ast.unparse(node), space)
    return space["EMAModel"](*args, **kwargs)


MODULES: dict[str, Callable[..., Any]] = {
    "whole": Whole,
    "warming": Warming,
    "timm2": timm("ModelEmaV2"),
    "timm3": timm("ModelEmaV3"),
    "timm3-warm": lambda m: timm("ModelEmaV3")(m, use_warmup=True, update_after_step=1),
    "timm3-apart": lambda m: timm("ModelEmaV3")(m, foreach=False),
    "timm3-params": lambda m: timm("ModelEmaV3")(m, exclude_buffers=True),
}
LISTS: dict[str, Callable[..., Any]] = {
    "shadows": Shadows,
    "diffusers": diffusers,
    "diffusers-lists": lambda ps: diffusers(ps, foreach=True, use_ema_warmup=True),
}


class Training:
    """A model with buffers, an optimizer, an average, a scaler."""

    def __init__(self, make: Callable[..., Any], of_list: bool, scaled: bool) -> None:
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(5)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 5), norm)
        self.net[0].bias.requires_grad_(not of_list)
        params = list(self.net.parameters())
        self.opt = torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.01)
        self.of = params if of_list else self.net
        self.average = make(self.of)
        self.scaler: Any = None
        if scaled:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

    def backward(self, n: int) -> None:
        torch.manual_seed(n)
        self.opt.zero_grad()
        loss = self.net(torch.randn(8, 4)).square().sum()
        if self.scaler is not None:
            loss = self.scaler.scale(loss) * (float("inf") if n == 3 else 1.0)
        loss.backward()

    def eager(self, n: int, steps: bool, average: bool) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()
        if not average:
            return
        if isinstance(self.of, list):
            self.average.step(self.of)
        elif steps:
            self.average.update(self.net, step=n)
        else:
            self.average.update(self.net)

    def holds(self) -> dict[str, Any]:
        found = dict(vars(self.average))
        if isinstance(self.average, torch.nn.Module):
            found.update(self.average.state_dict())
        found.update(enumerate(found.get("shadow_params", ())))
        plain = (bool, int, float, torch.Tensor, type(None))
        found = {k: v for k, v in found.items() if isinstance(v, plain)}
        return {**found, **self.net.state_dict(prefix="of ")}


def alike(one: Training, other: Training) -> list[Any]:
    a, b = one.holds(), other.holds()
    assert [*a] == [*b]
    return [k for k in a if not same(a[k], b[k])]


def trained(
    make: Callable[..., Any], of_list: bool, scaled: bool, n: int = 8
) -> list[str]:
    """Train beside eager, every third step without the average; what was reported."""
    one, other = (Training(make, of_list, scaled) for _ in range(2))
    tail = fuseopt.tail(
        other.opt,
        scaler=other.scaler,
        clip_grad_norm=1.0,
        ema=[(other.average, other.of)],
        check=True,
    )
    steps = hasattr(one.average, "get_decay") and not of_list
    known = len(fuseopt.reports())
    for k in range(n):
        for x in (one, other):
            x.backward(k)
            if k == 4:
                x.average.decay = 0.9
        average = k % 3 != 1
        one.eager(k, steps, average)
        tail(average=average, step=k if steps else None)
        if other.scaler is not None:
            other.scaler.update()
        assert alike(one, other) == []
    return [r.fallback for r in fuseopt.reports()[known:]]


@pytest.mark.family(15)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_averages_of_modules(name: str, scaled: bool) -> None:
    said = trained(MODULES[name], False, scaled)
    assert said == [""] * len(said)


@pytest.mark.family(3)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", LISTS)
def test_averages_of_lists(name: str, scaled: bool) -> None:
    said = trained(LISTS[name], True, scaled)
    assert said == [""] * len(said)


@pytest.mark.slow
def test_a_schedule_compiles_nothing_anew() -> None:
    for name, of_list in (("warming", False), ("shadows", True)):
        made = MODULES[name] if name in MODULES else LISTS[name]
        assert len(trained(made, of_list, scaled=False, n=14)) <= 5


class Logging(Shadows):
    """Its update leaves what no stand-in knows."""

    def step(self, parameters: Any) -> None:
        self.last = len(list(parameters))
        super().step(parameters)


class Rounding(Shadows):
    """Its update draws random numbers of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        for a, p in zip(self.shadow_params, parameters, strict=True):
            noise = torch.rand(a.shape, generator=self.generator)
            a.lerp_(p, 0.5).add_(noise, alpha=1e-3)


class Every(Shadows):
    """It looks at how often it was updated, which is another number in each call."""

    def step(self, parameters: Any) -> None:
        if self.optimization_step % 2:
            self.optimization_step += 1
            return
        Shadows.step(self, parameters)


class Impatient(Shadows):
    """It asks for the decay of another step than the next."""

    @torch.no_grad()
    def step(self, parameters: Any) -> None:
        weight = 1 - self.get_decay(self.optimization_step)
        self.optimization_step += 1
        for a, p in zip(self.shadow_params, parameters, strict=True):
            a.lerp_(p, weight)


class Guarded(Shadows):
    """It has attributes of its own kind."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, 0.5 if name == "cur_decay_value" else value)


def replaced(parameters: Any) -> Any:
    """One object has a decay of its own."""
    made = Shadows(parameters)
    made.get_decay = lambda step: 0.5  # type: ignore[method-assign, assignment]
    return made


def hooked(model: torch.nn.Module) -> Any:
    """What the state of the average is, is made when it is asked for."""
    made = Whole(model)

    def double(module: Any, state: dict[str, Any], prefix: str, more: Any) -> None:
        state[f"{prefix}0.bias"] = state[f"{prefix}0.bias"] * 2

    made.module.register_state_dict_post_hook(double)
    return made


def test_a_state_that_is_made() -> None:
    said = [x for x in trained(hooked, False, scaled=False) if x]
    assert said == [
        "An average runs its own update: a module has state besides its tensors"
    ]


@pytest.mark.family(6)
@pytest.mark.parametrize(
    "make", [Logging, Rounding, Every, Impatient, Guarded, replaced]
)
def test_what_is_not_known_is_called_as_it_is(make: Callable[..., Any]) -> None:
    """All else of the tail stays one graph."""
    said = [x for x in trained(make, True, scaled=True) if x]
    assert len(said) == 1
    assert said[0].startswith("An average runs its own update")


def test_with_fallback_error_it_is_said() -> None:
    other = Training(Logging, True, False)
    tail = fuseopt.tail(other.opt, ema=[(other.average, other.of)], fallback="error")
    other.backward(0)
    tail()
    other.backward(1)
    before = copy.deepcopy(other.holds())
    with pytest.raises(
        fuseopt.errors.CaptureError, match=r"runs its own update.*it writes last"
    ):
        tail()
    after = other.holds()
    assert [k for k in before if not same(before[k], after[k])] == []


@pytest.mark.slow
def test_what_changes_between_calls() -> None:
    """Other tensors, another number of updates, another function of the class."""
    one, other = Training(Shadows, True, False), Training(Shadows, True, False)
    tail = fuseopt.tail(other.opt, clip_grad_norm=1.0, ema=[(other.average, other.of)])
    plain = Shadows.get_decay
    try:
        for n in range(9):
            for x in (one, other):
                x.backward(n)
                if n == 3:
                    own = x.average.shadow_params
                    x.average.shadow_params = [a.clone() for a in own]
                if n == 5:
                    x.average.optimization_step = 100
            if n == 7:
                Shadows.get_decay = lambda self, n: 0.25  # type: ignore
            one.eager(n, False, True)
            tail()
            assert alike(one, other) == []
    finally:
        Shadows.get_decay = plain  # type: ignore[method-assign]


def test_what_is_no_average() -> None:
    x = Training(Whole, False, False)
    for wrong, text in (
        ((x.average, 0.9), "takes the model that it averages"),
        ((x.average, x.net, 0.9), "takes the parameters that it averages"),
        ((object(), 0.9), "ema takes no object"),
    ):
        with pytest.raises(TypeError, match=text):
            fuseopt.tail(x.opt, ema=[wrong])


def test_several_averages_in_one_tail() -> None:
    """One of them cannot be traced: then none of them is, and all are right."""
    one, other = Training(Shadows, True, True), Training(Shadows, True, True)
    more = [(Whole(x.net), Logging(x.of)) for x in (one, other)]
    tail = fuseopt.tail(
        other.opt,
        scaler=other.scaler,
        clip_grad_norm=1.0,
        ema=[
            (other.average, other.of),
            (more[1][0], other.net),
            (more[1][1], other.of),
        ],
    )
    for n in range(5):
        for x in (one, other):
            x.backward(n)
        one.eager(n, False, True)
        more[0][0].update(one.net)
        more[0][1].step(one.of)
        tail()
        other.scaler.update()
        assert alike(one, other) == []
        a, b = (x.state_dict() for x, _ in more)
        assert all(same(a[key], b[key]) for key in a)
        assert all(map(same, *(x.shadow_params for _, x in more)))
    assert more[0][1].optimization_step == more[1][1].optimization_step == 5
