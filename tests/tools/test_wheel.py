"""The wheel of `make wheel` works in an environment without a compiler.

The environment is new, with torch from here; the wheel is installed by pip, no compiler
is on PATH, the checkout is not there, and the cache is empty and stays so. In the one
called `empty` pip installs everything, torch too, as a user's pip does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from fuseopt.runtime.cpp import prebuilt
from tests import ROOT
from tests.tools import wheel as tool
from tests.tools.matrix import NO_CAP
from tests.tools.prebuilt import Step, _compiled, collected, steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.skipif(not prebuilt.levels(), reason="no x86-64 with Linux"),
]
#: Few of the steps, so that the wheel is built in a minute.
ONLY = ("AdamW torch.float32", "Lion torch.float32 lion_pytorch", "doctor")
README = """
import json, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
import torch, lion_pytorch

found = {}
for made in (torch.optim.AdamW, lion_pytorch.Lion):
    torch.manual_seed(0)
    models = [torch.nn.Linear(64, 10) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, opt = (made(m.parameters(), lr=1e-3) for m in models)
    step = torch.compile(opt.step, backend="fuseopt", fullgraph=True)
    for number in range(10):
        x = torch.randn(32, 64)
        for model, optimizer, do in zip(models, (plain, opt), (plain.step, step)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            do()
    pairs = zip(*(m.parameters() for m in models))
    equal = all(torch.equal(p, q) for p, q in pairs)
    import fuseopt
    report = fuseopt.reports()[-1]
    found[made.__name__] = [equal, report.launches, report.builds, report.fallback]
maps = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line}
found["file"], found["openmp"] = fuseopt.__file__, sorted(maps)
print(json.dumps(found))
"""
#: README's example as it is, then with the plain step, and what both came to.
EXAMPLE = """
import json, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
import torch

code, line = sys.argv[1:]
assert code.count(line) == 1
ran = []
for text in (code, code.replace(line, "opt.step")):
    torch.manual_seed(0)
    ran.append({})
    exec(text, ran[-1])
import fuseopt
(report,) = fuseopt.reports()
moved = [p.detach() for x in ran for p in x["model"].parameters()]
half = len(moved) // 2
states = [[t for s in x["opt"].state.values() for t in s.values()] for x in ran]
print(json.dumps({
    "file": fuseopt.__file__,
    "equal": all(map(torch.equal, moved[:half], moved[half:])),
    "states": len(states[0]) > 0 and all(map(torch.equal, *states)),
    "launches": report.launches,
    "builds": report.builds,
    "fallback": report.fallback,
}))
"""
OTHER = """
import warnings
import torch
import fuseopt

class Mine(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.75).sub_(p.grad.cos().tanh(), alpha=group["lr"])

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        p = torch.nn.Parameter(torch.ones(5))
        opt = fuseopt.compile(Mine([p]))
        for _ in range(3):
            p.grad = torch.ones(5)
            opt.step()
told = [str(w.message) for w in caught if str(w.message).startswith("fuseopt")]
assert p[0] != 1
print(*told, sep="\\n")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the kernels of few steps."""
    return tool.wheel(tmp_path_factory.mktemp("wheel"), ONLY)


@pytest.fixture(scope="module")
def home(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and what it needs from here."""
    made = tmp_path_factory.mktemp("bare")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", made / "env"], check=True
    )
    python = made / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index"]
    subprocess.run([*pip, "--no-deps", "--quiet", built], check=True)
    # by name: not what an editable install of the checkout has put there
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (Path(where) / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (made / "bin").mkdir()
    return made


@pytest.fixture(scope="module")
def empty(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment, in which pip installs the wheel and what it asks for."""
    made = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", made / "env"], check=True)
    version = torch.__version__.partition("+")[0]
    pip = [made / "env" / "bin" / "python", "-m", "pip", "install", "--quiet"]
    own = {**os.environ, "PIP_CONSTRAINT": str(ROOT / NO_CAP)}
    asked = [built, f"torch=={version}", "lion-pytorch"]
    subprocess.run([*pip, *asked], check=True, env=own, cwd=made)
    (made / "bin").mkdir()
    return made


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the environment's Python; nothing is on PATH."""
    return subprocess.run(
        [home / "env" / "bin" / "python", *arguments],
        cwd=home,
        env={"PATH": str(home / "bin"), "HOME": str(home)},
        capture_output=True,
        text=True,
    )


def test_the_wheel_says_where_it_runs(built: Path) -> None:
    assert built.name.endswith(f"-py3-none-{tool.PLATFORM}_x86_64.whl")


def test_one_launch_and_eagers_bits_without_a_compiler(home: Path) -> None:
    done = run(home, "-c", README)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["AdamW"] == found["Lion"] == [True, 1, 0, ""]
    assert found["file"].startswith(str(home))
    # torch's own, and no second one
    assert len(found["openmp"]) == 1
    assert "torch" in found["openmp"][0]
    kernels = [*home.rglob(".cache/**/*.so")]
    assert kernels == []


@pytest.mark.parametrize("level", prebuilt.levels())
def test_each_level_has_eagers_bits(home: Path, level: str) -> None:
    """Those below the best one too, which other processors would take."""
    only = "from fuseopt.runtime.cpp import prebuilt\n"
    only += f"prebuilt.levels = lambda: ({level!r},)"
    done = run(home, "-c", f"{only}\n{README}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["AdamW"] == found["Lion"] == [True, 1, 0, ""]


def test_verify_without_a_compiler(home: Path) -> None:
    command = ["-m", "fuseopt", "verify", "torch.optim:AdamW", "lion_pytorch:Lion"]
    done = run(home, *command, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout)["results"]
    assert [(x["outcome"], x["launches"]) for x in results] == 2 * [("equal", 1)]
    assert all(x["warnings"] == [] and x["control"] for x in results)


def test_readmes_example_in_an_empty_environment(empty: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    line = 'torch.compile(opt.step, backend="fuseopt")'
    done = run(empty, "-c", EXAMPLE, code, line)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file"].startswith(str(empty))
    assert (found["equal"], found["states"]) == (True, True)
    assert (found["launches"], found["builds"], found["fallback"]) == (1, 0, "")
    assert [*empty.rglob(".cache/**/*.so")] == []


@pytest.mark.parametrize("target", ["torch.optim:AdamW", "lion_pytorch:Lion"])
def test_verify_in_an_empty_environment(empty: Path, target: str) -> None:
    done = run(empty, "-m", "fuseopt", "verify", target, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)["results"]
    assert (found["outcome"], found["launches"]) == ("equal", 1)
    assert found["control"]
    assert found["warnings"] == []


def test_no_compiler_is_found_in_an_empty_environment(empty: Path) -> None:
    """Else the tests above would prove nothing."""
    done = run(empty, "-m", "fuseopt", "doctor", "--json")
    findings = {x["name"]: x for x in json.loads(done.stdout)["findings"]}
    assert findings["C++ compiler"]["state"] == "warn"


def test_doctor_names_the_command_and_what_works(home: Path) -> None:
    done = run(home, "-m", "fuseopt", "doctor", "--json")
    findings = {x["name"]: x for x in json.loads(done.stdout)["findings"]}
    compiler = findings["C++ compiler"]
    assert (compiler["state"], compiler["remedy"]) == ("warn", "apt install g++")
    assert "kernels of common steps came with the package" in compiler["text"]
    assert findings["a step on cpu"]["text"] == "1 launch, the bits of eager"
    assert done.returncode == 0


def test_one_warning_says_what_to_install(home: Path) -> None:
    """A step of the user's own, whose kernel nobody has built; it runs in eager."""
    done = run(home, "-c", OTHER)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1
    assert "steps run in eager: no C++ compiler was found. Install one" in lines[0]
    assert "is not among the" in lines[0]


def test_a_library_that_asks_for_too_much_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text(
        'extern "C" int omp_get_num_threads();\n'
        'extern "C" int f() { return omp_get_num_threads(); }\n'
    )
    library = tmp_path / "a.so"
    command = ["g++", "-shared", "-fPIC", "-fopenmp", "-o", library, tmp_path / "a.cpp"]
    subprocess.run(command, check=True)
    with pytest.raises(ValueError, match=r"needs \['libgomp.so.1'\]"):
        tool.check(library)


def test_a_cache_of_another_place_is_not_needed(home: Path) -> None:
    """A home that cannot be written makes no difference."""
    home = Path(home)
    done = subprocess.run(
        [home / "env" / "bin" / "python", "-c", README],
        cwd=home,
        env={"PATH": str(home / "bin"), "HOME": os.devnull},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["AdamW"] == [True, 1, 0, ""]


#: Shapes of a transformer's parameters, a convolutional network's, matrices alone.
MODELS = (
    ((64, 32), (64,), (64,), (32, 64), (32,)),
    ((16, 3, 3, 3), (16,), (16,), (10, 16), (10,)),
    ((9, 4), (4, 9)),
)


@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_models_of_other_shapes_need_no_other_kernel(name: str) -> None:
    known = collected(steps([f"{name} torch.float32"]))
    made = getattr(torch.optim, name)
    for shapes in MODELS:
        step = Step("model", lambda params: _compiled(made(params)), shapes=shapes)
        assert collected([step]).keys() <= known.keys()
