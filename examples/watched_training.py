"""Watch a training: the norms of all parameters from the launches there are anyway.

`stats=True` makes one tensor of numbers, a row for each parameter; reading it is what
waits for a device, so do it every so often. Where they go is a function of three
arguments: a table in the terminal, TensorBoard if it is installed, wandb (offline) if
it is.
"""

import importlib.util
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fuseopt

#: Numbers of one step: of each parameter by its name, of each column by its name.
Numbers = dict[str, dict[str, float]]
Logger = Callable[[int, float, Numbers], None]


def table_logger() -> Logger:
    """Print a table."""

    def log(step: int, norm: float, numbers: Numbers) -> None:
        columns = list(next(iter(numbers.values())))
        table = Table("parameter", *columns, title=f"step {step}, norm {norm:.3g}")
        for name, row in numbers.items():
            table.add_row(name, *(f"{x:.3g}" for x in row.values()))
        Console(width=100).print(table)

    return log


def tensorboard_logger(folder: str) -> Logger:
    """Write scalars, one for each column of each parameter."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(step: int, norm: float, numbers: Numbers) -> None:
        writer.add_scalar("total_norm", norm, step)
        for name, row in numbers.items():
            for column, x in row.items():
                writer.add_scalar(f"{column}/{name}", x, step)

    return log


def wandb_logger(project: str) -> Logger:
    """Log to a run that stays on this machine until `wandb sync`."""
    import wandb

    run = wandb.init(project=project, mode="offline")

    def log(step: int, norm: float, numbers: Numbers) -> None:
        found = {f"{c}/{n}": x for n, row in numbers.items() for c, x in row.items()}
        run.log({"total_norm": norm, **found}, step=step)

    return log


def main() -> None:
    """Train a small network, and tell every fifth step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # clip, step and numbers: two launches at any number of parameters
    given = {"clip_grad_norm": 1.0, "stats": True, "names": model}
    tail = fuseopt.tail(optimizer, **given)  # the one line

    loggers = [table_logger()]
    if importlib.util.find_spec("tensorboard"):
        loggers.append(tensorboard_logger("runs"))
    if importlib.util.find_spec("wandb"):
        loggers.append(wandb_logger("example"))

    for step in range(11):
        x = torch.randn(32, 16)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        done = tail()
        optimizer.zero_grad()
        if step % 5 == 0:
            rows = zip(tail.stats_rows, done.stats.tolist(), strict=True)
            numbers = {
                name: dict(zip(tail.stats_names, row, strict=True))
                for name, row in rows
            }
            for log in loggers:
                log(step, float(done.norm), numbers)

    report = fuseopt.reports()[-1]
    n = len(list(model.parameters()))
    print(f"launches of a step: {report.launches}, for {n} parameters")


if __name__ == "__main__":
    main()
