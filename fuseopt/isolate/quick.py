"""Repeat the last step of an optimizer before anything else of a call runs."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from .. import compat
from ..compat.facts import ENTRY, Fact, attributes
from ..compiler.session import session
from ..inputs.change import SAME
from ..replicate.comparison import if_repeatable, need, there
from ..replicate.single_call import SingleCall, single_call

#: The stances of torch.compiler with which Dynamo runs compiled code.
TRACES = ("default", "eager_on_recompile", "fail_on_recompile")


class QuickSteps:
    """The single call that repeats an optimizer's last one, while there is one.

    `step(optimizer)`: does one step, or returns False; None without a single call.
    `by_option`: true if the layer around the step sets the grad mode to the option
    `differentiable`. None if there are other layers than torch's.
    """

    def __init__(self) -> None:
        self.step: SingleCall | None = None
        self.by_option: bool | None = None

    def repeat(self, compiler: Any) -> bool:
        """Do one step like the last one; return False if nothing was done.

        `compiler`: the OptimizerCompiler.
        """
        leader, optimizer = compiler.leader, compiler.owner()
        if optimizer is None or not _may_repeat(compiler):
            return False
        with compiler.lock:
            same = compiler.structure.compare(optimizer, leader.recent.helper) is SAME
            if same and leader.steady.repeat(optimizer):
                self.learn(compiler, optimizer)
                return True
        self.step = None
        return False

    def learn(self, compiler: Any, optimizer: Optimizer, shards: Any = None) -> None:
        """Make the single call that repeats the last one, if that was steady.

        `shards`: the Shards, if they did it, on parts of DTensors.
        """
        leader = (shards or compiler).leader
        steady, now = next(reversed(leader.steady.calls.values()), None), self.step
        if steady is None or steady.in_c is None or self.by_option is None:
            return
        if now is not None and now.steady is not steady:
            return  # of other parameters, which take turns with these
        more, given = ([], None) if shards is None else shards.facts() or (None, None)
        if more is None or given is not steady.in_c.given or not steady.attempts.due():
            return
        single = self._single(compiler, optimizer, steady, more)
        alone = single is not None and (shards is None or single.launches)
        self.step = single if alone else None

    @if_repeatable
    def _single(
        self, compiler: Any, optimizer: Optimizer, steady: Any, more: list[Fact]
    ) -> SingleCall | None:
        """Return the single call of a steady one, with more facts around it."""
        around, wanted = [*_around(compiler, optimizer), *more], None
        if self.by_option:
            wanted = optimizer.defaults["differentiable"]
            around += attributes(optimizer, "defaults")
            around.append(Fact(ENTRY, optimizer.defaults, "differentiable", wanted))
        return single_call(steady, optimizer, compiler.lock, wanted, around)


def _may_repeat(compiler: Any) -> bool:
    """May a led step repeat the last one, whatever is around it?"""
    waits = compiler.race or session.deferred or compiler.packed_step is not None
    judged = compiler.judged.epoch == compat.switches.epoch
    return judged and not waits and compat.stance() in TRACES


def _around(compiler: Any, optimizer: Optimizer) -> list[Fact]:
    """Return the facts that the layers around a led step compare."""
    facts = [
        *there(compat.undisturbed_facts(optimizer)),
        *compat.stance_facts(),
        *attributes(compiler, "race", "leader", "shards", "packed_step", "judged"),
        *attributes(compiler.judged, "epoch"),
        *attributes(session, "deferred"),
        *there(compiler.structure.facts()),
    ]
    # a signal handler may have changed anything before the facts
    need(_may_repeat(compiler), compat.undisturbed(optimizer))
    need(compiler.structure.compare(optimizer) is SAME)
    return facts
