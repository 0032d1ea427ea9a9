"""The trainings: their files, the packages they need, and what is expected of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import fuseopt
from tests.wild.trained import STEPS, Compile, Trained, seed_all

HERE = Path(__file__).parent
#: The name by which a package is installed, where it is not that of its module.
INSTALLED_AS = {
    "pyro": "pyro-ppl",
    "scvi": "scvi-tools",
    "stable_baselines3": "stable-baselines3",
}


@dataclass(frozen=True)
class Training:
    """One training.

    `file`: a module of tests/wild; `function`: what of it trains, with `more` given.
    `package`: the module that it needs, "" for none; `besides`: others. `launches`: of
    all steps together, in the whole training. `lines`: so many lines does a user
    change. `compiled`: names what of the file is the changed line; "" for
    `fuseopt.compile`. `externs`: it has products of matrices, which are calls of ATen.
    `resumed`: "whole" where a training that is saved and resumed ends with the bits of
    one that is not; "halves" where even in eager it does not, for what `why` says; ""
    where another training has the same checkpoint.
    """

    name: str
    file: str
    package: str
    besides: tuple[str, ...] = ()
    launches: int = STEPS
    lines: int = 1
    function: str = "train"
    more: Mapping[str, Any] = field(default_factory=dict)
    compiled: str = ""
    externs: bool = False
    resumed: str = "whole"
    why: str = ""

    @property
    def missing(self) -> str:
        """Why it cannot run here; "" where it can."""
        for package in (self.package, *self.besides):
            if package and importlib.util.find_spec(package) is None:
                name = INSTALLED_AS.get(package, package)
                return f"{name} is not installed (make wild)"
        return ""

    @property
    def installed_as(self) -> str:
        return INSTALLED_AS.get(self.package, self.package)

    @property
    def version(self) -> str:
        return version(self.installed_as) if self.package else ""

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"tests.wild.{self.file}")

    def line(self) -> Compile:
        """What a user puts into the training."""
        return getattr(self.module, self.compiled) if self.compiled else fuseopt.compile

    def train(self, compile: Compile) -> Trained:
        """Run it from the first step to the last."""
        seed_all()
        return partial(getattr(self.module, self.function), **self.more)(compile)

    def resume(self, compile: Compile, folder: Path) -> Trained:
        """Run it with a checkpoint half way."""
        seed_all()
        return self.module.resume(compile, folder)

    def changed_lines(self) -> int:
        """Places of the file that hand something to `compile`; of a function that is
        the change itself, its statements.
        """
        text = (HERE / f"{self.file}.py").read_text(encoding="utf-8")
        nodes = [*ast.walk(ast.parse(text))]
        if self.compiled:
            (change,) = [
                node
                for node in nodes
                if isinstance(node, ast.FunctionDef) and node.name == self.compiled
            ]
            return sum(not _is_text(statement) for statement in change.body)
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        return sum(isinstance(f, ast.Name) and f.id == "compile" for f in calls)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


#: An archive holds the agent, and not the world that it moves in.
WORLD = "the package saves no environment, which begins anew in eager as well"
#: The first call makes the state, in eager; all others are two launches.
TAIL = 2 * (STEPS - 1)

TRAININGS = [
    Training("nanoGPT's loop", "nanogpt", ""),
    Training(
        "transformers, `Trainer`",
        "transformers_trainer",
        "transformers",
        besides=("accelerate",),
    ),
    Training("accelerate", "accelerate_loop", "accelerate"),
    Training("lightning, `configure_optimizers`", "lightning_automatic", "lightning"),
    Training(
        "lightning, a GAN by hand",
        "lightning_gan",
        "lightning",
        launches=2 * STEPS,
        lines=2,
    ),
    Training("lightning, `Fabric`", "lightning_fabric", "lightning"),
    Training("timm, AdamW, `ModelEmaV3`", "timm_vit", "timm"),
    *(
        Training(
            f"timm, {name}",
            "timm_vit",
            "timm",
            launches=launches * STEPS,
            more={"name": name},
            externs=name == "muon",
            resumed="",
        )
        for name, launches in {
            "adafactorbv": 4,
            "adopt": 1,
            "lamb": 3,
            "laprop": 1,
            "lars": 2,
            "lion": 1,
            "madgradw": 1,
            "mars": 2,
            "muon": 4,
            "nadamw": 1,
            "rmsproptf": 1,
            "sgd": 1,
        }.items()
    ),
    Training(
        "timm, AdamW, `ModelEmaV3` in a tail",
        "timm_vit",
        "timm",
        launches=TAIL,
        lines=3,
        function="train_with_tail",
        compiled="put_tail",
        resumed="",
    ),
    Training("diffusers, `EMAModel`", "diffusers_unet", "diffusers"),
    Training(
        "diffusers, `EMAModel` in a tail",
        "diffusers_unet",
        "diffusers",
        launches=TAIL,
        lines=2,
        function="train_with_tail",
        compiled="put_tail",
        resumed="",
    ),
    Training(
        "stable-baselines3, PPO",
        "sb3_ppo",
        "stable_baselines3",
        resumed="halves",
        why=WORLD,
    ),
    Training(
        "stable-baselines3, SAC",
        "sb3_sac",
        "stable_baselines3",
        launches=3 * STEPS,
        lines=3,
        resumed="halves",
        why=WORLD,
    ),
    Training(
        "scvi-tools, `SCVI`",
        "scvi_model",
        "scvi",
        resumed="halves",
        why="the package saves no optimizer, which begins anew in eager as well",
    ),
    Training("pyro, `SVI`", "pyro_svi", "pyro", launches=5 * STEPS),
    Training("skorch", "skorch_net", "skorch"),
    Training("TorchRL, PPO", "torchrl_ppo", "torchrl"),
    Training(
        "torchtitan",
        "torchtitan_parts",
        "torchtitan",
        besides=("spmd_types", "torch_checkpointing", "tyro"),
    ),
    Training(
        "ultralytics, YOLO",
        "ultralytics_yolo",
        "ultralytics",
        resumed="halves",
        why="a checkpoint has the average and the optimizer's state in float16",
    ),
]
