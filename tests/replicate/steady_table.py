"""Events between two calls of a step, by name: what a test of them goes through."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import torch

from tests.replicate.steady_events import (
    Event,
    add_attribute,
    add_group,
    all_state_removed,
    attribute,
    base_number,
    class_function,
    class_number,
    data_overlaps,
    deep,
    deep_copied,
    defaults_of_method,
    each_grad,
    eager_call,
    eager_write,
    emptied_group,
    first_group_removed,
    foreign_state,
    frozen_parameter,
    frozen_with_gradient,
    function_on_object,
    gradient_is_own,
    gradient_is_parameter,
    gradient_is_state,
    grads_of,
    group_removed,
    group_replaced,
    groups_replaced,
    helper,
    helper_code,
    hook_adds_group,
    hook_changes_rate,
    in_group,
    in_place_rate,
    list_attribute,
    longer_list,
    method_of_object,
    move_first,
    move_parameter,
    nested_attribute,
    numbers,
    option,
    other_bases,
    other_class,
    other_state,
    other_state_dtype,
    overlapping_gradients,
    params_of_type,
    post_hook,
    pre_hook,
    reload,
    reload_other,
    remove_attribute,
    replace_parameter,
    replaced_base_method,
    replaced_code,
    replaced_method,
    replaced_property,
    replaced_property_code,
    set_global,
    shadowed_builtin,
    shadowed_len,
    shared_gradient,
    state_event,
    state_replaced,
    stepped_by_another,
    swap_data,
    swap_groups,
    swap_lists,
    swap_params,
    table,
    table_tensor,
    tied_data,
    to_double,
    with_state_removed,
)
from tests.replicate.steady_twins import Side


class OwnDict(dict[Any, Any]):
    """A dict that halves the rate."""

    def __getitem__(self, key: Any) -> Any:
        x = super().__getitem__(key)
        return x * 0.5 if key == "lr" else x


class OwnList(list[Any]):
    """A list that leaves out its first parameter."""

    def __iter__(self) -> Any:
        return iter([self[k] for k in range(1, len(self))])


def same_id(s: Side) -> None:
    """An equal number that is another object."""
    for group in s.opt.param_groups:
        group["lr"] = float(repr(group["lr"])) if type(group["lr"]) is float else 0.5


def integer_rate(s: Side) -> None:
    for group in s.opt.param_groups:
        group["lr"] = 1


def transposed(p: Any) -> Any:
    g = p.grad
    return g.t().contiguous().t() if g.dim() == 2 else g


def expanded(p: Any) -> Any:
    return torch.ones(1).expand(p.shape)


def strided(p: Any) -> Any:
    return torch.arange(2.0 * p.numel())[::2].view(p.shape)


class OwnTensor(torch.Tensor):
    """A tensor of the user's class."""


EVENTS: dict[str, Event] = {
    "nothing": lambda s: None,
    "rate": option("lr", lambda x: x * 0.5),
    "rate of the second": option("lr", lambda x: x * 0.5, 1),
    "rate to a tensor": option("lr", lambda x: torch.tensor(float(x) * 0.5)),
    "rate to None": option("lr", lambda x: None),
    "rate to numpy": option("lr", lambda x: np.float64(float(x) * 0.5)),
    "rate to float32": option("lr", lambda x: np.float32(float(x) * 0.5)),
    "rate to a string": option("lr", lambda x: "x"),
    "rate to nan": option("lr", lambda x: float("nan")),
    "rate to -0.0": option("lr", lambda x: -0.0),
    "rate equal": same_id,
    "rate to an integer": integer_rate,
    "rate to True": option("lr", lambda x: True),
    "rate in place": in_place_rate,
    "decay": option("weight_decay", lambda x: 0.25),
    "decay 0": option("weight_decay", lambda x: 0),
    "eps": option("eps", lambda x: 0.5),
    "betas": option("betas", lambda x: (0.5, 0.75)),
    "betas to a list": option("betas", lambda x: [0.5, 0.75]),
    "momentum": option("momentum", lambda x: 0.5),
    "momentum 0": option("momentum", lambda x: 0),
    "nesterov": option("nesterov", lambda x: True),
    "maximize": option("maximize", lambda x: True),
    "amsgrad": option("amsgrad", lambda x: True),
    "foreach": option("foreach", lambda x: False),
    "foreach on": option("foreach", lambda x: True),
    "differentiable": option("differentiable", lambda x: True),
    "own rate": option("rate", lambda x: 0.25),
    "own rate to numpy": option("rate", lambda x: np.float64(0.25)),
    "own switch": option("on", lambda x: False),
    "own switch to 0": option("on", lambda x: 0),
    "new option": option("new", lambda x: 0.25),
    "group added": add_group,
    "group removed": group_removed,
    "first group removed": first_group_removed,
    "group emptied": emptied_group,
    "group replaced": group_replaced,
    "groups replaced": groups_replaced,
    "groups swapped": swap_groups,
    "lists swapped": swap_lists,
    "parameters swapped": swap_params,
    "parameter moved": move_parameter,
    "first parameter moved": move_first,
    "first parameter replaced": replace_parameter,
    "parameter replaced": lambda s: replace_parameter(s, 4),
    "group of an own dict": in_group(OwnDict),
    "ordered group": in_group(collections.OrderedDict),
    "parameters in a tuple": params_of_type(tuple),
    "parameters in a dict": params_of_type(dict.fromkeys),
    "parameters in keys": params_of_type(lambda x: dict.fromkeys(x).keys()),
    "parameters in an iterator": params_of_type(iter),
    "parameters in a deque": params_of_type(collections.deque),
    "parameters in an own list": params_of_type(OwnList),
    "parameters in a ParameterList": params_of_type(torch.nn.ParameterList),
    "no list of parameters": lambda s: s.opt.param_groups[0].pop("params"),
    "list of parameters None": option("params", lambda x: None),
    "list of parameters a tensor": option("params", lambda x: torch.ones(3)),
    "data replaced": lambda s: setattr(s.ps[0], "data", s.ps[0].data.clone()),
    "data swapped": swap_data,
    "data tied": tied_data,
    "data overlapping": data_overlaps,
    "data of another layout": lambda s: setattr(
        s.ps[0], "data", s.ps[0].data.t().contiguous().t()
    ),
    "data to double": to_double,
    "data to another size": lambda s: (
        setattr(s.ps[1], "grad", None),
        setattr(s.ps[1], "data", torch.ones(7)),
    ),
    "frozen": frozen_parameter,
    "frozen with a gradient": frozen_with_gradient,
    "gradient None": grads_of(4, lambda p: None),
    "first gradient None": grads_of(0, lambda p: None),
    "gradients None": each_grad(lambda s, n, p: None),
    "gradients of half": each_grad(lambda s, n, p: p.grad if n % 2 else None),
    "gradient transposed": grads_of(0, transposed),
    "gradient strided": grads_of(1, strided),
    "gradient expanded": grads_of(0, expanded),
    "gradient of an own class": grads_of(0, lambda p: p.grad.as_subclass(OwnTensor)),
    "gradient with a graph": grads_of(
        0, lambda p: torch.ones_like(p).requires_grad_() * 2
    ),
    "gradient of NaN": grads_of(0, lambda p: torch.full_like(p, float("nan"))),
    "gradient shared": shared_gradient,
    "gradients overlapping": overlapping_gradients,
    "gradient a parameter": gradient_is_parameter,
    "gradient its parameter": gradient_is_own,
    "gradient a state": gradient_is_state,
    "gradients moved": each_grad(lambda s, n, p: p.grad.clone()),
    "state of others": state_event(other_state),
    "first state of others": state_event(other_state, 0),
    "state of another layout": state_event(other_state_dtype, 0),
    "state entry added": state_event(lambda x: x.update(added=1)),
    "state entry removed": state_event(lambda x: x.pop(next(iter(x)))),
    "state entry to a number": state_event(lambda x: x.update({next(iter(x)): 3})),
    "state cleared": state_event(lambda x: x.clear()),
    "state removed": with_state_removed,
    "all state removed": all_state_removed,
    "state replaced": state_replaced,
    "foreign state": foreign_state,
    "state order": state_event(lambda x: x.update({k: x.pop(k) for k in [*x][:1]})),
    "state loaded": reload,
    "state loaded with rates": reload_other,
    "attribute added": add_attribute,
    "attribute removed": remove_attribute,
    "own factor": attribute("factor", lambda x: 0.375),
    "own factor to a tensor": attribute("factor", lambda x: torch.tensor(0.375)),
    "own factor to numpy": attribute("factor", lambda x: np.float64(0.375)),
    "own factor to an integer": attribute("factor", lambda x: 2),
    "own count": attribute("count", lambda x: 5),
    "own count to 1": attribute("count", lambda x: 1),
    "own list": list_attribute,
    "own list longer": longer_list,
    "own list replaced": attribute("numbers", lambda x: (1.0, 2.5)),
    "nested": nested_attribute,
    "class added": class_function,
    "class slope": class_number("slope", 3.0),
    "class slope to an integer": class_number("slope", 3),
    "class slope to a tensor": class_number("slope", torch.tensor(3.0)),
    "class slope to numpy": class_number("slope", np.float64(3.0)),
    "class floor": class_number("floor", 0.75),
    "base floor": base_number,
    "method": replaced_method,
    "method of the base": replaced_base_method,
    "code of the base": replaced_code,
    "property": replaced_property,
    "code of a property": replaced_property_code,
    "defaults of a method": defaults_of_method,
    "method of the object": method_of_object,
    "function on the object": function_on_object,
    "helper": helper,
    "code of a helper": helper_code,
    "global": set_global("GAIN", 2.5),
    "global to an integer": set_global("GAIN", 2),
    "global to a tensor": set_global("GAIN", torch.tensor(2.5)),
    "global dict": table,
    "global dict to a tensor": table_tensor,
    "global list": deep,
    "builtin shadowed": shadowed_builtin,
    "len shadowed": shadowed_len,
    "other class": other_class,
    "other bases": other_bases,
    "deepcopy": deep_copied,
    "pre hook": pre_hook,
    "post hook": post_hook,
    "hook that adds a group": hook_adds_group,
    "hook that changes rates": hook_changes_rate,
    "eager write": eager_write,
    "another optimizer": stepped_by_another,
    "a call in eager": eager_call,
    "dynamo reset": lambda s: torch._dynamo.reset(),
    "schedule": lambda s: setattr(
        s, "kept", [g.update(lr=numbers(g["lr"])) for g in s.opt.param_groups]
    ),
}
