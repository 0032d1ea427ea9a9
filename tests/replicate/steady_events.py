"""What a user may change between two calls of a step."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from typing import Any

import torch

from tests.replicate.steady_twins import Side

Event = Callable[[Side], object]


def option(name: str, value: Callable[[Any], Any], group: int = 0) -> Event:
    """Give an option of a group another value, made from the present one."""

    def do(s: Side) -> None:
        before = s.opt.param_groups[group].get(name, 1.0)
        s.opt.param_groups[group][name] = value(before)

    return do


def attribute(name: str, value: Callable[[Any], Any]) -> Event:
    def do(s: Side) -> None:
        setattr(s.opt, name, value(getattr(s.opt, name, 1.0)))

    return do


def each_grad(change: Callable[[Side, int, Any], Any]) -> Event:
    def do(s: Side) -> None:
        for n, p in enumerate(s.ps):
            p.grad = change(s, n, p)

    return do


def numbers(x: Any) -> Any:
    return x * 0.5 if isinstance(x, (int, float)) and not isinstance(x, bool) else x


def _own_class(s: Side) -> type:
    return type(s.opt)


def add_group(s: Side) -> None:
    drawn = torch.Generator().manual_seed(99)
    p = torch.nn.Parameter(torch.randn(4, 3, generator=drawn))
    s.ps.append(p)
    p.grad = torch.ones_like(p)
    s.opt.add_param_group({"params": [p]})


def move_parameter(s: Side) -> None:
    a, b = s.opt.param_groups
    b["params"].append(a["params"].pop())


def move_first(s: Side) -> None:
    a, b = s.opt.param_groups
    b["params"].append(a["params"].pop(0))


def swap_groups(s: Side) -> None:
    s.opt.param_groups.reverse()


def swap_params(s: Side) -> None:
    of = s.opt.param_groups[0]["params"]
    of[0], of[3] = of[3], of[0]


def swap_lists(s: Side) -> None:
    a, b = s.opt.param_groups
    a["params"], b["params"] = b["params"], a["params"]


def replace_parameter(s: Side, n: int = 0) -> None:
    new = torch.nn.Parameter(s.ps[n].detach().clone() + 1)
    new.grad = s.ps[n].grad
    s.opt.param_groups[0]["params"][n] = new
    s.ps[n] = new


def with_state(s: Side, n: int, change: Callable[[dict[str, Any]], Any]) -> None:
    state = s.opt.state.get(s.ps[n])
    if state:
        change(state)


def state_event(change: Callable[[dict[str, Any]], Any], n: int = 1) -> Event:
    return lambda s: with_state(s, n, change)


def other_state(state: dict[str, Any]) -> None:
    for k, x in state.items():
        state[k] = x * 2 if isinstance(x, torch.Tensor) else x


def other_state_dtype(state: dict[str, Any]) -> None:
    for k, x in state.items():
        if isinstance(x, torch.Tensor) and x.dim():
            state[k] = x.double().float().t() if x.dim() == 2 else x.clone()


def reload(s: Side) -> None:
    s.opt.load_state_dict(copy.deepcopy(s.opt.state_dict()))


def reload_other(s: Side) -> None:
    saved = copy.deepcopy(s.opt.state_dict())
    for group in saved["param_groups"]:
        group["lr"] = group["lr"] * 2
    s.opt.load_state_dict(saved)


def grads_of(n: int, make: Callable[[Any], Any]) -> Event:
    def do(s: Side) -> None:
        p = s.ps[n]
        p.grad = make(p)

    return do


def shared_gradient(s: Side) -> None:
    s.ps[3].grad = s.ps[0].grad


def overlapping_gradients(s: Side) -> None:
    memory = torch.randn(13, generator=torch.Generator().manual_seed(4))
    s.ps[0].grad = memory[:12].view(4, 3)
    s.ps[3].grad = memory[1:].view(4, 3)


def gradient_is_parameter(s: Side) -> None:
    s.ps[0].grad = s.ps[3].data


def gradient_is_own(s: Side) -> None:
    s.ps[0].grad = s.ps[0].data


def gradient_is_state(s: Side) -> None:
    state = s.opt.state.get(s.ps[3]) or {}
    for x in state.values():
        if isinstance(x, torch.Tensor) and x.shape == s.ps[0].shape:
            s.ps[0].grad = x
            return


def data_overlaps(s: Side) -> None:
    memory = torch.randn(13, generator=torch.Generator().manual_seed(4))
    s.ps[0].data = memory[:12].view(4, 3)
    s.ps[3].data = memory[1:].view(4, 3)


def swap_data(s: Side) -> None:
    s.ps[0].data, s.ps[3].data = s.ps[3].data, s.ps[0].data


def tied_data(s: Side) -> None:
    s.ps[0].data = s.ps[3].data


def to_double(s: Side) -> None:
    p = s.ps[0]
    p.data, p.grad = p.data.double(), None
    p.grad = torch.ones_like(p)
    state = s.opt.state.get(p)
    if state:
        for k, x in state.items():
            if isinstance(x, torch.Tensor) and x.dim():
                state[k] = x.double()


def class_function(s: Side) -> None:
    kind = _own_class(s)
    kind.step = kind.step  # type: ignore[attr-defined]
    kind.extra = lambda self: 1


def replaced_method(s: Side) -> None:
    def scaled(self: Any, x: Any) -> Any:
        return x * 3.0

    _own_class(s).scaled = scaled  # type: ignore[attr-defined]


def replaced_base_method(s: Side) -> None:
    s.module.Base.scaled = lambda self, x: x * 3.0


def replaced_code(s: Side) -> None:
    def scaled(self: Any, x: Any) -> Any:
        return x * 3.0

    s.module.Base.scaled.__code__ = scaled.__code__


def replaced_property(s: Side) -> None:
    s.module.Own.cooled = property(lambda self: 0.125)


def replaced_property_code(s: Side) -> None:
    s.module.Own.cooled.fget.__code__ = (lambda self: 0.125).__code__


def defaults_of_method(s: Side) -> None:
    s.module.Base.scaled.__defaults__ = (1,)


def helper(s: Side) -> None:
    s.module.damped = lambda x: x * 0.75


def helper_code(s: Side) -> None:
    s.module.damped.__code__ = (lambda x: x * 0.75).__code__


def method_of_object(s: Side) -> None:
    s.opt.scaled = types.MethodType(lambda self, x: x * 3.0, s.opt)


def function_on_object(s: Side) -> None:
    s.opt.scaled = lambda x: x * 3.0


def set_global(name: str, value: Any) -> Event:
    return lambda s: setattr(s.module, name, value)


def shadowed_builtin(s: Side) -> None:
    s.module.abs = lambda x: 7  # type: ignore[attr-defined]


def shadowed_len(s: Side) -> None:
    s.module.len = lambda x: 0  # type: ignore[attr-defined]


def deep(s: Side) -> None:
    s.module.TABLE["deep"][1] = 5.0


def table(s: Side) -> None:
    s.module.TABLE["a"] = 0.125


def table_tensor(s: Side) -> None:
    s.module.TABLE["a"] = torch.tensor(0.25)


def nested_attribute(s: Side) -> None:
    if hasattr(s.opt, "nested"):
        s.opt.nested["x"][1]["y"] = 2.5


def list_attribute(s: Side) -> None:
    if hasattr(s.opt, "numbers"):
        s.opt.numbers[1] = 2.5


def longer_list(s: Side) -> None:
    if hasattr(s.opt, "numbers"):
        s.opt.numbers.insert(0, 2.5)


def class_number(name: str, value: Any) -> Event:
    return lambda s: setattr(_own_class(s), name, value)


def base_number(s: Side) -> None:
    s.module.Base.floor = 0.75


def other_class(s: Side) -> None:
    kind = type(s.opt)
    other = type("Other", (kind,), {"slope": 3.0, "__module__": kind.__module__})
    s.opt.__class__ = other


def other_bases(s: Side) -> None:
    if type(s.opt) is s.module.Own:

        class New(s.module.Base):  # type: ignore[name-defined]
            floor = 0.625

        s.module.Own.__bases__ = (New,)


def deep_copied(s: Side) -> None:
    """Another optimizer takes over from here."""
    s.kept = copy.deepcopy(s.opt)


def params_of_type(kind: Callable[[Any], Any]) -> Event:
    def do(s: Side) -> None:
        group = s.opt.param_groups[0]
        group["params"] = kind(group["params"])

    return do


def _hook(s: Side, *_: Any) -> None:
    for p in s.ps:
        if p.grad is not None:
            p.grad.mul_(0.5)


def pre_hook(s: Side) -> None:
    s.opt.register_step_pre_hook(lambda *_: _hook(s))


def post_hook(s: Side) -> None:
    @torch.no_grad()
    def after(*_: Any) -> None:
        for p in s.ps:
            p.mul_(0.5)

    s.opt.register_step_post_hook(after)


def hook_adds_group(s: Side) -> None:
    done: list[int] = []

    def before(*_: Any) -> None:
        if not done:
            done.append(1)
            add_group(s)

    s.opt.register_step_pre_hook(before)


def hook_changes_rate(s: Side) -> None:
    def before(*_: Any) -> None:
        for group in s.opt.param_groups:
            group["lr"] = group["lr"] * 0.5

    s.opt.register_step_pre_hook(before)


def in_place_rate(s: Side) -> None:
    for group in s.opt.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.5)


def with_state_removed(s: Side) -> None:
    s.opt.state.pop(s.ps[2], None)


def all_state_removed(s: Side) -> None:
    s.opt.state.clear()


def state_replaced(s: Side) -> None:
    s.opt.state = collections.defaultdict(dict, s.opt.state)


def foreign_state(s: Side) -> None:
    s.opt.state[torch.nn.Parameter(torch.ones(2))] = {"x": 1}


def groups_replaced(s: Side) -> None:
    s.opt.param_groups = [dict(g) for g in s.opt.param_groups]


def group_replaced(s: Side) -> None:
    s.opt.param_groups[1] = dict(s.opt.param_groups[1], lr=0.5)


def group_removed(s: Side) -> None:
    del s.opt.param_groups[1]


def first_group_removed(s: Side) -> None:
    del s.opt.param_groups[0]


def emptied_group(s: Side) -> None:
    s.opt.param_groups[0]["params"].clear()


def eager_write(s: Side) -> None:
    with torch.no_grad():
        for p in s.ps:
            p.add_(0.5)


def frozen_parameter(s: Side) -> None:
    s.ps[0].requires_grad_(False)
    s.ps[0].grad = None


def frozen_with_gradient(s: Side) -> None:
    s.ps[0].requires_grad_(False)


def stepped_by_another(s: Side) -> None:
    """Another optimizer steps the same parameters."""
    s.kept = torch.optim.SGD(s.ps, 0.25)
    s.kept.step()


def eager_call(s: Side) -> None:
    """The step of the class, which is not compiled."""
    type(s.opt).step(s.opt)


def add_attribute(s: Side) -> None:
    s.opt.added = 5


def remove_attribute(s: Side) -> None:
    if hasattr(s.opt, "factor"):
        del s.opt.factor
        type(s.opt).factor = 0.375


def in_group(kind: Callable[[Any], Any]) -> Event:
    def do(s: Side) -> None:
        s.opt.param_groups[0] = kind(s.opt.param_groups[0])

    return do
