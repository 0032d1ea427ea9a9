"""Train a small GPT-2 twice, side by side: eager's step, and the compiled step.

    python -m demo.train_gpt2

In: the text in demo/data. Out: the proof, step by step, that the two runs are the same
bits; the milliseconds of an optimizer step; a picture, and the kernel, in demo/out.
Only the step of the optimizer is compiled; the model runs in eager in both runs. Then,
over the same parameters, an optimizer that no one wrote a kernel for, and the tail
around it: again the same bits, and the milliseconds.
"""

import argparse
import copy
import logging
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import fuseopt
from bench.interleave import Seconds, interleave
from demo.own import OWN, Stepped
from demo.picture import draw
from demo.reference import (
    accepts,
    difference,
    eager_optimizer,
    first_difference,
    make_optimizer,
    tensors_held,
)

HERE = Path(__file__).parent
TEXT = HERE / "data" / "pride_and_prejudice.txt"
CONTEXT = 64
BATCH = 16
LEARNING_RATES = {"SGD": 0.1, "ASGD": 0.1, "Adadelta": 1.0, "Adagrad": 1e-2}


@dataclass(frozen=True)
class Run:
    """One training run: a model, its optimizer and schedule, and how it steps."""

    model: GPT2LMHeadModel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    step: Callable[[], object]
    losses: list[float] = field(default_factory=list)

    def train_on(self, batch: Tensor) -> None:
        """Do one training step on a batch of token ids."""
        self.optimizer.zero_grad()
        logits = self.model(batch).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        # Without it, a step of this small model now and then leaps out of its valley.
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.step()
        self.schedule.step()
        self.losses.append(loss.item())


def main() -> None:
    """Train, prove, time, draw, and say where everything lies."""
    options = parse_options()
    console = Console()
    # Dynamo warns that it leaves out the profiler's marks; that is no news here.
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    make_deterministic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = text_batches(TEXT.read_text(), options.steps, device)
    model = build_model(device)

    eager = eager_run(model, options)
    compiled = compiled_run(copy.deepcopy(model), options)
    with progress_bar(console) as progress:
        train_in_lockstep(eager, compiled, batches, options.steps, progress)
    params, state = tensors_held(compiled.optimizer)
    console.print(
        f"loss {eager.losses[0]:.3f} -> {eager.losses[-1]:.3f} in {options.steps} "
        f"steps. After every step, all {params} parameters and {state} state tensors "
        f"were compared: [bold green]the two runs are the same bits[/]."
    )

    races = {}
    with progress_bar(console) as progress:
        races[f"{options.optimizer} step"] = time_steps(compiled, options, progress)
        if options.backend == "fuseopt":
            races |= own_races([*model.parameters()], options, progress)
    for what, seconds in races.items():
        console.print(table_of(what, seconds, device))

    picture = options.out / f"train_gpt2_{options.optimizer}.png"
    draw(
        picture,
        f"GPT-2, {params} tensors, {options.optimizer}, {device.type}",
        {"eager": eager.losses, f"compiled ({options.backend})": compiled.losses},
        {
            what: {name: 1e3 * statistics.median(x) for name, x in seconds.items()}
            for what, seconds in races.items()
        },
    )
    console.print(f"picture: {picture}", soft_wrap=True)
    for line in kernel_lines():
        console.print(line, soft_wrap=True)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    names = sorted(
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and name != "Optimizer" and accepts(name, "foreach")
    )
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="training steps (150)")
    parser.add_argument("--optimizer", default="AdamW", choices=names, metavar="NAME")
    parser.add_argument("--lr", type=float, help="highest lr (one per optimizer)")
    parser.add_argument("--quick", action="store_true", help="15 steps, short timing")
    parser.add_argument(
        "--backend", default="fuseopt", help="torch.compile's backend (fuseopt)"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out", help="(demo/out)")
    options = parser.parse_args()
    options.steps = options.steps or (15 if options.quick else 150)
    options.lr = options.lr or LEARNING_RATES.get(options.optimizer, 2e-3)
    return options


def make_deterministic() -> None:
    """Make the forward and backward passes repeat bit for bit, on a GPU as well.

    The proof is about the optimizer; two eager models must not differ by themselves.
    """
    torch.manual_seed(0)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def text_batches(text: str, count: int, device: torch.device) -> Iterator[Tensor]:
    """Yield batches of token ids, [BATCH, CONTEXT]; every byte is a token."""
    tokens = torch.tensor(list(text.encode()), device=device)
    random = torch.Generator().manual_seed(0)
    for _ in range(count):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=random)
        yield torch.stack([tokens[start : start + CONTEXT] for start in starts])


def build_model(device: torch.device) -> GPT2LMHeadModel:
    """Return a GPT-2 of four layers with fresh weights."""
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=256,
        n_layer=4,
        n_head=4,
        # Dropout would draw other numbers in each of the two runs.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config).to(device).train()


def eager_run(model: GPT2LMHeadModel, options: argparse.Namespace) -> Run:
    """Return the reference: the foreach optimizer, stepped by eager."""
    optimizer = eager_optimizer(options.optimizer, model.parameters(), options.lr)
    schedule = warm_up_and_cosine(optimizer, options.steps)
    return Run(model, optimizer, schedule, optimizer.step)


def compiled_run(model: GPT2LMHeadModel, options: argparse.Namespace) -> Run:
    """Return the run whose optimizer step is compiled."""
    optimizer = make_optimizer(
        options.optimizer, model.parameters(), options.lr, foreach=True
    )
    schedule = warm_up_and_cosine(optimizer, options.steps)
    dump = {"dump_dir": str(options.out / "kernels")}
    step = torch.compile(
        optimizer.step,
        backend=options.backend,
        # Another backend would not know this option.
        options=dump if options.backend == "fuseopt" else None,
    )
    return Run(model, optimizer, schedule, step)


def warm_up_and_cosine(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule with a new float lr at every step."""
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_in_lockstep(
    eager: Run,
    compiled: Run,
    batches: Iterator[Tensor],
    steps: int,
    progress: Progress,
) -> None:
    """Train both runs batch by batch; leave the program where they first differ."""
    task = progress.add_task("training", total=steps, note="compiling the step")
    for number, batch in enumerate(batches, start=1):
        eager.train_on(batch)
        compiled.train_on(batch)
        words = first_difference(
            eager.model.named_parameters(),
            eager.optimizer,
            compiled.model.parameters(),
            compiled.optimizer,
        )
        if words is not None:
            progress.stop()
            sys.exit(f"the two runs differ after step {number}: {words}")
        progress.update(task, advance=1, note=f"loss {eager.losses[-1]:.3f}, same bits")


def time_steps(run: Run, options: argparse.Namespace, progress: Progress) -> Seconds:
    """Return the seconds of each contender's step on the trained model, in turns."""
    contenders: dict[str, Callable[[], object]] = {
        "eager foreach": copy_of(run, options, foreach=True).step
    }
    if accepts(options.optimizer, "fused"):
        contenders["torch fused=True"] = copy_of(run, options, fused=True).step
    else:
        progress.console.print(f"torch has no fused=True for {options.optimizer}")
    contenders[options.backend] = run.step

    rounds = 20 if options.quick else 200
    task = progress.add_task("timing", total=rounds, note="steps in turns")
    for step in contenders.values():
        for _ in range(3):
            step()
    return interleave(contenders, rounds, after_round=lambda: progress.advance(task))


def own_races(
    like: list[torch.nn.Parameter], options: argparse.Namespace, progress: Progress
) -> dict[str, Seconds]:
    """Return the seconds of an optimizer without a kernel, and of the tail around it.

    Leave the program where a compiled one has other bits than eager.
    """
    races: dict[str, Seconds] = {}
    dump = {"dump_dir": str(options.out / "kernels"), "fallback": "error"}
    for what, tail in ((OWN, False), (f"{OWN}, and its tail", True)):
        eager, compiled = Stepped(like), Stepped(like)
        if tail:
            calls = {
                "eager": eager.tail_in_eager,
                "fuseopt": compiled.tail_in_one(**dump),
            }
        else:
            fuseopt.compile(compiled.optimizer, **dump)
            calls = {"eager": eager.optimizer.step, "fuseopt": compiled.optimizer.step}
        for seed in range(5):
            for run, call in zip((eager, compiled), calls.values(), strict=True):
                run.draw(seed)
                call()
            for number, pair in enumerate(
                zip(eager.held(), compiled.held(), strict=True)
            ):
                if words := difference(f"tensor {number}", *pair):
                    progress.stop()
                    sys.exit(f"{what}, call {seed + 1}: {words}")

        rounds = 20 if options.quick else 200
        task = progress.add_task("timing", total=rounds, note=f"{what}, same bits")
        races[what] = {name: [] for name in calls}
        for _ in range(rounds):
            eager.give()
            compiled.give()
            for name, taken in interleave(calls, 1).items():
                races[what][name] += taken
            progress.advance(task)
    return races


def copy_of(
    run: Run, options: argparse.Namespace, **flags: bool
) -> torch.optim.Optimizer:
    """Return an optimizer on copies of the run's parameters and their gradients."""
    params = [param.detach().clone() for param in run.model.parameters()]
    for mine, theirs in zip(params, run.model.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    return make_optimizer(options.optimizer, params, options.lr, **flags)


def progress_bar(console: Console) -> Progress:
    """Return a bar that counts, tells the time and has room for a note."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Elapsed(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def table_of(what: str, seconds: Seconds, device: torch.device) -> Table:
    """Return the table of times, with what each is relative to the first."""
    table = Table("who", "median ms", "min ms", "times faster")
    table.title = f"{what} on {device.type}, in turns"
    first, *_ = (statistics.median(taken) for taken in seconds.values())
    for name, taken in seconds.items():
        median = statistics.median(taken)
        table.add_row(
            name,
            f"{1e3 * median:.3f}",
            f"{1e3 * min(taken):.3f}",
            f"{first / median:.2f}",
        )
    return table


def kernel_lines() -> Iterator[str]:
    """Yield what was compiled, and the files where its kernels can be read."""
    reports = fuseopt.reports()
    if not reports:
        yield "fuseopt compiled nothing; TORCH_LOGS=graph_breaks says why"
    for number, report in enumerate(reports, start=1):
        yield (
            f"graph {number} of {len(reports)}: {report.launches} launch(es) a step, "
            f"{report.backend_seconds:.2f} s in the backend"
        )
        for kernel in report.kernels:
            yield f"  kernel: {kernel.path or 'not written'}"


if __name__ == "__main__":
    main()
