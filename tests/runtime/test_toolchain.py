"""Which C++ compiler is called, what tells it apart, what is said if it will not do."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fuseopt
from fuseopt.codegen import Source
from fuseopt.compiler.session import session
from fuseopt.errors import CompilerMissing
from fuseopt.runtime.cpp import toolchain
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.cpp.toolchain import find_compiler
from tests.runtime.cache_cases import source
from tests.steps import compiled, make, make_params, set_grads

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
DEFINED = Source("cpp", 'extern "C" int answer() { return ANSWER; }\n', "answer", ())


def script(path: Path, text: str) -> str:
    """A program that the shell runs."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def key() -> str:
    return find_compiler().key(DEFINED, False)


def answer(folder: Path) -> tuple[int, int]:
    """What is built with $CXX says, and the compiler runs it took."""
    b = Builder()
    return b.load(DEFINED, str(folder), False).answer(), b.builds


# ---------------------------------------------------------------- commands


def test_flags_after_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 1):
        monkeypatch.setenv("CXX", f"g++ -O0 -DANSWER={number}")
        assert answer(tmp_path / "kernels")[0] == number
    assert len(list(tmp_path.glob("kernels/*/*.so"))) == 2


def test_a_launcher_before_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = script(tmp_path / "bin" / "launcher", 'exec "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", "launcher g++ -DANSWER=3")
    assert find_compiler().command[:2] == (launcher, "g++")
    assert answer(tmp_path / "kernels") == (3, 1)


@pytest.mark.parametrize("quoted", [True, False])
def test_a_path_with_spaces(
    quoted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path / "my tools" / "g++", 'exec g++ -DANSWER=4 "$@"')
    monkeypatch.setenv("CXX", shlex.quote(path) + " -w" if quoted else path)
    assert find_compiler().path == path
    assert answer(tmp_path / "kernels") == (4, 1)


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers do not run in the working directory."""
    script(tmp_path / "bin" / "mine", 'exec g++ -DANSWER=5 "$@"')
    script(tmp_path / "bin" / "launcher", 'exec "$@"')
    monkeypatch.chdir(tmp_path)
    for command in ("bin/mine", "bin/launcher bin/mine"):
        monkeypatch.setenv("CXX", command)
        assert answer(tmp_path / command.replace("/", "_"))[0] == 5


@pytest.mark.parametrize("said", ["", "  "])
def test_a_variable_that_says_nothing(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", said)
    assert find_compiler().path == shutil.which("g++")


def test_what_is_given_with_the_compiler_changes_no_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'extern "C" double sum(double a, double b) { return (a + b) - a; }\n'
    for more in ("-ffast-math", "-Ofast", "-ffp-contract=fast"):
        monkeypatch.setenv("CXX", f"g++ {more}")
        library = Builder().load(Source("cpp", text, "sum", ()), str(tmp_path), False)
        function = library.sum
        function.argtypes = [ctypes.c_double] * 2
        function.restype = ctypes.c_double
        assert function(1e16, 1.0) == 0.0


# ---------------------------------------------------------------- the key


def test_a_wrapper_is_told_apart_from_what_it_wraps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these says the same version."""
    keys = []
    for name, flags in (("a", ""), ("b", "-fsanitize=address"), ("c", "-DX")):
        wrapper = script(tmp_path / name / "g++", f'exec /usr/bin/g++ {flags} "$@"')
        monkeypatch.setenv("CXX", wrapper)
        keys.append(key())
    monkeypatch.delenv("CXX")
    keys.append(key())
    assert len(set(keys)) == 4


def test_a_wrapper_that_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process, with the same length and time: what it holds counts."""
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    for number in (1, 2):
        path = script(tmp_path / "g++", f'exec g++ -DANSWER={number} "$@"')
        os.utime(path, ns=(10**9, 10**9))
        assert answer(tmp_path / "kernels") == (number, 1)


def test_a_compiler_that_is_installed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the same name, too large to be read: its size and time count."""
    monkeypatch.setattr(toolchain, "SCRIPT", 0)
    path = script(tmp_path / "g++", 'exec g++ "$@"')
    monkeypatch.setenv("CXX", path)
    first = key()
    assert key() == first
    os.utime(path, ns=(10**9, 10**9))
    assert key() != first


def test_a_wrapper_that_heeds_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the compiler would really do is asked for, once in a process."""
    monkeypatch.setenv("CXX", script(tmp_path / "g++", 'exec g++ $MORE "$@"'))
    keys = []
    for more in ("", "-fsanitize=thread", "-O0", ""):
        monkeypatch.setenv("MORE", more)
        toolchain._identified.cache_clear()
        keys.append(key())
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3


def test_a_sanitized_library_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wrapper built that adds -fsanitize is not loaded without it."""
    wrapper = script(tmp_path / "bin" / "g++", 'exec g++ -fsanitize=undefined "$@"')
    monkeypatch.setenv("CXX", wrapper)
    b = Builder()
    b.load(source(1), str(tmp_path / "kernels"), False)
    monkeypatch.delenv("CXX")
    b = Builder()
    b.load(source(1), str(tmp_path / "kernels"), False)
    assert (b.builds, b.disk_hits) == (1, 0)


def test_the_compiler_is_asked_once_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several threads at once, as a plan does, and in several builders."""
    calls, folder = tmp_path / "calls", str(tmp_path / "kernels")
    wrapper = script(tmp_path / "g++", f'echo "$@" >> {calls}\nexec g++ "$@"')
    monkeypatch.setenv("CXX", wrapper)
    with ThreadPoolExecutor(4) as threads:
        for b in [Builder(), Builder(), Builder()] * 4:
            threads.submit(b.load, source(1), folder, False)
    lines = calls.read_text().splitlines()
    assert len(lines) == 2, lines
    assert ["-###" in line for line in lines] == [True, False]


# ---------------------------------------------------------------- what will not do


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("/nonexistent/g++", "CXX='/nonexistent/g++' names no program that can be run"),
        ("no-such-compiler -O2", "CXX='no-such-compiler -O2' names no program"),
        ("/tmp", "CXX='/tmp' names no program"),
        ('"g++', "cannot be read as a command"),
        ("false", "/false is no C++ compiler that can be used"),
        ("sleep", "/sleep cannot make a library of any source"),
        ("cat", "/cat cannot make a library of any source"),
        ("true", "/true cannot make a library of any source"),
        ("g++ -DINT -no-such-flag", "unrecognized command-line option"),
        ("g++ -include /nonexistent.h", "nonexistent.h"),
    ],
)
def test_a_compiler_that_will_not_do_is_named(
    command: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other one is called, although g++ is there."""
    monkeypatch.setenv("CXX", command)
    with pytest.raises(CompilerMissing, match=re.escape(words)):
        Builder().load(source(1), str(tmp_path / "kernels"), False)
    assert not list(tmp_path.rglob("*.so"))


def test_a_compiler_whose_libraries_do_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = 'case "$*" in *kernel.so*) echo no > kernel.so; exit;; esac'
    made = f'{empty}\nexec g++ "$@"'
    monkeypatch.setenv("CXX", script(tmp_path / "g++", made))
    with pytest.raises(CompilerMissing, match="libraries that cannot be loaded"):
        Builder().load(source(1), str(tmp_path / "kernels"), False)


def both(cache_dir: Path, steps: int = 3) -> tuple[list[str], bool]:
    """The warnings of steps with a cache folder, and are they eager's?"""
    params, others = make_params([(3,), (4, 5)]), make_params([(3,), (4, 5)])
    mine = make("SGD", params, lr=0.1, momentum=0.9)
    eager = make("SGD", others, lr=0.1, momentum=0.9)
    step = compiled(mine, cache_dir=str(cache_dir))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(steps):
            set_grads(params, others, number)
            step()
            eager.step()
    same = all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    return [
        str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)
    ], same


@pytest.mark.family(3)
@pytest.mark.parametrize("command", ["/nonexistent/g++", "false", "cat"])
def test_steps_go_on_in_eager(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out before the first step or when it runs: one warning, all of the step."""
    monkeypatch.setenv("CXX", command)
    session.reset()
    told, same = both(tmp_path / "kernels")
    assert same
    assert len(told) == 1
    assert told[0].startswith("fuseopt: steps run in eager: ")
    assert command.rpartition("/")[2] in told[0]
    # two graphs, without state and with it, in three steps
    assert [bool(r.fallback) for r in fuseopt.reports() if not r.launches] == [True] * 2


@pytest.mark.family(4)
@pytest.mark.parametrize("lanes", [2, 40])
def test_steps_go_on_in_eager_where_nothing_can_be_written(
    lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Led by a few lanes, and traced whole."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    session.reset()
    session.builder = Builder()
    params, others = make_params([(3,)] * lanes), make_params([(3,)] * lanes)
    mine = fuseopt.compile(
        make("AdamW", params, lr=0.1), cache_dir=str(tmp_path / "file" / "x")
    )
    eager = make("AdamW", others, lr=0.1)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(4):
                set_grads(params, others, number)
                mine.step()
                eager.step()
    finally:
        session.builder = Builder()
    told = [w for w in caught if "fuseopt: " in str(w.message)]
    assert len(told) == 1
    assert "no kernel can be built: neither" in str(told[0].message)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q)
        assert mine.state[p]["step"] == 4


@pytest.mark.parametrize("command", ["false", "cat"])
def test_an_error_where_eager_is_no_choice(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written, and no warning says that it goes on in eager."""
    monkeypatch.setenv("CXX", command)
    params = make_params([(3,)])
    set_grads(params, params, 0)
    before = params[0].detach().clone()
    step = compiled(
        make("SGD", params, lr=0.1), cache_dir=str(tmp_path), fallback="error"
    )
    for _ in range(2):
        with pytest.raises(fuseopt.errors.CaptureError, match=f"^/.*/{command} "):
            step()
    assert torch.equal(params[0], before)
