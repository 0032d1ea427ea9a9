"""In: the results files. Out: docs/benchmarks.md's figures, README's table, pictures.

    python -m bench report

What stands outside the marks of a page is written by hand, and stays. All within comes
from the results files alone, so that a test can hold the two against each other.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
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

    First many tensors, then optimizers for which torch has no kernel, then what stands
    around a step, and the first step.
    """
    reading = found[0]
    every = [
        *_adamw_rows(reading),
        *(_step_row(reading, x) for x in ("Lion", "Adafactor", "LAMB", "AdEMAMix")),
        _tail_row(reading),
        _first_row(reading),
    ]
    header = ["median time", "eager", "torch `fused=True`", "Inductor", "fuseopt"]
    lines = [header, ["---", *["---:"] * 4], *(row for row in every if row)]
    made = "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"
    text = "Eager is the foreach form where there is one, else the for-loop. "
    text += "A row's figures were measured alternately, in one process. "
    text += "".join(_mean(reading, x) for x in ("AdamW", "SGD"))
    text += _host(reading)
    where = f"{tables.conditions(reading)} [Benchmarks](docs/benchmarks.md) has all "
    where += "figures and how to measure them again."
    return f"{made}\n{wrapped(text)}\n{wrapped(where)}"


#: The contenders of a row, from left to right.
COLUMNS = ("fused", "inductor", OWN)


def _adamw_rows(reading: Reading) -> Iterator[list[str]]:
    """The model with the most tensors, and one that everybody knows."""
    steps = [x for x in reading.steps("AdamW", "float32") if x.seconds(OWN)]
    for x in sorted(steps, key=lambda x: x.figures["tensors"])[-1:]:
        yield _cells(x)
    for x in steps:
        if x.model == "resnet50":
            yield _cells(x)


def _step_row(reading: Reading, optimizer: str) -> list[str] | None:
    """The model that most contenders stepped; of several, the largest."""
    steps = [x for x in reading.steps(optimizer, "float32") if x.seconds(OWN)]
    if not steps:
        return None
    return _cells(max(steps, key=lambda x: (len(x.others()), x.figures["elements"])))


def _cells(x: Step) -> list[str]:
    """A step of one model, in milliseconds."""
    loop = x.seconds("foreach") is None
    eager = tables.ms(x.seconds("for-loop" if loop else "foreach"))
    name = NAMES.get(x.optimizer, x.optimizer)
    title = f"{name} step, {x.model} ({x.figures['tensors']} tensors)"
    return [title, f"{eager} ms", *(_cell(x, c) for c in COLUMNS)]


def _cell(x: Step, contender: str) -> str:
    seconds = x.seconds(contender)
    if seconds is not None:
        return f"{tables.ms(seconds)} ms"
    why = x.told(contender, "skipped") or ""
    return "no kernel" if why.startswith("torch has no") else "not run"


def _tail_row(reading: Reading) -> list[str] | None:
    """The whole tail of a training step with AdamW, of the largest model."""
    every = reading.tails()
    if not every:
        return None
    model = max(every, key=lambda x: every[x]["elements"])
    ways = every[model]["contenders"]
    eager, fused, own = (
        f"{tables.ms(ways[c]['p50'])} ms" for c in ("foreach", "fused", OWN)
    )
    title = f"unscale, clip, AdamW step, average, zero_grad, {model}"
    return [title, eager, fused, "–", own]


def _first_row(reading: Reading) -> list[str] | None:
    """The first step, from cold caches, of as many parameters as Inductor was given."""
    others = reading.first("inductor", "cold")
    for params, cold in reading.first("backend", "cold").items():
        other = others.get(params, {})
        if "first_step_seconds" in cold and "first_step_seconds" in other:
            seconds = [tables.s(f["first_step_seconds"]) for f in (other, cold)]
            title = f"first AdamW step, {params} parameters, empty caches"
            return [title, "–", "–", *(f"{x} s" for x in seconds)]
    return None


def _mean(reading: Reading, optimizer: str) -> str:
    """A sentence on all models that an optimizer stepped."""
    steps = [x for x in reading.steps(optimizer, "float32") if x.times("fused")]
    if len(steps) < 2:
        return ""
    name = NAMES.get(optimizer, optimizer)
    mean = tables.times(geomean(x.times("fused") for x in steps))
    slower = sum((x.times("fused") or 2.0) < 1 for x in steps)
    return (
        f"{name} in float32, {len(steps)} models: `fused=True` takes {mean} the time "
        f"of fuseopt (geometric mean); fuseopt is slower on {slower}. "
    )


def _host(reading: Reading) -> str:
    """Two sentences on what a call costs the host."""
    figures = reading.host().get(300, {"contenders": {}})
    cost = {n: tables.host_cost(c) for n, c in figures["contenders"].items()}
    text = ""
    for moved, subject in (
        ("", "A call with 300 small parameters takes the host"),
        (MOVED, "With new gradient addresses it takes"),
    ):
        own, floor = (cost.get(name + moved) for name in ("backend", "no-op"))
        if own is None or floor is None:
            continue
        less = round(floor - own)
        compared = f"{abs(less)} µs {'less' if less >= 0 else 'more'}"
        than = "" if moved else " than a no-op backend"
        text += f"{subject} {own:,.0f} µs, {compared}{than}. "
    return text


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
            "The first step, each in a new process",
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
    "A figure is the time of another contender divided by fuseopt's, in the same case. "
    "Above 1×, fuseopt is faster. Figures are geometric means over the models. “At "
    "worst” is the model where the fastest other contender is best. “Of a copy” counts "
    "models of more than 20M elements."
)
PEERS = (
    "Geometric means over the models that a package's optimizer stepped. Above 1×, "
    "fuseopt is faster. None of these packages promises eager's bits."
)
COUNTS = (
    "A launch of eager on a CPU is a loop over a tensor. Peak memory is what one step "
    "takes in addition to the memory at its start."
)
MODELS = (
    "In seconds, from cold caches, in a process that has compiled before. Inductor "
    "runs on few models in the short suite."
)
EACH = (
    "AdamW in the foreach form, from cold caches, without imports. The ways are "
    '`fuseopt.compile(opt)`, `torch.compile(opt.step, backend="fuseopt")` and '
    "`torch.compile(opt.step)`, which Inductor compiles. The own share is all time "
    "except Dynamo's."
)
FIRST = (
    "AdamW as torch makes it for the device, over tensors of 8 elements. Each figure "
    "is from a new process, without imports."
)
HOST = (
    "Tensors have 8 elements, so their arithmetic takes no time. A figure is the "
    "fastest turn, in time of the calling thread. A result from before 2026-11-22 is a "
    "median of wall-clock time."
)
TAIL = (
    "AdamW in float32 with a GradScaler, clipping by the total norm, an average of the "
    "weights and `zero_grad` ([tail](tail.md)). In parts means: `unscale_`, "
    "`clip_grad_norm_`, the scaler's step, `_foreach_lerp_`, `update`, `zero_grad`. "
    "The copy moves 40 bytes a parameter, which is the least that a tail moves."
)
SHARDS = (
    "AdamW's step and `clip_grad_norm_` of DTensors of 32 x 8, in one of four "
    "processes ([shards](shards.md)). The other three do not exist, so collectives "
    "take no time. A figure is the fastest tenth of the turns."
)
SHARD_TAILS = (
    "The same DTensors: the clip by the total norm and AdamW's step together, and "
    "LAMB's step. The other contenders clip first and then step. LAMB has norms of "
    "each parameter, with four collectives."
)
TRAINING = (
    "Forward, backward and tail (clipping by the total norm, step, zero_grad) with "
    "AdamW; the model runs in eager. The gain is that of a whole step over eager "
    "foreach, as in the published figures. Those are of other models and machines."
)
WHOLE = (
    "`torch.compile(train_step)` against `torch.compile(train_step, "
    'backend="fuseopt")`, which hands forward and backward to Inductor.'
)
