"""What older versions of torch cannot do: a test that needs it says which, and why."""

from __future__ import annotations

import pytest
import torch

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
#: Where torch 2.11 was found to fall short with any backend, and 2.13 not.
OLD = VERSION < (2, 12)

limit_counts_the_dead = pytest.mark.skipif(
    OLD, reason="torch 2.11 counts what it compiled for optimizers that are gone"
)
no_shape_of_powers = pytest.mark.skipif(
    OLD, reason="torch 2.11 has no fake pow of a number that a step computed"
)
untraceable_adafactor = pytest.mark.skipif(
    OLD, reason="torch 2.11 raises an AssertionError where it traces foreach Adafactor"
)
sets_no_attribute = pytest.mark.skipif(
    OLD, reason="torch 2.11 raises an AssertionError where a step sets an attribute"
)
loops_over_no_attributes = pytest.mark.skipif(
    OLD, reason="torch 2.11 does not trace a loop over the names of attributes"
)
one_counter_for_all = pytest.mark.skipif(
    VERSION < (2, 13),
    reason="torch 2.12 takes one counter for all where they are multiplied by 0",
)
golden_graphs = pytest.mark.skipif(
    OLD, reason="torch 2.11 lists the tensors of a step in another order"
)
knows_lerp = pytest.mark.skipif(
    VERSION < (2, 13),
    reason="before torch 2.13 Dynamo takes calls that scale apart with other rounding",
)
