"""torch's inverses of transforms: TorchRL replaces them, and Pyro's guide needs them.

TorchRL puts properties of the same name into torch's classes when it is imported. With
those a guide of Pyro fails, in eager too. `tests.wild` imports this module first, so
that it finds torch's properties.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch.distributions.transforms import ComposeTransform, Transform

TORCHS = {kind: vars(kind)["inv"] for kind in (Transform, ComposeTransform)}


@contextmanager
def of_torch() -> Iterator[None]:
    """Put torch's properties in place, until the end."""
    with ExitStack() as stack:
        for kind, own in TORCHS.items():
            stack.enter_context(mock.patch.object(kind, "inv", own))
        yield
