"""Autocast in ATen's dispatcher, and its nodes in Dynamo's graphs."""

from __future__ import annotations

from typing import Any

import torch

from .names import find

#: The nodes of a graph between which a step switches autocast itself.
ENTER: Any = find("torch.amp.autocast_mode:_enter_autocast", None)
EXIT: Any = find("torch.amp.autocast_mode:_exit_autocast", None)
#: The kinds of devices to test, if torch cannot test all at once.
_KINDS = ("cpu", "cuda", "xpu", "mps")


def autocasts() -> bool:
    """Is autocast on in this thread, for devices of any kind?"""
    check = find("torch._C:_is_any_autocast_enabled", None)
    if check is not None:
        return bool(check())
    return any(map(torch.is_autocast_enabled, _KINDS))


def may_cast(name: str, kind: str) -> bool:
    """Does autocast wrap ATen's op `name` on devices of this kind?

    Also True if torch does not report it.
    """
    check = find("torch._C:_dispatch_has_kernel_for_dispatch_key", None)
    suffix = "PrivateUse1" if kind == "privateuseone" else kind.upper()
    try:
        return check is None or bool(check(f"aten::{name}", f"Autocast{suffix}"))
    except RuntimeError:  # no such op, or no such key
        return kind != "cpu"
