"""Tensors that have no memory of their own, or none any more: never a crash.

Each case runs in a process of its own, which must end by itself, with eager's bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest
import torch

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.errors import UnsupportedInput
from tests import ROOT

#: `wrapped(t)`: a tensor of a kind; `plain(t)`: the tensors it stands for.
KINDS = {
    "two": """
from torch.testing._internal.two_tensor import TwoTensor
def wrapped(t): return TwoTensor(t.clone(), t.clone() + 1)
def plain(t): return [t.a, t.b] if isinstance(t, TwoTensor) else [t]
""",
    "DTensor of one": """
import tempfile, torch.distributed as dist
folder = tempfile.mkdtemp()
dist.init_process_group("gloo", init_method=f"file://{folder}/x", rank=0, world_size=1)
""",
    "DTensor of four": """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
""",
    "own": """
class Halves(torch.Tensor):
    "Stands for two halves, as quantized weights stand for values and scales."
    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(
            cls, (2 * a.shape[0], *a.shape[1:]), dtype=a.dtype, requires_grad=False)
    def __init__(self, a, b):
        self.a, self.b = a, b
    def __tensor_flatten__(self):
        return ["a", "b"], None
    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Halves(inner["a"], inner["b"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        from torch.utils._pytree import tree_map
        from torch.utils._python_dispatch import return_and_correct_aliasing
        kwargs = kwargs or {}
        def part(name):
            pick = lambda x: getattr(x, name) if isinstance(x, Halves) else x
            return func(*tree_map(pick, args), **tree_map(pick, kwargs))
        a, b = part("a"), part("b")
        if isinstance(a, (list, tuple)):
            out = [Halves(x, y) for x, y in zip(a, b)]
        elif isinstance(a, torch.Tensor):
            out = Halves(a, b)
        else:
            return a
        return return_and_correct_aliasing(func, args, kwargs, out)
def wrapped(t): return Halves(t[:2].clone(), t[2:].clone())
def plain(t): return [t.a, t.b] if isinstance(t, Halves) else [t]
""",
}
DISTRIBUTED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
def wrapped(t): return distribute_tensor(t, mesh, [Shard(0)])
def plain(t): return [t.to_local()] if isinstance(t, DTensor) else [t]
"""

PROGRAM = """
import warnings
import torch, fuseopt
from tests.shards.gloo import wait_for_workers
torch.set_num_threads(1)
{kind}
WAY, LANES, WHAT = {way!r}, {lanes}, {what!r}

def is_wrapped(role, step):
    if WHAT == "all":
        return True
    if WHAT == "later":
        return step >= 2
    return role == WHAT

class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "m" not in state:
                    state["m"] = torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad)
                p.add_(state["m"], alpha=-group["lr"])

def run(way):
    torch._dynamo.reset()
    torch.manual_seed(0)
    def tensor(role, step, t):
        return wrapped(t) if is_wrapped(role, step) else t
    params = [torch.nn.Parameter(tensor("param", 0, torch.randn(4, 4)))
              for _ in range(LANES)]
    optimizer = Momentum(params)
    step = optimizer.step
    if way == "torch.compile":
        step = torch.compile(step, backend="fuseopt")
    elif way:
        step = fuseopt.compile(optimizer).step
    generator = torch.Generator().manual_seed(1)
    for k in range(4):
        if k == 2 and WHAT == "later":
            # the second of them is replaced by another
            old, params[1] = params[1], torch.nn.Parameter(wrapped(params[1].detach()))
            optimizer.param_groups[0]["params"][1] = params[1]
            optimizer.state.pop(old)
        for i, p in enumerate(params):
            g = torch.randn(4, 4, generator=generator)
            p.grad = wrapped(g) if type(p.data) is not torch.Tensor else g
        step()
    out = []
    for p in params:
        for t in (p.data, *optimizer.state[p].values()):
            out += [x.detach().clone() for x in plain(t)]
    return out

want = run("")
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    got = run(WAY)
assert len(got) == len(want)
assert all(map(torch.equal, got, want)), "other bits than eager's"
texts = [str(w.message) for w in told]
texts = [t for t in texts if t.startswith("fuseopt:") and "eager" in t]
if {compiled}:
    assert not texts, texts
    assert fuseopt.reports()[-1].launches == 1
    assert not any(r.fallback for r in fuseopt.reports())
else:
    assert len(texts) == 1, texts
    assert any("eager" in r.fallback for r in fuseopt.reports())
if torch.distributed.is_initialized():
    # else threads of it may be alive when the process ends, which aborts then
    wait_for_workers()
    torch.distributed.destroy_process_group()
print("done")
"""


def run(program: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(program)  # code whose source can be read
    done = subprocess.run(
        [sys.executable, file.name],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    os.unlink(file.name)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


WAYS = [("torch.compile", 3), ("fuseopt.compile", 3), ("fuseopt.compile", 16)]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "lanes"), WAYS)
@pytest.mark.parametrize("what", ["all", "later"])
@pytest.mark.parametrize("kind", KINDS)
def test_wrappers(kind: str, what: str, way: str, lanes: int) -> None:
    """Of DTensors the part that is here is stepped; others are seen through."""
    spread = kind.startswith("DTensor")
    text = KINDS[kind] + (DISTRIBUTED if spread else "")
    program = PROGRAM.format(kind=text, way=way, lanes=lanes, what=what, compiled=True)
    assert run(program).endswith("done\n")


# ---------------------------------------------------------------- memory taken away


def make(way: str, lanes: int, part: bool) -> tuple[list[torch.Tensor], object, object]:
    """Parameters (each a part of a larger storage), their optimizer, its step."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    memory = [torch.randn(20)[4:] if part else torch.randn(16) for _ in range(lanes)]
    params = [torch.nn.Parameter(m.view(4, 4)) for m in memory]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if way == "torch.compile":
        return params, optimizer, torch.compile(optimizer.step, backend=backend)
    return params, optimizer, fuseopt.compile(optimizer).step


@pytest.mark.family(60)
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("what", ["param", "grad", "state"])
@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize(("way", "lanes"), WAYS)
def test_freed_memory_is_refused_before_anything_is_written(
    way: str, lanes: int, when: int, what: str, part: bool
) -> None:
    """Eager's kernels would end the process; at a later call the probe sees it."""
    params, optimizer, step = make(way, lanes, part)
    if what == "state" and not when:
        when = 3
    for _ in range(when):
        for p in params:
            p.grad = torch.randn(20)[4:].view(4, 4) if part else torch.randn(4, 4)
        step()  # type: ignore[operator]
    for p in params:
        p.grad = torch.randn(20)[4:].view(4, 4) if part else torch.randn(4, 4)
    before = [p.detach().clone() for p in params]
    last = params[-1]
    taken = {"param": last, "grad": last.grad}
    if what == "state":
        taken["state"] = optimizer.state[last]["momentum_buffer"]  # type: ignore[attr-defined]
    memory = taken[what].untyped_storage()  # type: ignore[union-attr]
    held = memory.clone()
    memory.resize_(0)
    error: Exception | None = None
    try:
        step()  # type: ignore[operator]
    except Exception as raised:
        error = raised.with_traceback(None)
    # whoever prints a tensor without memory ends the process
    memory.resize_(held.nbytes())
    memory.copy_(held)
    # Dynamo puts words of its own around
    assert UnsupportedInput.__name__ in f"{type(error).__name__}: {error}"
    assert "no memory" in str(error)
    for p, b in zip(params, before, strict=True):
        assert torch.equal(p, b)
    step()  # type: ignore[operator]
    assert not torch.equal(params[-1], before[-1])


@pytest.mark.family(3)
@pytest.mark.parametrize(("way", "lanes"), WAYS)
@pytest.mark.filterwarnings("ignore")
def test_parameters_without_contents_step_in_eager(way: str, lanes: int) -> None:
    torch._dynamo.reset()
    params = [torch.nn.Parameter(torch.ones(4, device="meta")) for _ in range(lanes)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    if way == "torch.compile":
        step = torch.compile(optimizer.step, backend=backend)
    else:
        step = fuseopt.compile(optimizer).step
    for _ in range(3):
        for p in params:
            p.grad = torch.ones(4, device="meta")
        step()
    assert all("eager" in r.fallback for r in fuseopt.reports())
    assert fuseopt.reports()
