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
golden_graphs = pytest.mark.skipif(
    OLD, reason="torch 2.11 lists the tensors of a step in another order"
)
