"""ultralytics: a small YOLO learns to find rectangles, with warmup, clip and average.

Nothing is validated, which torchvision would do.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of
from tests.wild.without_torchvision import stand_ins

# its settings are written to a folder, and packages that it lacks are not installed
os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())
os.environ.setdefault("YOLO_AUTOINSTALL", "false")
os.environ.setdefault("YOLO_OFFLINE", "true")
with stand_ins():
    from ultralytics.models.yolo.detect import DetectionTrainer
    from ultralytics.utils import LOGGER

LOGGER.setLevel("ERROR")
EPOCHS, IMAGES, SIZE = 5, 16, 32
BATCH = IMAGES * EPOCHS // STEPS
MODEL = """
nc: 2
backbone:
- [-1, 1, Conv, [8, 3, 2]]
- [-1, 1, Conv, [16, 3, 2]]
- [-1, 1, C2f, [16, True]]
- [-1, 1, Conv, [16, 3, 2]]
head:
- [[2, 3], 1, Detect, [nc]]
"""
DATA = """
path: {folder}
train: images
val: images
names: [flat, tall]
"""
OPTIONS = {
    "epochs": EPOCHS,
    "batch": BATCH,
    "nbs": BATCH,
    "imgsz": SIZE,
    "optimizer": "SGD",
    "warmup_epochs": 1,
    "device": "cpu",
    "workers": 0,
    "seed": 0,
    "amp": False,
    "plots": False,
    "val": False,
    "pretrained": False,
    "exist_ok": True,
    "verbose": False,
}


class Trainer(DetectionTrainer):  # type: ignore[misc]
    """Without a judgement of what was learnt."""

    def validate(self) -> tuple[dict[str, float], float]:
        return {}, 0.0

    def final_eval(self) -> None:
        pass


def data(folder: Path) -> None:
    """Images of one rectangle each, with its place, and the model's description."""
    numbers = numpy.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    for k in range(IMAGES):
        image = numbers.integers(0, 60, (SIZE, SIZE, 3), numpy.uint8)
        kind = k % 2
        width, height = ((16, 8), (8, 16))[kind]
        x, y = numbers.integers(0, (SIZE - width, SIZE - height))
        image[y : y + height, x : x + width] = 200
        cv2.imwrite(str(folder / "images" / f"{k}.png"), image)
        place = (x + width / 2, y + height / 2, width, height)
        words = [str(kind), *(f"{value / SIZE:.6f}" for value in place)]
        (folder / "labels" / f"{k}.txt").write_text(" ".join(words))
    (folder / "model.yaml").write_text(MODEL)
    (folder / "data.yaml").write_text(DATA.format(folder=folder))


def trainer_of(folder: Path, change: Callable[[Any], None], **more: Any) -> Trainer:
    """A trainer over the data of a folder; `change`: called when training begins."""
    if not (folder / "data.yaml").exists():
        data(folder)
    files = {"model": folder / "model.yaml", "data": folder / "data.yaml"}
    given = {**{k: str(v) for k, v in files.items()}, **OPTIONS, **more}
    with stand_ins():
        trainer = Trainer(overrides={**given, "project": str(folder), "name": "run"})
    trainer.add_callback("on_train_start", change)
    return trainer


def train_it(trainer: Trainer) -> Trained:
    with stand_ins():
        trainer.train()
    tensors = tensors_of(trainer.model, trainer.ema.ema)
    return Trained(tensors, [trainer.optimizer])


def line(compile: Compile) -> Callable[[Any], None]:
    """What a user adds as a callback; the optimizer is there when training begins."""
    return lambda trainer: compile(trainer.optimizer)


def train(compile: Compile) -> Trained:
    """All epochs."""
    seed_all()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        return train_it(trainer_of(where, line(compile)))


def resume(compile: Compile, folder: Path) -> Trained:
    """Two epochs, and the others by another trainer, from the checkpoint of the first.

    The checkpoint has the average and the optimizer's state in float16, so what was
    resumed differs from what was not.
    """

    def stop(trainer: Any) -> None:
        trainer.stop = trainer.epoch == 1

    seed_all()
    first = trainer_of(folder, line(compile))
    first.add_callback("on_fit_epoch_end", stop)
    train_it(first)
    seed_all(1)
    second = trainer_of(folder, line(compile), resume=str(first.last))
    assert second.args.epochs == EPOCHS
    return train_it(second)
