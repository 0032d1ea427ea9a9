"""The Trainer of transformers: python examples/transformers_trainer.py

Its optimizer, with the groups and the options that `TrainingArguments` ask for, is made
by `create_optimizer`, and used by `train` if it is there.
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fuseopt

torch.manual_seed(0)
size = {"vocab_size": 64, "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
rows = (torch.randint(64, (80, 1)) + torch.arange(16)) % 64  # they count upwards
data = [{"input_ids": row, "labels": row} for row in rows]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=20, learning_rate=1e-2, weight_decay=0.1, use_cpu=True,
        report_to="none", save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    fuseopt.compile(trainer.create_optimizer())  # the one line
    trainer.train()

(report,) = fuseopt.reports()
print(f"launches of a step: {report.launches}, for {report.lanes} parameters")
