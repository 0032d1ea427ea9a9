"""What a user reads first where fuseopt refuses: what is the matter, and what to do."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt import errors
from fuseopt.compiler.session import session
from fuseopt.config import resolve
from tests import ROOT
from tests.steps import make, make_params, set_grads


def optimizer(name: str = "SGD", **options: Any) -> torch.optim.Optimizer:
    params = make_params([(3,), (4, 5)])
    set_grads(params, params, 0)
    return make(name, params, **{"lr": 0.1, **options})


def sparse() -> torch.optim.Optimizer:
    found = optimizer()
    p = found.param_groups[0]["params"][1]
    p.grad = torch.eye(4, 5).to_sparse()
    return found


def step(given: torch.optim.Optimizer, **options: Any) -> Callable[[], Any]:
    return torch.compile(given.step, backend="fuseopt", options=options)


def inside(given: torch.optim.Optimizer, **options: Any) -> Callable[[], Any]:
    """A function that steps an optimizer: Dynamo compiles the step as part of it."""

    def train() -> None:
        given.step()

    return torch.compile(train, backend="fuseopt", options=options)


def forward() -> Any:
    found = torch.compile(torch.sin, backend="fuseopt", options={"fallback": "error"})
    return found(torch.ones(3))


#: What is done, the class of what is raised, how its text begins.
REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "fused": (
        lambda: inside(torch.optim.AdamW(make_params([(3,)]), fused=True))(),
        errors.UnsupportedInput,
        "AdamW was made with fused=True: ",
    ),
    "sparse": (
        lambda: step(sparse())(),
        errors.UnsupportedInput,
        "the gradient of parameter 1 of group 0 is sparse",
    ),
    "an option": (
        lambda: step(optimizer(), verfy=True)(),
        errors.ConfigError,
        "unknown option 'verfy'; did you mean 'verify'?",
    ),
    "an option of fuseopt.compile": (
        lambda: fuseopt.compile(optimizer(), verfy=True),
        errors.ConfigError,
        "unknown option 'verfy'; did you mean 'verify'?",
    ),
    "an option of fuseopt.tail": (
        lambda: fuseopt.tail(optimizer(), clip_norm=1.0),
        errors.ConfigError,
        "unknown option 'clip_norm'; did you mean 'clip_grad_norm'? Known: clip_grad_n",
    ),
    "an option of no function": (
        lambda: fuseopt.tail(optimizer(), max_n=1.0),
        errors.ConfigError,
        "unknown option 'max_n'. Known: clip_grad_norm, norm_type, ",
    ),
    "an option of in_backward": (
        lambda: fuseopt.in_backward(torch.nn.Linear(2, 2), torch.optim.SGD, bucket=1),
        errors.ConfigError,
        "unknown option 'bucket'; did you mean 'buckets'? Known: buckets, thread, ",
    ),
    "a mode": (
        lambda: torch.compile(optimizer().step, backend="fuseopt", mode="fastest")(),
        errors.ConfigError,
        "unknown mode 'fastest'; known: ",
    ),
    "no fallback": (forward, errors.CaptureError, "the graph changes no tensor "),
    "a graph on the CPU": (
        lambda: step(optimizer(), cudagraphs="require")(),
        errors.CudaGraphError,
        "the step cannot be captured in a graph: ",
    ),
    "the module": (
        lambda: torch.compile(optimizer().step, backend=fuseopt)(),
        errors.NotABackend,
        "fuseopt is a module: give torch.compile the backend's name, as in "
        'torch.compile(opt.step, backend="fuseopt")',
    ),
    "the module, called": (
        lambda: fuseopt(optimizer()),  # type: ignore[operator]
        errors.NotABackend,
        "fuseopt is a module: ",
    ),
}
#: What Dynamo adds for whoever finds a defect of PyTorch's.
ADDED = ("PyTorch", "TORCHDYNAMO_VERBOSE", "minifier", "issue", "raised:", "backend=")


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_reaches_the_user_as_it_is(name: str) -> None:
    act, kind, words = REFUSALS[name]
    with pytest.raises(kind) as caught:
        act()
    error = caught.value
    text = str(error)
    assert text.startswith(words)
    assert text == text.strip()
    assert [word for word in ADDED if word in text.replace('backend="', "")] == []
    # what Python prints last is that, under the name of the documented class
    last = traceback.format_exception_only(error)[-1]
    assert last.startswith(f"fuseopt.errors.{kind.__name__}: {words}")
    shown = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert sum("_dynamo" in path for path in shown) <= 1
    assert repr(error) == f"{kind.__name__}({text!r})"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, text)


def test_who_caught_dynamos_errors_still_does() -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    with pytest.raises(BackendCompilerFailed, match="verfy") as caught:
        inside(optimizer(), verfy=True)()
    assert type(caught.value.inner_exception) is errors.ConfigError


def test_other_errors_are_dynamos_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever did not mean it to fail is told where it did."""
    from torch._dynamo.exc import BackendCompilerFailed

    import fuseopt.compiler.dispatch

    def fail(*_: Any) -> Any:
        raise KeyError(26)

    monkeypatch.setattr(fuseopt.compiler.dispatch, "decide", fail)
    with pytest.raises(BackendCompilerFailed, match="KeyError: 26") as caught:
        inside(optimizer())()
    assert not isinstance(caught.value, errors.FuseoptError)


def test_where_dynamo_has_no_such_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its message then begins with its own words; ours is in it."""
    from torch._dynamo import exc

    inside(optimizer())()
    torch._dynamo.reset()
    monkeypatch.delattr(exc, "BackendCompilerFailed")
    with pytest.raises(RuntimeError, match="did you mean 'verify'"):
        inside(optimizer(), verfy=True)()


def test_a_refused_step_can_be_caught_and_done_in_eager() -> None:
    given = optimizer()
    p = given.param_groups[0]["params"][0]
    before = p.detach().clone()
    try:
        step(given, target="triton", cudagraphs="require")()
    except errors.CudaGraphError:
        given.step()
    assert torch.equal(p, before - 0.1 * p.grad)


def test_why_a_step_is_not_led_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised in a trace as well, of which Dynamo knows nothing but that it failed."""
    import fuseopt.replicate.backend

    def decide(*_: Any) -> Any:
        return types.SimpleNamespace(parts=(), whole="eager", why="it is a test")

    monkeypatch.setattr(fuseopt.replicate.backend, "decide", decide)
    params = make_params([(3,)] * 20)
    set_grads(params, params, 0)
    session.reset()
    given = fuseopt.compile(make("SGD", params, lr=0.1))
    given.step()
    (report,) = fuseopt.reports()
    assert report.traced == (
        "all lanes, since its graph is more than an update: it is a test"
    )


# ---------------------------------------------------------------- what is meant


def test_explain_takes_an_optimizer() -> None:
    given = optimizer(momentum=0.9)
    p = given.param_groups[0]["params"][0]
    before = p.detach().clone()
    told, same = fuseopt.explain(given), fuseopt.explain(given.step)
    assert told.kernels == same.kernels
    assert told.launches == 1
    assert torch.equal(p, before)
    assert not given.state
    assert fuseopt.explain(fuseopt.compile(given)).launches == 1
    assert fuseopt.explain(given, options={"target": "triton"}).launches == 1


def test_explain_says_what_it_takes() -> None:
    with pytest.raises(
        errors.NotAnOptimizer, match="an optimizer, its step or another"
    ):
        fuseopt.explain([optimizer()])  # type: ignore[arg-type]


def test_the_module_is_a_module_in_all_else() -> None:
    assert isinstance(fuseopt, types.ModuleType)
    assert repr(fuseopt).startswith("<module 'fuseopt' from ")
    with pytest.raises(AttributeError, match="module 'fuseopt' has no attribute 'no'"):
        _ = fuseopt.no

    # code that names it is traced as ever
    @torch.compile(backend="eager", fullgraph=True)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if fuseopt.__version__ else x

    assert torch.equal(double(torch.ones(3)), 2 * torch.ones(3))


# ---------------------------------------------------------------- variables

YES, NO = (
    ("1", "true", "True", "TRUE", "yes", "on", " Yes "),
    ("0", "false", "no", "Off"),
)


@pytest.mark.parametrize("said", [*YES, *NO])
def test_variables_take_all_words_for_yes_and_no(said: str) -> None:
    wanted = said in YES
    for variable in ("CHECK", "CUDAGRAPHS", "DEBUG"):
        config = resolve(None, None, {f"FUSEOPT_{variable}": said})
        assert getattr(config, variable.lower()) == wanted
    assert type(resolve(None, None, {"FUSEOPT_DEBUG": said}).debug) is int


@pytest.mark.parametrize("variable", ["CHECK", "CUDAGRAPHS", "DEBUG"])
@pytest.mark.parametrize("said", ["maybe", "2.0", "-1", "5", "truee"])
def test_other_words_are_an_error_that_names_them(variable: str, said: str) -> None:
    name = f"FUSEOPT_{variable}"
    with pytest.raises(errors.ConfigError) as caught:
        resolve(None, None, {name: said})
    told = str(caught.value)
    assert told.startswith(f"{name}={said!r}: expected one of 1, true, yes, on, 0, ")
    assert ("require" in told) == (variable == "CUDAGRAPHS")


def test_a_variable_of_names_is_named() -> None:
    with pytest.raises(errors.ConfigError, match=r"^FUSEOPT_TARGET='cuda': expected"):
        resolve(None, None, {"FUSEOPT_TARGET": "cuda"})


def test_an_empty_variable_says_nothing() -> None:
    names = ("CHECK", "CUDAGRAPHS", "DEBUG", "TARGET", "CACHE_DIR", "DUMP_DIR")
    assert resolve(None, None, {f"FUSEOPT_{n}": "" for n in names}) == resolve(
        None, None, {}
    )


def test_a_variable_that_is_wrong_is_said_before_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FUSEOPT_CUDAGRAPHS", "maybe")
    with pytest.raises(errors.ConfigError, match=r"^FUSEOPT_CUDAGRAPHS='maybe'"):
        fuseopt.compile(optimizer())
    with pytest.raises(errors.ConfigError, match=r"^FUSEOPT_CUDAGRAPHS='maybe'"):
        step(optimizer())()


# ---------------------------------------------------------------- dumps


@pytest.mark.parametrize("way", ["option", "variable", "debug"])
def test_a_dump_that_cannot_be_written(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning for all steps; these go on."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    options: dict[str, Any] = {}
    if way == "option":
        options = {"dump_dir": str(blocked / "dump")}
    elif way == "variable":
        monkeypatch.setenv("FUSEOPT_DUMP_DIR", str(blocked))
    else:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "fuseopt_debug").write_text("")
        options = {"debug": 1}
    session.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            given = optimizer(momentum=0.9)
            p = given.param_groups[0]["params"][0]
            expected = p.detach() - 0.1 * p.grad
            step(given, **options)()
            assert torch.equal(p, expected)
            torch._dynamo.reset_code_caches()
    told = [str(w.message) for w in caught if "fuseopt: " in str(w.message)]
    assert len(told) == 1
    assert told[0].startswith("fuseopt: nothing can be written into ")
    assert all(r.dump_dir is None and r.launches == 1 for r in fuseopt.reports())


@pytest.mark.slow
def test_a_dump_on_a_full_disk(tmp_path: Path) -> None:
    """Files of no more than 100 bytes: the folder can be made, what it holds cannot."""
    program = f"""
import resource, sys, warnings
sys.path.insert(0, {str(ROOT)!r})
import torch, fuseopt
warnings.simplefilter("always")
p = torch.nn.Parameter(torch.ones(3))
opt = torch.optim.SGD([p], lr=0.5)
step = torch.compile(opt.step, backend="fuseopt", options={{"cache_dir": sys.argv[1]}})
p.grad = torch.ones(3)
step()
torch._dynamo.reset()
options = {{"cache_dir": sys.argv[1], "dump_dir": sys.argv[2]}}
step = torch.compile(opt.step, backend="fuseopt", options=options)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
step()
print(p.tolist(), fuseopt.reports()[-1].dump_dir)
"""
    folders = [str(tmp_path / "kernels"), str(tmp_path / "dump")]
    done = subprocess.run(
        [sys.executable, "-c", program, *folders],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.stdout.splitlines() == ["[0.0, 0.0, 0.0] None"], done.stderr
    assert done.stderr.count("fuseopt: nothing can be written into ") == 1


def test_a_dump_by_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    step(optimizer(), dump_dir="~/dump")()
    (report,) = fuseopt.reports()
    assert report.dump_dir == str(tmp_path / "dump" / "step0")
    assert (tmp_path / "dump" / "step0" / "report.txt").exists()
