"""What an op is, by its schema and the tables of names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from fuseopt import compat
from fuseopt.capture.aten.ops import lowering, op_info

aten = torch.ops.aten


def test_an_op_is_described_by_its_schema() -> None:
    add = op_info(aten.add_.Tensor)
    assert (add.name, add.inplace, add.foreach) == ("add", True, False)
    assert add.arguments == ("self", "other", "alpha")
    assert add.schema.writes == ((0, "self"),)
    assert (add.schema.returns, add.schema.views) == (1, False)
    assert add.meta_free
    assert add.pointwise
    assert not add.shaped
    mul = op_info(aten._foreach_mul_.ScalarList)
    assert (mul.name, mul.inplace, mul.foreach) == ("mul", True, True)
    assert mul.schema.writes == ((0, "self"),)
    assert mul.schema.returns == 0


@pytest.mark.parametrize(
    ("op", "views", "reshapes", "seeded"),
    [
        (aten.view.default, True, False, False),
        (aten.transpose_.default, False, True, False),
        (aten.rand_like.default, False, False, True),
        (aten.mm.default, False, False, False),
    ],
    ids=str,
)
def test_views_and_random_numbers(
    op: Any, views: bool, reshapes: bool, seeded: bool
) -> None:
    schema = op_info(op).schema
    assert (schema.views, schema.reshapes, schema.seeded) == (views, reshapes, seeded)


def test_arguments_by_keyword_and_outputs_are_written() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    cases = [
        (graph.call_function(aten.add.out, (x, x), {"out": y}), [y]),
        (graph.call_function(aten.add_.Tensor, (x, y)), [x]),
        (graph.call_function(aten.add_.Tensor, (), {"self": y, "other": x}), [y]),
        (graph.call_function(aten._foreach_add_.List, ([x, y], [y, x])), [x, y]),
        (graph.call_method("mul_", (y, x)), [y]),
        (graph.call_method("__add__", (y, x)), []),
        (graph.call_function(torch.add, (x, y), {"out": x}), [x]),
        (graph.call_function(torch._C._set_grad_enabled, (False,)), []),
        (x, []),
    ]
    for node, written in cases:
        assert list(dict.fromkeys(compat.written(node))) == written, node.format_node()


def test_a_call_is_lowered_to_a_rule_and_its_operands() -> None:
    x = torch.empty(3, device="meta")

    def absent(name: str, default: Any) -> str:
        return f"no {name}"

    def rule(op: Any, **bound: Any) -> Any:
        return lowering(op_info(op), bound, absent)

    assert rule(aten.zeros_like.default, self=x) == ("fill", (("value", 0.0),))
    assert rule(aten.clone.default, self=x) == ("copy", (("self", x),))
    assert rule(aten.add.Tensor, self=x, other=2) == (
        "add",
        (("self", x), ("other", 2), ("alpha", "no alpha")),
    )
    div = {"self": x, "other": x}
    assert rule(aten.div.Tensor_mode, **div, rounding_mode="floor")[0] == "div_floor"
    assert rule(aten.div.Tensor_mode, **div, rounding_mode=None)[0] == "div"
    assert rule(aten.round.decimals, self=x, decimals=2) is None
    assert rule(aten.mm.default, self=x, mat2=x) is None


def test_a_function_without_a_schema_is_judged_by_its_name() -> None:
    assert compat.schema_of(torch.add) is None
    assert compat.changes_first("add_")
    assert compat.changes_first("setitem")
    assert not compat.changes_first("__add__")
    assert not compat.changes_first("add")
