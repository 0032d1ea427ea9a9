"""`fuseopt.integrations`: one line in each trainer, and the bits of the plain training.

Each against the real package; what is not installed is skipped by name.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import fuseopt
from fuseopt.compiler.session import session
from fuseopt.errors import ConfigError, NotAnOptimizer, UnsupportedInput
from fuseopt.integrations.classes import compiled, make
from tests.wild.trained import STEPS, Trained, seed_all
from tests.wild.without_torchvision import stand_ins

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    known = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(known)


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make wild)")


def in_eager(given: Any) -> Any:
    return given


def same(want: Trained, got: Trained) -> None:
    from tests.wild.test_trainings import differences

    assert differences(want, got) == []


def launches() -> list[int]:
    assert not session.eager
    assert [r.fallback for r in fuseopt.reports() if r.fallback] == []
    return [r.launches for r in fuseopt.reports()]


# ---------------------------------------------------------------- classes


def trained(make_optimizer: Callable[[Any], Optimizer]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = make_optimizer(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_a_class_in_the_place_of_another() -> None:
    want, _ = trained(lambda params: AdamW(params, lr=0.01))
    kind = compiled(AdamW, fallback="error")
    got, optimizer = trained(lambda params: kind(params, lr=0.01))
    assert launches() == [1]
    assert issubclass(kind, AdamW)
    assert type(optimizer) is AdamW
    assert kind.__name__ == "AdamW"
    for p, q in zip(want.parameters(), got.parameters(), strict=True):
        assert torch.equal(p, q)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(other) is AdamW


def test_a_function_by_its_path() -> None:
    want, _ = trained(lambda params: SGD(params, lr=0.1, momentum=0.9))
    path = importlib.import_module("fuseopt.integrations.classes").make
    got, optimizer = trained(
        lambda params: path(params, cls="torch.optim.SGD", lr=0.1, momentum=0.9)
    )
    assert launches()[-1] == 1
    assert type(optimizer) is SGD
    for p, q in zip(want.parameters(), got.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_is_no_class_of_optimizers() -> None:
    params = [nn.Parameter(torch.ones(3))]
    with pytest.raises(NotAnOptimizer, match=r"fuseopt\.compile\(optimizer\)"):
        compiled(SGD(params))  # type: ignore[arg-type]
    with pytest.raises(NotAnOptimizer):
        make(params, "torch.nn.Linear")
    with pytest.raises(AttributeError):
        make(params, "torch.optim.NoSuch")
    with pytest.raises(ConfigError, match="no_such"):
        compiled(SGD, no_such=1)(params)


# ---------------------------------------------------------------- transformers


@pytest.mark.parametrize("way", ["callback", "clip", "class"])
def test_transformers(way: str) -> None:
    """Its clip before the step, the norm that it logs, its schedule: all stay."""
    needs("transformers", "accelerate")
    from fuseopt.integrations.transformers import Compile
    from tests.wild import transformers_trainer as training

    logged: dict[str, list[float]] = {}

    def run(name: str, change: Callable[[Any], None], **more: Any) -> Trained:
        with tempfile.TemporaryDirectory() as folder:
            more = {"logging_steps": 1, "max_grad_norm": 0.5, **more}
            trainer = training.trainer_of(in_eager, Path(folder), **more)
            change(trainer)
            trainer.train()
            told = [x for x in trainer.state.log_history if "grad_norm" in x]
            logged[name] = [(x["grad_norm"], x["learning_rate"]) for x in told]
            return training.trained_by(trainer)

    def changed(trainer: Any) -> None:
        if way == "class":
            # before the trainer makes its optimizer
            trainer.optimizer = None
            options = {"lr": trainer.args.learning_rate, "betas": (0.9, 0.999)}
            options["eps"] = 1e-8
            trainer.optimizer_cls_and_kwargs = (compiled(AdamW), options)
            trainer.create_optimizer()
        else:
            trainer.add_callback(Compile(clip_for=trainer if way == "clip" else None))

    eager = run("eager", lambda trainer: None)
    got = run("compiled", changed)
    same(eager, got)
    assert logged["eager"] == logged["compiled"]
    assert len(logged["eager"]) == STEPS
    # the clip is two launches, of which one is the norm
    assert sum(launches()) == (3 if way == "clip" else 1)


# ---------------------------------------------------------------- accelerate


def test_accelerate() -> None:
    needs("accelerate")
    from fuseopt.integrations.accelerate import clip_by, compile_prepared
    from tests.wild.accelerate_loop import Loop

    norms: dict[str, list[float]] = {"eager": [], "compiled": []}

    def run(name: str) -> Trained:
        loop = Loop(in_eager)
        if name == "compiled":
            clip_by(loop.accelerator)
            assert compile_prepared(loop.optimizer) is loop.optimizer.optimizer
        clip = loop.accelerator.clip_grad_norm_

        def noted(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            norms[name].append(float(norm))
            return norm

        loop.accelerator.clip_grad_norm_ = noted
        loop.train(0, STEPS)
        return loop.trained()

    same(run("eager"), run("compiled"))
    assert norms["eager"] == norms["compiled"] != []
    assert sum(launches()) == 3


def test_accelerate_with_a_scaler_is_refused() -> None:
    """Its wrapper has taken the plain step already, and would call that."""
    needs("accelerate")
    from accelerate.optimizer import AcceleratedOptimizer

    from fuseopt.integrations.accelerate import compile_prepared

    plain = SGD([nn.Parameter(torch.ones(3))])
    scaler = torch.amp.GradScaler("cpu")
    wrapped = AcceleratedOptimizer(plain, device_placement=False, scaler=scaler)
    with pytest.raises(UnsupportedInput, match=r"before accelerator\.prepare"):
        compile_prepared(wrapped)


# ---------------------------------------------------------------- lightning


def test_lightning() -> None:
    """Clip, schedule and closure stay the trainer's."""
    needs("lightning")
    from fuseopt.integrations.lightning import Compile
    from tests.wild import lightning_automatic as training

    def run(callbacks: list[Any]) -> Trained:
        seed_all()
        module, data = training.Regression(in_eager), training.batches()
        with tempfile.TemporaryDirectory() as folder:
            trainer = training.trainer_of(
                folder,
                max_steps=STEPS,
                gradient_clip_val=1.0,
                enable_checkpointing=False,
                callbacks=callbacks,
            )
            trainer.fit(module, data)
        return Trained(training.tensors_of(module), list(trainer.optimizers))

    same(run([]), run([Compile(fallback="error")]))
    assert launches() == [1]


# ---------------------------------------------------------------- timm


@pytest.mark.parametrize("name", ["adamw", "lion", "lookahead_sgd"])
def test_timm(name: str) -> None:
    """Its groups, of which one does not decay, and its wrapper around an optimizer."""
    needs("timm")
    with stand_ins():
        from timm.optim import create_optimizer_v2 as plain

        from fuseopt.integrations.timm import create_optimizer_v2 as one_line

    def run(create: Any) -> Trained:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        optimizer = create(model, opt=name, lr=0.01, weight_decay=0.05)
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
        tensors = {k: v.clone() for k, v in model.state_dict().items()}
        return Trained(tensors, [getattr(optimizer, "_base_optimizer", optimizer)])

    same(run(plain), run(one_line))
    # state that the first step makes is another graph for some
    assert set(launches()) == {1}


# ---------------------------------------------------------------- ultralytics


@pytest.mark.parametrize("name", ["SGD", "AdamW", "MuSGD"])
def test_ultralytics(name: str, tmp_path: Path) -> None:
    """Its clip, warmup and average stay; its scaler calls the step."""
    needs("ultralytics")
    from fuseopt.integrations.ultralytics import Compile
    from tests.wild import ultralytics_yolo as training

    def run(folder: str, change: Any) -> tuple[Trained, list[str]]:
        seed_all()
        trainer = training.trainer_of(tmp_path / folder, change, optimizer=name)
        trained = training.train_it(trainer)
        return trained, trainer.csv.read_text().splitlines()

    want, rows = run("eager", in_eager)
    kept = pickle.loads(pickle.dumps(Compile(fallback="error")))
    got, mine = run("compiled", kept)
    same(want, got)
    assert launches()[-1] == {"SGD": 1, "AdamW": 1, "MuSGD": 6}[name]
    # the losses and rates that it logs, without the column of times
    assert [x.split(",")[2:] for x in rows] == [x.split(",")[2:] for x in mine]
    assert len(rows) == training.EPOCHS + 1


# ---------------------------------------------------------------- TorchRL


def test_torchrl() -> None:
    """Without CUDA the learner's update runs as it is; see also test_torchrl.py."""
    needs("torchrl")
    from tensordict.nn import CudaGraphModule

    from fuseopt.integrations.torchrl import CapturedLearner
    from tests.wild import torchrl_ppo as training

    def run(kind: Any) -> Trained:
        loop = training.Loop(in_eager, kind)
        loop.train_until(STEPS)
        return loop.trained()

    def captured(update: Any, **keys: Any) -> CapturedLearner:
        optimizer = update.__self__.optimizer
        return CapturedLearner(update, optimizers=[optimizer], **keys)

    same(run(CudaGraphModule), run(captured))
    assert launches() == [1]


# ---------------------------------------------------------------- torchtitan


def test_torchtitan() -> None:
    """Its container: hooks before a step run, checkpoints have the same names."""
    needs("torchtitan")
    pytest.importorskip("spmd_types", reason="torchtitan lacks spmd_types")
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    from fuseopt.integrations.torchtitan import CompiledOptimizers

    seen: list[int] = []

    def run(kind: Any) -> tuple[Trained, dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        groups = [
            ParamGroupConfig(
                pattern=r"\.bias$",
                optimizer_name="AdamW",
                optimizer_kwargs={"lr": 0.01, "weight_decay": 0.0},
            ),
            ParamGroupConfig(
                pattern=".*",
                optimizer_name="AdamW",
                optimizer_kwargs={"lr": 0.01, "weight_decay": 0.1},
            ),
        ]
        config = kind.Config(param_groups=groups, implementation="foreach")
        made = config.build(model_parts=[model])
        assert type(made) is kind
        made.optimizers[0].register_step_pre_hook(lambda *_: seen.append(1))
        for _ in range(8):
            made.zero_grad()
            model(torch.randn(6, 8)).square().mean().backward()
            made.step()
        tensors = {k: v.clone() for k, v in model.state_dict().items()}
        return Trained(tensors, [*made.optimizers]), made.state_dict()

    want, saved = run(OptimizersContainer)
    got, mine = run(CompiledOptimizers)
    same(want, got)
    assert launches() == [1]
    assert len(seen) == 16
    assert saved.keys() == mine.keys()
