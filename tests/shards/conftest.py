"""One process of a group of four that is not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.shards import WORLD, fake_group
from tests.shards.steady import Seen


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    with fake_group():
        yield


@pytest.fixture(scope="module")
def mesh(group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)
