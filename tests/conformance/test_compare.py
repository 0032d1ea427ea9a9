"""The comparison of two optimizers sees each kind of difference, and how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from fuseopt.conformance.compare import Difference, differences, nudge

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Held(Optimizer):
    """Holds what a test puts there."""

    def __init__(self, values: Any, **options: Any) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(3))], {"lr": 0.1, **options})
        self.state[self.only].update(values)

    @property
    def only(self) -> Tensor:
        return self.param_groups[0]["params"][0]


def of_state(want: Any, got: Any) -> list[Difference]:
    return differences(Held({"x": want}), Held({"x": got}))


def next_to(t: Tensor) -> Tensor:
    moved = t.clone()
    nudge(moved)
    return moved


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_an_ulp_of_each_element_is_an_ulp(dtype: torch.dtype) -> None:
    t = torch.tensor([1.0, -1.0, 0.0, -0.0, 3e-8, 1.5]).to(dtype)
    (found,) = of_state(t, next_to(t))
    assert found.where == "x of parameter 0"
    assert found.elements == (2 if dtype.is_complex else 1) * t.numel()
    assert found.ulp == 1
    assert of_state(t, t.clone()) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_transposed_tensor_is_moved_too(dtype: torch.dtype) -> None:
    t = torch.randn(4, 3).to(dtype).t()
    (found,) = of_state(t, next_to(t))
    assert (found.elements, found.ulp) == (12, 1)


def test_signs_of_zero_differ_and_have_no_distance() -> None:
    (found,) = of_state(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.elements, found.ulp) == (1, 0)


def test_numbers_on_both_sides_of_zero() -> None:
    least = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    (found,) = of_state(torch.tensor([least]), torch.tensor([-least]))
    assert (found.elements, found.ulp) == (1, 2)


def test_the_widest_distance_is_a_number() -> None:
    most = torch.finfo(torch.float64).max
    wide = torch.tensor([most], dtype=torch.float64)
    (found,) = of_state(wide, -wide)
    assert found.ulp is not None
    assert found.ulp > 2**63


def test_nan_equals_nan_alone() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert of_state(nan, nan.clone()) == []
    (found,) = of_state(nan, torch.ones(2))
    assert (found.elements, found.ulp) == (1, None)
    assert "no distance" in str(found)
    assert of_state(float("nan"), float("nan")) == []


@pytest.mark.parametrize(
    ("want", "got"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), 1.0),
        (1, 1.0),
        (1, True),
        (0.1, 0.2),
        ("a", "b"),
        (None, 0),
        ([torch.ones(2)], [torch.zeros(2)]),
        ([1], [1, 2]),
        ({"y": {"z": 1}}, {"y": {"z": 2}}),
        ({"y": 1}, {"z": 1}),
    ],
)
def test_each_kind_of_state(want: Any, got: Any) -> None:
    (found,) = of_state(want, got)
    assert found.where.startswith("x")
    assert found.where.endswith(" of parameter 0")
    assert of_state(want, want) == of_state(got, got) == []


def test_a_key_of_the_state_is_missed() -> None:
    (found,) = differences(Held({"x": 1, "y": 1}), Held({"x": 1}))
    assert "keys ['x', 'y'] and ['x']" in str(found)


def test_options_of_groups_are_compared() -> None:
    (found,) = differences(Held({}, lr=0.1), Held({}, lr=0.2))
    assert str(found) == "lr of group 0: 0.1 and 0.2"
    (found,) = differences(Held({}, k=1), Held({}))
    assert str(found) == "k of group 0: is missing"
    # as Dynamo does it
    assert differences(Held({}), Held({}, k=1)) == []


@pytest.mark.parametrize(
    "change", [lambda p: nudge(p.detach()), lambda p: p.detach().neg_()]
)
def test_parameters_are_compared(change: Callable[[Tensor], Any]) -> None:
    want, got = Held({}), Held({})
    change(got.only)
    (found,) = differences(want, got)
    assert found.where == "parameter 0"
    assert found.elements == 3


def test_sparse_tensors_by_what_they_hold() -> None:
    one = torch.eye(2).to_sparse()
    assert of_state(one, one.clone()) == []
    (found,) = of_state(one, (2 * torch.eye(2)).to_sparse())
    assert found.elements == 2
