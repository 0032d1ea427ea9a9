"""An optimizer's step, traced whole -> the same, on the optimizer's shadow.

The shadow has all lanes. It is given to a step that is traced in one graph, so that no
code of the user's runs in between, and that sees nothing of itself but its attributes:
`keeps_to_itself` asks the code that it may run. Of any other step Dynamo is given the
optimizer, as torch.compile does it.
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
from ..compiler.internal_errors import OUT_OF_MEMORY
from ..errors import FuseoptError
from ..runtime.commit import Pending
from ..runtime.step import CompiledStep
from .lanes import Unlike
from .optimizer import Shadow

#: Instructions that take an attribute of what was loaded before them.
TAKES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"})
#: Functions that do no more with an object.
ASKS = frozenset({"getattr", "hasattr", "setattr", "isinstance", "type", "super"})
LOADS = frozenset({"LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF"})


class NotTraced(FuseoptError):
    """Dynamo let a step run as it is, of which nothing was done."""


def keeps_to_itself(function: Any, kind: type) -> bool:
    """Do a step's function and the methods that it names use `self` for attributes
    alone? Another object with the same attributes then does for it.
    """
    done: set[types.CodeType] = set()
    names: set[str] = set()
    found: list[Any] = [function]
    while found:
        f = found.pop()
        if isinstance(f, property):
            found += [x for x in (f.fget, f.fset, f.fdel) if x is not None]
            continue
        f = f.__func__ if isinstance(f, (staticmethod, classmethod)) else f
        if not isinstance(f, types.FunctionType):
            continue
        found.append(getattr(f, "__wrapped__", None))
        code = f.__code__
        if code in done or is_known(code):
            continue
        done.add(code)
        own = code.co_varnames[:1] if code.co_argcount else ()
        if not all(_attributes_alone(c, *own) for c in every_code(code)):
            return False
        more = {name for c in every_code(code) for name in c.co_names} - names
        names |= more
        found += [vars(c)[x] for c in kind.__mro__ for x in more if x in vars(c)]
    return True


def _attributes_alone(code: types.CodeType, own: str = "") -> bool:
    steps = [x for x in dis.get_instructions(code) if x.opname not in ("CACHE", "NOP")]
    before = ["", ""]
    for now, after in zip(steps, [*steps[1:], steps[-1]], strict=True):
        loads = now.opname in LOADS or now.opname.startswith("LOAD_FAST")
        if loads and own and own in (now.argval, *_names(now.argval)):
            asked = before[-1] in ASKS or before[-2] == "super"
            if after.opname not in TAKES and not asked:
                return False
        before.append(now.argval if now.opname == "LOAD_GLOBAL" else "")
    return True


def _names(x: Any) -> tuple[Any, ...]:
    """What an instruction loads that loads two things."""
    return x if isinstance(x, tuple) else ()


class Whole:
    """The step of one optimizer, traced whole. `why`: why it is on no shadow."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.why = ""
        #: why Dynamo must not trace it at all
        self.refused = ""
        self.shadow: Shadow | None = None
        self.compiled: Callable[..., Any] | None = None
        self.pending = Pending()
        self.steps: list[CompiledStep] = []
        #: was all that the last call ran compiled before it?
        self.quiet = False
        # did the last call end as calls do? Had the one before it compiled nothing?
        self._sound = True
        self._steady = False

    def release(self) -> None:
        """Keep nothing of the optimizer."""
        self.shadow = self.compiled = None
        self.steps.clear()

    def compile(
        self, backend: Callable[..., Any], make: Callable[..., Callable[..., Any]]
    ) -> Callable[..., Any]:
        """`make(backend)` compiles the step's function; launches wait for its end."""
        owner = weakref.ref(self)

        def waiting(gm: Any, example_inputs: Any, **keywords: Any) -> Any:
            made = backend(gm, example_inputs, **keywords)
            self = owner()
            if self is not None:
                self.quiet = False
                if isinstance(made, CompiledStep) and made.put_off_to(self.pending):
                    self.steps.append(made)
            return made

        waiting._torchdynamo_orig_backend = backend  # type: ignore[attr-defined]
        return make(waiting)

    def step(
        self,
        optimizer: Optimizer,
        backend: Callable[[], Callable[..., Any]],
        make: Callable[..., Callable[..., Any]],
    ) -> tuple[bool, Any]:
        """Do one step: (True, what it returns), or (False, None) if nothing was done.

        `make(backend())` compiles the step's function anew, which raises NotTraced
        where it is run without Dynamo.
        """
        if not self._sound:
            self._cut_off()
        pending, steady = self.pending, self.quiet
        self._steady, self._sound = steady, False
        try:
            if self.shadow is None:
                if not keeps_to_itself(self.function, type(optimizer)):
                    raise Unlike("it uses the optimizer for more than its attributes")
                self.shadow = Shadow(optimizer)
            shadow = self.shadow
            shadow.refresh(optimizer)
            if self.compiled is None:
                self.steps.clear()
                self.compiled = self.compile(backend(), make)
            shadow.clean = False
            self.quiet = True
            call = pending.start()
            result = self.compiled(shadow.itself)
            if result is not None:
                result = shadow.translated(result)
            if shadow.changed():
                pending.finish(call, shadow.writes())
                shadow.settle()
            else:
                pending.finish(call)
                shadow.clean = True
            self._sound = True
            return True, result
        except NotTraced:
            self._sound = True
            return False, None
        except Exception as error:
            expected = isinstance(error, (Unlike, *compat.dynamo_errors()))
            if pending.begun or (steady and not expected) or _forbidden():
                raise
            if isinstance(error, OUT_OF_MEMORY):
                raise  # nothing is wrong with the step
            # whatever it is, the step says it again if it is the step's own
            self.why = str(error).strip().partition("\n")[0] or type(error).__name__
            if self.shadow is not None:
                self.refused = compat.refusal_of(self.shadow.itself)
            self.release()
            return False, None
        finally:
            pending.drop()

    def _cut_off(self) -> None:
        """An exception ended the last call somewhere: take nothing for known."""
        if not (self._steady and self.quiet):
            self.compiled = None
            self.quiet = False
        for step in self.steps:
            step.forget()


def _forbidden() -> bool:
    """Was Dynamo told to fail rather than to trace anew?"""
    return compat.stance() == "fail_on_recompile"
