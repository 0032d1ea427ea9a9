"""Whoever looked the backend up before: torch.compile(optimizer.step) is heard of."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

START = """
import pickle, sys, threading, torch, torch._dynamo

def optimizer():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(3)
    return torch.optim.SGD(params, lr=0.1)

def is_ours(step):
    return type(step).__module__.partition(".")[0] == "fuseopt"

name = "fuseopt"
"""

TELL = """
for turn in range(3):
    step = torch.compile(optimizer().step, backend=name)
    assert is_ours(step), (turn, type(step))
step()
model = torch.compile(torch.nn.Linear(2, 2), backend="fuseopt")
assert not is_ours(torch.compile(optimizer().step, backend="eager"))
assert is_ours(torch.compile(optimizer().step, backend=name))
"""

#: What a process may do before, by its name.
BEFORE = {
    "nothing": "",
    "import": "import fuseopt",
    "backend": "import fuseopt.backend; fuseopt.backend.attach()",
    "object": "from fuseopt.backend import fuseopt as name",
    "lookup": "torch._dynamo.lookup_backend(name)",
    "lookups": "for _ in range(3): torch._dynamo.lookup_backend(name)",
    "optimize": "torch._dynamo.optimize(name)(lambda x: x + 1)",
    "model": "torch.compile(torch.nn.Linear(2, 2), backend=name)",
    "error": """
try:
    torch.compile(optimizer().step, backend=name, mode="x", options={"y": 1})
except RuntimeError:
    pass
else:
    raise AssertionError("a mode and options")
""",
    "stance": """
with torch.compiler.set_stance("default", force_backend=name):
    torch.compile(lambda x: x + 1, backend="eager")
""",
    "listed": """
torch._dynamo.lookup_backend(name)
(name,) = [x for x in torch._dynamo.list_backends() if x == name]
assert type(pickle.loads(pickle.dumps(name))) is str
""",
    "listed after attach": """
import fuseopt.backend
torch._dynamo.list_backends()
fuseopt.backend.attach()
torch.compile(optimizer().step, backend="fuseopt")
(name,) = [x for x in torch._dynamo.list_backends() if x == name]
""",
    "reset": """
torch._dynamo.lookup_backend(name)
torch._dynamo.reset()
""",
    "another thread": """
one = threading.Thread(target=torch._dynamo.lookup_backend, args=(name,))
one.start(); one.join()
""",
    "probed meanwhile": """
from fuseopt.compat import bound_steps
take, missing = bound_steps.BoundSteps._call, []

def taking(*args):  # as another thread does, while the method is exchanged
    missing.append(bound_steps.BOUND_STEPS.probe_again())
    return take(*args)

bound_steps.BoundSteps._call = taking
assert is_ours(torch.compile(optimizer().step, backend=name))
assert missing == [""], missing
""",
    "many threads": """
torch._dynamo.list_backends()
sys.setswitchinterval(1e-5)
torch._dynamo.lookup_backend(name)  # torch itself loads a backend twice
failed = []

def many():
    for _ in range(50):
        try:
            assert is_ours(torch.compile(optimizer().step, backend=name))
        except BaseException as error:
            failed.append(error)

threads = [threading.Thread(target=many) for _ in range(8)]
[x.start() for x in threads]
[x.join() for x in threads]
assert not failed, failed
""",
}

QUICK = ("lookup", "many threads")


@pytest.mark.parametrize(
    "before",
    [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in BEFORE],
)
def test_a_bound_step_is_heard_of(before: str) -> None:
    code = START + BEFORE[before] + TELL
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:fuseopt", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_torch_keeps_the_names_of_its_backends() -> None:
    """The table answers as a table of strings does: by order, by what is absent."""
    code = (
        START
        + """
torch._dynamo.lookup_backend(name)
listed = torch._dynamo.list_backends()
assert listed.count(name) == 1 and listed == sorted(map(str, listed))
table = torch._dynamo.backends.registry._BACKENDS
assert name in table and f"{name}s" not in table and 1 not in table
assert {name: 1}[listed[listed.index(name)]] == 1
"""
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
