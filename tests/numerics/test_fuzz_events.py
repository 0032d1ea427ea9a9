"""What a user does between steps, in random order: a few seeds; more in `make fuzz`."""

from __future__ import annotations

import warnings

import pytest

from tests.numerics.fuzz_events import differences


@pytest.mark.family(30)
@pytest.mark.parametrize("seed", range(60))
def test_what_a_user_does_between_steps(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # limits of Dynamo, which runs in eager then
        assert differences(seed, sequences=1) == []
