"""Run an optimizer's step, traced whole, on the optimizer's shadow.

The shadow has all lanes. A step is traced on it under two conditions. It is one graph,
so that no user code runs in between. It uses `self` for attributes alone, which
`keeps_to_itself` checks in its code. Dynamo traces any other step on the optimizer
itself, as torch.compile does.
"""

from __future__ import annotations

import dis
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .. import compat
from ..compiler.code_paths import every_code, is_known
from ..compiler.inner_tensors import InnerTensorGraph
from ..compiler.internal_errors import OUT_OF_MEMORY
from ..compiler.session import session
from ..errors import FuseoptError
from ..handlers import reraise
from ..inputs.keys import LanesDiffer
from ..inputs.last_call import LastCall
from ..runtime.commit import Pending
from ..runtime.step import CompiledStep
from .hindrance import LASTING, hindrance_of
from .optimizer import Shadow

#: Steps that may postpone their launches until the whole step ends.
STEPS = (CompiledStep, InnerTensorGraph)
#: Instructions on an attribute of the object on top of the stack.
TAKES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
#: Functions that use only the attributes and the class of an object.
ASKS = frozenset({"getattr", "hasattr", "setattr", "isinstance", "type", "super"})
LOADS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF"})


class NotTraced(FuseoptError):
    """Dynamo would run a step without compiling it; nothing was done."""


def keeps_to_itself(function: Any, kind: type) -> bool:
    """Do a step's function and the methods that it names use `self` for attributes
    alone?

    Then they can run on another object with the same attributes.
    """
    done: set[types.CodeType] = set()
    names: set[str] = set()
    pending: list[Any] = [function]
    while pending:
        f = pending.pop()
        if isinstance(f, property):
            pending += [x for x in (f.fget, f.fset, f.fdel) if x is not None]
            continue
        f = f.__func__ if isinstance(f, (staticmethod, classmethod)) else f
        if not isinstance(f, types.FunctionType):
            continue
        pending.append(getattr(f, "__wrapped__", None))
        code = f.__code__
        if code in done or is_known(code):
            continue
        done.add(code)
        self_name = code.co_varnames[:1] if code.co_argcount else ()
        if not all(_attributes_alone(c, *self_name) for c in every_code(code)):
            return False
        more = {name for c in every_code(code) for name in c.co_names} - names
        names |= more
        pending += [vars(c)[x] for c in kind.__mro__ for x in more if x in vars(c)]
    return True


def _attributes_alone(code: types.CodeType, self_name: str = "") -> bool:
    steps = [x for x in dis.get_instructions(code) if x.opname not in ("CACHE", "NOP")]
    before = ["", ""]
    for now, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
        loads = now.opname in LOADS or now.opname.startswith("LOAD_FAST")
        names = _names(now.argval)
        if loads and self_name and self_name in names:
            is_exempt = before[-1] in ASKS or before[-2] == "super"
            # the attribute belongs to the second of two variables
            is_taken = after.opname in TAKES and self_name not in names[:-1]
            if not is_taken and not is_exempt:
                return False
        before.append(now.argval if now.opname == "LOAD_GLOBAL" else "")
    return True


def _names(x: Any) -> tuple[Any, ...]:
    """Return the variables that an instruction loads: one; two from Python 3.13 on."""
    return x if isinstance(x, tuple) else (x,)


class WholeStep:
    """One optimizer's step, traced whole. `refusal`: what rules out a shadow, or ""."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.refusal = ""
        #: True if the step hit Dynamo's recompile limit
        self.limited = False
        #: the reason why Dynamo must not trace the step at all, or ""
        self.refused = ""
        self._hindrance = LASTING
        self.shadow: Shadow | None = None
        #: names that had a numpy.float64 when the step was compiled
        self.numpy_names: frozenset[str] = frozenset()
        self.compiled: Callable[..., Any] | None = None
        self.pending = Pending()
        self.steps: list[CompiledStep | InnerTensorGraph] = []
        #: True if the last call compiled nothing
        self.compiled_nothing = False
        self.last_call = LastCall()
        # the call before the last one compiled nothing
        self._steady = False

    def keeps_out(self, optimizer: Optimizer) -> bool:
        """Does the reason `refusal` still hold? If not, clear it."""
        if self._hindrance.stands(optimizer):
            return True
        self.refusal, self._hindrance = "", LASTING
        return False

    def release(self) -> None:
        """Release all of the optimizer."""
        self.shadow = self.compiled = None
        self.steps.clear()

    def compile(
        self, backend: Callable[..., Any], make: Callable[..., Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Compile the step's function by `make(backend)`; postpone its launches."""
        owner = weakref.ref(self)

        def waiting(gm: Any, example_inputs: Any, **keywords: Any) -> Any:
            n_reports = len(session.reports)
            step = backend(gm, example_inputs, **keywords)
            self = owner()
            if self is not None:
                self.compiled_nothing = False
                if not (isinstance(step, STEPS) and step.put_off_to(self.pending)):
                    # fuseopt may refuse the step after this graph has written; a later
                    # trace reports it
                    del session.reports[n_reports:]
                    raise LanesDiffer("its graph writes before the end of the step")
                self.steps.append(step)
            return step

        waiting._torchdynamo_orig_backend = backend  # type: ignore[attr-defined]
        return make(waiting)

    def step(
        self,
        optimizer: Optimizer,
        backend: Callable[[], Callable[..., Any]],
        make: Callable[..., Callable[..., Any]],
    ) -> tuple[bool, Any]:
        """Do one step: return (True, its result), or (False, None) if nothing was done.

        `make(backend())` compiles the step's function anew. The result raises NotTraced
        if Dynamo would run the function uncompiled.
        """
        if not self.last_call.begin():
            self._cut_off()
        pending, steady = self.pending, self.compiled_nothing
        self._steady = steady
        try:
            if self.shadow is None:
                if not keeps_to_itself(self.function, type(optimizer)):
                    raise LanesDiffer(
                        "it uses the optimizer other than by its attributes"
                    )
                self.shadow = Shadow(optimizer, follows=True)
            shadow = self.shadow
            shadow.refresh(optimizer)
            if shadow.numpy_names != self.numpy_names:
                self.numpy_names, self.compiled = shadow.numpy_names, None
            if self.compiled is None:
                self.steps.clear()
                self.compiled = self.compile(backend(), make)
            shadow.clean = False
            self.compiled_nothing = True
            call = pending.start()
            result = self.compiled(shadow.stand_in)
            if result is not None:
                result = shadow.translated(result)
            if shadow.changed():
                pending.finish(call, shadow.writes())
                shadow.settle()
            else:
                pending.finish(call)
                shadow.clean = True
            self.last_call.ended = True
            return True, result
        except NotTraced:
            self.last_call.ended = True
            return False, None
        except Exception as error:
            reraise(error)
            expected = isinstance(error, (LanesDiffer, *compat.dynamo_errors()))
            if pending.begun or (steady and not expected) or compat.must_fail():
                raise
            if isinstance(error, OUT_OF_MEMORY):
                raise  # nothing is wrong with the step
            # if the step itself raises this, it raises it again
            self.refusal = compat.reason_of(error)
            self._hindrance = hindrance_of(error, optimizer)
            if self._hindrance is not LASTING:
                # the compiled code fits again once the user removes that value
                self.last_call.ended = True
                if self.shadow is not None:
                    self.shadow.forget()
                return False, None
            self.limited = compat.is_limit(error)
            if self.shadow is not None:
                self.refused = compat.refusal_of(self.shadow.stand_in)
            self.release()
            return False, None
        finally:
            pending.drop()

    def _cut_off(self) -> None:
        """Compare nothing with the last call, which an exception ended."""
        if not (self._steady and self.compiled_nothing):
            self.compiled = None
            self.compiled_nothing = False
        for step in self.steps:
            step.forget()
