"""Outside of a trace of fuseopt's, nothing of torch is changed.

In a process of its own all attributes of torch's modules, of their classes and of
their tables are looked at before fuseopt is imported and after steps of all kinds, in
between by another thread, and within a compilation for another backend.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests import ROOT

LOOK = '''
import os, sys, threading, types
os.environ["FUSEOPT_EAGER_IF_FASTER"] = "0"
import torch, torch._dynamo, torch._inductor

HOMES = ("torch._dynamo", "torch.optim", "torch._inductor")

def warm_up():
    """What torch changes of itself when it first compiles is no change of fuseopt's."""
    for make in (torch.optim.AdamW, torch.optim.SGD):
        p = torch.nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        for foreach in (True, False):
            optimizer = make([p], lr=0.1, foreach=foreach)
            torch.compile(optimizer.step, backend="eager")()
    torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
    torch._dynamo.reset()

def look():
    """Every attribute of every module and class, and every item of a table."""
    seen = {}
    for name, module in [*sys.modules.items()]:
        if module is None or not name.startswith(HOMES):
            continue
        for key, value in [*vars(module).items()]:
            seen[name, key] = value
            if isinstance(value, type) and value.__module__.startswith(HOMES):
                for attribute, x in [*vars(value).items()]:
                    seen[name, key, attribute] = x
                    if isinstance(x, (dict, list)):
                        note(seen, (name, key, attribute), x)
            elif isinstance(value, (dict, list)):
                note(seen, (name, key), value)
    kind = torch._dynamo.variables.torch.TorchInGraphFunctionVariable
    note(seen, ("handlers",), kind._get_handlers())
    seen["SymFloat.__pow__"] = vars(torch.SymFloat).get("__pow__")
    seen["compile"] = torch.compile
    seen["is_compiling"] = torch.compiler.is_compiling
    seen["device_hint"] = torch._meta_registrations.device_hint
    return seen

def note(seen, place, table):
    items = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in [*items]:
        if callable(value) or hasattr(value, "handler") or hasattr(value, "getter"):
            try:
                seen[(*place, "item", key)] = value
            except TypeError:
                pass

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, property,
    classmethod, staticmethod, types.MethodType)

def left_by_dynamo(place):
    """Does Dynamo itself keep something there of whatever it compiles?"""
    names = [x for x in place if isinstance(x, str)] if isinstance(place, tuple) else []
    # from torch 2.15 on torch keeps the backend that it has loaded
    known = {"cached_backends", "_COMPILER_FNS"} & {*names}
    return bool(known) or any(
        x.startswith("__") and not x.endswith("__") for x in names
    )

def changed(before, after):
    """The places whose function, class or table entry is another one."""
    found = []
    for place, value in before.items():
        now = after.get(place, "gone")
        if now is value or left_by_dynamo(place):
            continue
        if isinstance(value, FUNCTIONS) or callable(value) or hasattr(value, "handler"):
            if not isinstance(value, (int, float, str)):
                found.append(place)
    new = [x for x in after.keys() - before.keys() if not left_by_dynamo(x)]
    return found + [x for x in new if is_of_fuseopt(after[x])]

def is_of_fuseopt(x):
    home, code = getattr(x, "__module__", ""), getattr(x, "__code__", None)
    return "fuseopt" in f"{home} {getattr(code, 'co_filename', '')}"

import torch._dynamo.variables.torch, torch._meta_registrations
warm_up()
before = look()
'''

TELL = """
after = look()
differing = changed(before, after)
print(len(before), "places")
assert len(before) > 10_000
assert not differing, differing
"""


def looked(body: str) -> str:
    """Run a program between two looks at torch; what it prints."""
    text = LOOK + textwrap.dedent(body) + TELL
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def test_importing_changes_nothing() -> None:
    looked("import fuseopt, fuseopt.backend; fuseopt.backend.fuseopt")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "foreach AdamW",
        "function AdamW",
        "Counts, many",
        "Branches",
        "Looks",
        "tail AdamW",
        pytest.param("DTensors", marks=pytest.mark.slow),
    ],
)
def test_compiling_and_stepping_change_nothing(kind: str) -> None:
    looked(f"from tests.compat import kinds; kinds.run({kind!r})")


@pytest.mark.slow
def test_an_error_in_a_trace_leaves_nothing() -> None:
    looked(
        """
        import fuseopt
        class Raises(torch.optim.Optimizer):
            def __init__(self, params):
                super().__init__(params, {})
            @torch.no_grad()
            def step(self):
                for p in self.param_groups[0]["params"]:
                    p.add_(torch.ones(99))
        p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)
        for way in (fuseopt.compile, lambda o: o):
            opt = way(Raises([p]))
            def train(): opt.step()
            for step in (opt.step, torch.compile(train, backend="fuseopt")):
                try:
                    step()
                except Exception as error:
                    kept = error
                else:
                    raise AssertionError
        """
    )


@pytest.mark.slow
def test_an_interrupt_in_a_trace_leaves_nothing() -> None:
    """Also one within Dynamo's own bookkeeping, which never says that it has ended."""
    looked(
        """
        import fuseopt
        from torch._dynamo.callback import callback_handler
        from fuseopt.compat import patches
        seen = []
        def cut(_):
            seen.append(patches.in_force)
            callback_handler.remove_end_callback(cut)
            raise KeyboardInterrupt
        p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)
        opt = torch.optim.AdamW([p])
        def train(): opt.step()
        step = torch.compile(train, backend="fuseopt")
        torch._dynamo.reset()
        callback_handler.register_end_callback(cut)
        try:
            step()
        except KeyboardInterrupt:
            pass
        assert seen == [True], seen
        assert not patches.in_force
        """
    )


def test_hooks_are_in_force_within_a_trace_alone() -> None:
    """So that the other tests can fail: within a trace torch is changed."""
    looked(
        """
        import fuseopt
        from fuseopt.compat import patches
        p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)
        opt = torch.optim.AdamW([p])
        def train(): opt.step()
        seen = []
        class Window:
            pass
        from fuseopt.compiler import dispatch
        compiled = dispatch._compiled
        def looking(*args):
            seen.append(len(changed(before, look())))
            return compiled(*args)
        dispatch._compiled = looking
        torch.compile(train, backend="fuseopt")()
        assert seen and min(seen) > 100, seen
        """
    )


@pytest.mark.slow
def test_another_threads_trace_waits_and_sees_torch() -> None:
    """While fuseopt traces, another thread that compiles for another backend waits."""
    looked(
        """
        import fuseopt
        from fuseopt.compat import patches
        from fuseopt.compiler import dispatch
        p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)
        opt = torch.optim.AdamW([p])
        def train(): opt.step()
        inside, seen = threading.Event(), []
        compiled = dispatch._compiled
        def slow(*args):
            inside.set()
            other.join(1.0)
            seen.append(other.is_alive())
            return compiled(*args)
        dispatch._compiled = slow
        def graph(gm, inputs):
            seen.append(patches.in_force)
            return gm.forward
        def compile_another():
            inside.wait()
            torch.compile(lambda x: x.cos() + 2, backend=graph)(torch.ones(3))
        other = threading.Thread(target=compile_another)
        other.start()
        torch.compile(train, backend="fuseopt")()
        other.join()
        assert seen == [True, False], seen
        """
    )


@pytest.mark.slow
def test_the_method_that_is_exchanged_is_put_back() -> None:
    """torch.compile of a bound step exchanges one method for the time of that call."""
    looked(
        """
        import fuseopt.backend
        p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)
        for _ in range(3):
            step = torch.compile(torch.optim.AdamW([p]).step, backend="fuseopt")
            assert type(step).__name__ == "HeldStep"
            assert not changed(before, look())
        try:
            torch.compile(step, backend="fuseopt", mode="default", options={"a": 1})
        except Exception:
            pass
        assert not changed(before, look())
        torch.compile(torch.sin, backend=fuseopt.backend.fuseopt)
        """
    )
