"""In: the results files. Out: docs/benchmarks.md's figures, README's table, pictures.

    python -m bench report

What stands outside the marks of a page is written by hand, and stays. All within comes
from the results files alone, so that a test can hold the two against each other.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from bench import tables
from bench.pictures import PICTURES, draw
from bench.reading import MOVED, NAMES, OWN, Reading, Step, geomean, readings
from bench.results import FOLDER

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "benchmarks.md"
DRAWN = ROOT / "docs" / "pictures"
BLOCK = re.compile(r"(<!-- table:begin -->\n).*?(<!-- table:end -->)", re.DOTALL)
WIDTH = 88


def write(folder: Path = FOLDER) -> list[Path]:
    """Fill the pages and draw the pictures; return the files written."""
    found = readings(folder)
    if not found:
        raise SystemExit(f"no results in {folder}: run `make bench` first")
    pictures = [path for reading in found for path in draw(reading, DRAWN).values()]
    README.write_text(filled(README.read_text(), short(found)))
    PAGE.write_text(filled(PAGE.read_text(), long(found)))
    return [README, PAGE, *pictures]


def filled(text: str, content: str) -> str:
    """Return a page with this between its marks. Raises ValueError without marks."""
    made, count = BLOCK.subn(lambda m: f"{m[1]}{content}{m[2]}", text)
    if count != 1:
        raise ValueError(f"{count} blocks for a table in the page, instead of one")
    return made


def wrapped(text: str) -> str:
    """Return prose in lines of the page's width."""
    return textwrap.fill(text, WIDTH) + "\n"


# ---------------------------------------------------------------- README


def short(found: Sequence[Reading]) -> str:
    """Return README's table: one screen, of the first results file.

    What nobody else does leads: many tensors, optimizers without a kernel written by
    hand, seconds until the first step is done; then what torch has a kernel for.
    """
    reading = found[0]
    every = [
        _most_tensors_row(reading),
        *(_mean_row(reading, x) for x in ("Lion", "Adafactor", "LAMB", "AdEMAMix")),
        *_compile_rows(reading),
        *_tail_rows(reading),
        _model_row(reading, "AdamW"),
        _mean_row(reading, "AdamW"),
        _mean_row(reading, "SGD"),
        *_host_rows(reading),
    ]
    rows = [row for row in every if row]
    header = ["", "eager foreach", "torch `fused=True`", "fuseopt", ""]
    lines = [header, ["---", "---:", "---:", "---:", "---"], *rows]
    made = "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
    told = "Medians; contenders of a row took turns in one run. "
    told += f"{tables.conditions(reading)} Again: `make bench`, then "
    told += "`python -m bench report`. More: [docs/benchmarks.md](docs/benchmarks.md)."
    return f"{made}\n{wrapped(told)}"


def _tail_rows(reading: Reading) -> list[list[str]]:
    """The whole tail of a training step with AdamW, of a model with few elements and
    one with many.
    """
    rows = []
    for model, figures in reading.tails().items():
        if model not in ("resnet50", "gpt2"):
            continue
        ways = figures["contenders"]
        ran = [f"{tables.ms(ways[c]['p50'])} ms" for c in ("foreach", "fused", OWN)]
        told = f"{ways[OWN]['launches']} launches; unscale, clip by the total norm, "
        told += "step, average, zero_grad"
        rows.append([f"tail with AdamW, {model}", *ran, told])
    return rows


def _model_row(reading: Reading, optimizer: str) -> list[str] | None:
    """One model that all know."""
    for x in reading.steps(optimizer, "float32"):
        if x.model == "resnet50" and x.seconds(OWN):
            return _step_row(x, f"{NAMES.get(optimizer, optimizer)} step, ResNet-50")
    return None


def _most_tensors_row(reading: Reading) -> list[str] | None:
    """The model with the most tensors."""
    steps = [x for x in reading.steps("AdamW", "float32") if x.seconds(OWN)]
    if not steps:
        return None
    most = max(steps, key=lambda x: x.figures["tensors"])
    name = f"AdamW step, {most.model}'s {most.figures['tensors']} tensors"
    return _step_row(most, name)


def _step_row(x: Step, name: str) -> list[str]:
    """A step of one model, in milliseconds."""
    launches = x.count(OWN, "launches")
    ran = [f"{tables.ms(x.seconds(c))} ms" for c in ("foreach", "fused", OWN)]
    told = f"{launches} launch{'es' * (launches != 1)}"
    told += f"; a copy of as many bytes: {tables.ms(x.seconds('copy'))} ms"
    return [name, *ran, told]


def _mean_row(reading: Reading, optimizer: str) -> list[str] | None:
    """The geometric mean over all models of an optimizer."""
    steps = [x for x in reading.steps(optimizer, "float32") if x.seconds(OWN)]
    if len(steps) < 2:
        return None
    name = NAMES.get(optimizer, optimizer)
    ours = all(x.seconds("foreach") is None for x in steps)
    eager = geomean(x.times("for-loop" if ours else "foreach") for x in steps)
    told = f"time ÷ fuseopt's, geometric mean of {len(steps)} models"
    if ours:
        told += "; eager is a for-loop"
    else:
        told += f"; slower than torch's on {_slower(steps)}"
    cells = (eager, geomean(x.times("fused") for x in steps), 1.0)
    return [f"{name} step, float32", *(tables.times(c) for c in cells), told]


def _slower(steps: Sequence[Step]) -> int:
    return sum((x.times("fused") or 2.0) < 1 for x in steps)


def _compile_rows(reading: Reading) -> list[list[str]]:
    rows = []
    for params, cold in reading.first("backend", "cold").items():
        if params not in (50, 300, 1000) or "first_step_seconds" not in cold:
            continue
        warm = reading.first("backend", "warm").get(params, {})
        other = reading.first("inductor", "cold").get(params, {})
        told = f"{tables.s(cold['dynamo_seconds'])} s of it are Dynamo's own"
        if "first_step_seconds" in other:
            told = f"Inductor: {tables.s(other['first_step_seconds'])} s; of fuseopt's "
            told += f"{tables.s(cold['dynamo_seconds'])} s are Dynamo's own"
        cell = f"{tables.s(cold['first_step_seconds'])} s cold"
        if "first_step_seconds" in warm:
            cell += f", {tables.s(warm['first_step_seconds'])} s with a warm cache"
        name = f"first step of a for-loop AdamW, {params:,} parameters"
        rows.append([name, "", "", cell, told])
    return rows


def _above(cost: float, floor: float) -> str:
    more = round(cost - floor)
    return f"{more:+} µs" if more else "0 µs"


def _host_rows(reading: Reading) -> list[list[str]]:
    figures = reading.host().get(300)
    if figures is None:
        return []
    contenders = figures["contenders"]
    cost = {n: tables.host_cost(c) for n, c in contenders.items()}
    least = any("host_microseconds_least" in c for c in contenders.values())
    rows = []
    for moved in ("", MOVED):
        own, led, floor = (cost.get(n + moved) for n in ("backend", "fuseopt", "no-op"))
        if own is None or floor is None:
            continue
        told = f"above a backend that does nothing ({floor:.0f} µs)"
        told += ", the least of its turns" * least
        if led is not None:
            told += f"; with `fuseopt.compile` {_above(led, floor)}"
        where = ", gradients elsewhere at each" if moved else ""
        what = f"a call, 300 small parameters{where}"
        rows.append([what, "", "", _above(own, floor), told])
    return rows


# ---------------------------------------------------------------- the page


def long(found: Sequence[Reading]) -> str:
    """Return the figures of docs/benchmarks.md: a part for each results file."""
    return "\n".join(part(reading) for reading in found)


def part(reading: Reading) -> str:
    """Return the sections of one results file; those without figures are left out."""
    e = reading.environment
    title = e.get("gpu", f"{e['processor']}, {e['threads']} threads")
    sections = [
        ("In short", tables.summary, "speed", SHORT),
        *(
            (
                f"{NAMES.get(optimizer, optimizer)}, {dtype}",
                lambda r, o=optimizer, d=dtype: tables.steps(r, o, d),
                "bandwidth" if (optimizer, dtype) == ("AdamW", "float32") else None,
                "",
            )
            for optimizer, dtype in _measured(reading)
        ),
        ("Beside other packages", tables.peers, None, PEERS),
        ("Launches, memory, source", tables.counts, None, COUNTS),
        ("The first step, by model", tables.models_compiled, None, MODELS),
        (
            "The first step, each in a process of its own",
            tables.models_first,
            None,
            EACH,
        ),
        ("The first step, by parameters", tables.first_steps, "compiling", FIRST),
        ("fuseopt's passes, in ms", tables.passes, "first-step", ""),
        ("A call's cost, in microseconds", tables.hosts, None, HOST),
        ("The tail of a training step", tables.tails, "tail", TAIL),
        ("DTensors, in ms", tables.shards, None, SHARDS),
        ("Tails of DTensors, in ms", tables.shard_tails, None, SHARD_TAILS),
        ("Training steps", tables.training, None, TRAINING),
        ("The whole training step as one function", tables.whole_steps, None, WHOLE),
        ("Who did not run", tables.skipped, None, ""),
    ]
    made = [f"## {title}, torch {e['torch']}\n", wrapped(tables.conditions(reading))]
    for heading, make, picture, told in sections:
        content = make(reading)
        if content.count("\n") <= 2:  # a header without rows
            continue
        made.append(f"### {heading}\n")
        if told:
            made.append(wrapped(told))
        made.append(content)
        if picture is not None and PICTURES[picture][1](reading) is not None:
            link = f"pictures/{reading.path.stem}-{picture}.png"
            made.append(f"![{PICTURES[picture][0]}]({link})\n")
    return "\n".join(made)


def _measured(reading: Reading) -> list[tuple[str, str]]:
    return list(dict.fromkeys((x.optimizer, x.dtype) for x in reading.steps()))


SHORT = (
    "Times of the others, divided by fuseopt's of the same case: above 1×, fuseopt is "
    "faster. Geometric means over the models; “at worst” is the model where the "
    "fastest other is best. “Of a copy”: models of more than 20M elements."
)
PEERS = (
    "Geometric means over the models that a package's optimizer stepped; above 1×, "
    "fuseopt is faster. None of them promises eager's bits."
)
COUNTS = (
    "Of eager on a CPU, launches are loops over a tensor. Peak memory is what one step "
    "takes beyond what it began with."
)
MODELS = (
    "From cold caches, in a process that has compiled before. Inductor runs on few "
    "models in the short suite."
)
EACH = (
    "AdamW in the form of lists, from cold caches, without imports: "
    '`fuseopt.compile(opt)`, `torch.compile(opt.step, backend="fuseopt")` and '
    "`torch.compile(opt.step)`, which Inductor compiles. The own share is what is not "
    "Dynamo's."
)
FIRST = (
    "AdamW as torch makes it for the device, over tensors of 8 elements; each figure "
    "from a process of its own, without imports."
)
HOST = (
    "Over tensors of 8 elements, so that their arithmetic takes no time: the least of "
    "its turns, in time of the calling thread; a result from before 2026-11-22 is a "
    "median of time on the clock."
)
TAIL = (
    "AdamW in float32 with a GradScaler, clipping by the total norm, an average of the "
    "weights and `zero_grad` ([tail](tail.md)). In parts: `unscale_`, "
    "`clip_grad_norm_`, the scaler's step, `_foreach_lerp_`, `update`, `zero_grad`. "
    "The copy moves 40 bytes a parameter, the least that a tail must."
)
SHARDS = (
    "AdamW's step and `clip_grad_norm_` of DTensors of 32 x 8 over four processes, of "
    "which only this one exists, so that collectives take no time: what a process "
    "itself pays ([shards](shards.md)). The fastest tenth of the turns of each."
)
SHARD_TAILS = (
    "Of the same DTensors: the clip by the total norm and AdamW's step together (in "
    "eager one after the other, beside Inductor's step too), and LAMB's step, which "
    "has norms of each parameter and four collectives for it."
)
TRAINING = (
    "Forward, backward and tail (clipping by the total norm, step, zero_grad) with "
    "AdamW, the model in eager. The gain is that of a whole step over eager foreach, "
    "which is what the published figures are of; other models, other machines."
)
WHOLE = (
    "`torch.compile(train_step)` against `torch.compile(train_step, "
    'backend="fuseopt")`, which hands forward and backward to Inductor.'
)
