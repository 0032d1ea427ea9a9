"""The Trainer of transformers: its own optimizer, schedule, clip and checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.wild.trained import STEPS, Compile, Trained, seed_all, tensors_of

VOCABULARY, CONTEXT = 32, 16


def model_of() -> GPT2LMHeadModel:
    """A GPT-2 with two layers, from its configuration alone."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def texts() -> list[dict[str, torch.Tensor]]:
    """Sequences that count upwards, each from a number of its own."""
    rows = torch.randint(VOCABULARY, (64, 1)) + torch.arange(CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows % VOCABULARY]


def trainer_of(compile: Compile, folder: Path, **more: Any) -> Trainer:
    """A trainer that saves what it does in a folder."""
    seed_all()
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        # torch's fused kernel, which is the default, has other bits than its eager one
        "optim": "adamw_torch",
        "use_cpu": True,
        "save_strategy": "steps",
        "save_steps": STEPS // 2,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **more,
    }
    model, data = model_of(), texts()
    trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=data)
    compile(trainer.create_optimizer())
    return trainer


def trained_by(trainer: Trainer) -> Trained:
    """What a trainer has trained; the optimizer is in a wrapper of accelerate's."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert trainer.state.global_step == STEPS
    return Trained(tensors_of(trainer.model), [optimizer])


def train(compile: Compile, **more: Any) -> Trained:
    """Train from the first step to the last."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(compile, Path(folder), **more)
        trainer.train()
        return trained_by(trainer)


def resume(compile: Compile, folder: Path) -> Trained:
    """The same, from the checkpoint that a first trainer has left half way."""
    trainer_of(compile, folder).train()
    trainer = trainer_of(compile, folder)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
    return trained_by(trainer)
