"""Keep the numbers of a step live in a graph that the user captured it in.

A step that joins a capture (`user_capture`) has its addresses in the graph. If it was
refreshed before the capture, the graph reads its numbers where all calls read them: in
the device's words of the arena. `refresh` updates these. It does a step's work on the
CPU, and launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import LaunchError
from .binding import Binding
from .undo import at_once

Calls = Sequence[Callable[[], object]]
AGAIN = "Call fuseopt.refresh(optimizer, anew=True), and capture the step again"


def _tensors(bound: Binding) -> tuple[bytes, bytes | None]:
    """Return the addresses of a call's tensors, and the owners that take part in it."""
    return bound.addresses.tensors().tobytes(), bound.taking


class Live:
    """Captures that read the numbers of a step in the arena.

    `bound` is the binding that was refreshed, None if none was. `captured` has the
    tensors of each capture.
    """

    def __init__(self) -> None:
        self.bound: Binding | None = None
        self.captured: set[tuple[bytes, bytes | None]] = set()

    def forget(self) -> None:
        """Let the next refresh come before a capture."""
        self.bound = None
        self.captured.clear()

    def joins(self, bound: Binding) -> bool:
        """Should a capture of a call read its numbers in the arena? Raises LaunchError
        if the call is not the refreshed one.
        """
        if self.bound is None:
            return False
        if self.bound is not bound:
            raise LaunchError(
                "a CUDA graph capture is active, and the step was compiled anew since "
                f"it was refreshed. {AGAIN}"
            )
        self.captured.add(_tensors(bound))
        return True

    def check(self, bound: Binding) -> None:
        """Raise LaunchError if a call cannot be a refresh; then nothing was written."""
        plan = bound.plan
        if bound.device_launches is None or not plan.lean or plan.captured.result != ():
            raise LaunchError(
                "fuseopt.refresh keeps the numbers of a step live that consists of "
                "kernels on a device. This step is not one: it runs on the CPU, calls "
                "ATen, or returns tensors. Capture it without fuseopt.refresh"
            )
        if self.captured and self.bound is not bound:
            raise LaunchError(
                f"the optimizer's step was compiled anew since it was captured. {AGAIN}"
            )
        if self.captured and _tensors(bound) not in self.captured:
            raise LaunchError(
                "fuseopt.refresh found other parameters, gradients or state than the "
                "captured step has. A graph has the addresses of its capture. Keep the "
                f"gradients in place (zero_grad(set_to_none=False)). Or: {AGAIN}"
            )

    def refresh(self, bound: Binding, threads: int, then: Calls) -> None:
        """Do a step's work on the CPU, and send its numbers to devices. Before a
        capture, only send them, and let the next capture read them there.
        """
        device_launches = bound.device_launches
        assert device_launches is not None
        if self.captured:
            device_launches.run(threads, then, replays=())
            return
        self.bound = bound
        device_launches.send()
        at_once(then)
