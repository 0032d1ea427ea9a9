"""In: a results file. Out: tables in Markdown. Slower is shown as slower."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.optimizers import RECIPES
from bench.peers import PEERS
from bench.reading import MOVED, NAMES, OWN, TORCH, Reading, Step, geomean
from bench.results import Figures

NOTHING = "–"
LABELS = {
    "for-loop": "eager for-loop",
    "foreach": "eager foreach",
    "fused": "torch fused",
    "inductor": "Inductor",
    "inductor-graphs": "Inductor, CUDA graphs",
}
#: what PyTorch 2.2's announcement says compiled optimizers bring, end to end
PUBLISHED = (
    ("HuggingFace suite", "+18 %"),
    ("TorchBench suite", "+19 %"),
    ("TIMM suite", "+8 %"),
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return a table; all but its first `texts` columns hold numbers."""
    line = ["---"] * texts + ["---:"] * (len(header) - texts)
    lines = [header, line, *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def ms(seconds: float | None) -> str:
    """Return milliseconds, with three digits."""
    return NOTHING if seconds is None else _digits(1e3 * seconds)


def s(seconds: float | None) -> str:
    """Return seconds, with two digits at least."""
    return NOTHING if seconds is None else _digits(seconds)


def times(ratio: float | None) -> str:
    """Return a ratio: above 1, fuseopt is faster."""
    return NOTHING if ratio is None else f"{ratio:.2f}×"


def percent(part: float | None) -> str:
    """Return a fraction in per cent."""
    return NOTHING if part is None else f"{100 * part:.0f} %"


def _digits(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def conditions(reading: Reading) -> str:
    """Return where, when and with what the figures were measured."""
    e = reading.environment
    where = f"{e['processor']}, {e['threads']} threads, {e['vector_unit']}"
    if "gpu" in e:
        where = f"{e['gpu']} ({where})"
    when = " to ".join(dict.fromkeys((reading.dates[0], reading.dates[-1])))
    told = f"{where}; torch {e['torch']}, triton {e['triton']}, Python {e['python']}"
    told += f"; {e['compiler']}; measured {when}."
    if len(reading.codes) > 1:
        told += f" The rows come from {len(reading.codes)} versions of the code."
    return told


# ---------------------------------------------------------------- steps


def summary(reading: Reading) -> str:
    """One row for each optimizer and dtype: geometric means over its models."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        for optimizer in RECIPES:
            steps = [x for x in reading.steps(optimizer, dtype) if x.seconds(OWN)]
            if not steps:
                continue
            best = [found[1] for x in steps if (found := x.best_other())]
            large = [part for x in steps if x.large and (part := x.of_copy())]
            rows.append(
                [
                    f"{NAMES.get(optimizer, optimizer)}, {dtype}",
                    str(len(steps)),
                    *(times(geomean(x.times(c) for x in steps)) for c in TORCH[:4]),
                    times(geomean(best)),
                    times(min(best, default=None)),
                    percent(geomean(large)),
                    _launches(steps),
                ]
            )
    header = ["step", "models", *(LABELS[c] for c in TORCH[:4])]
    header += ["best other", "at worst", "of a copy", "launches"]
    return table(header, rows)


def _launches(steps: Sequence[Step]) -> str:
    counts = sorted({x.count(OWN, "launches") for x in steps} - {None})  # type: ignore[type-var]
    return ", ".join(str(count) for count in counts)


def steps(reading: Reading, optimizer: str, dtype: str) -> str:
    """One row for each model: milliseconds of each contender."""
    found = reading.steps(optimizer, dtype)
    shown = [
        name
        for name in _contenders(found)
        if name != "copy" and any(x.seconds(name) for x in found)
    ]
    rows = []
    for x in found:
        best = x.best_other()
        rows.append(
            [
                x.model,
                f"{x.figures['tensors']:,}",
                f"{x.figures['elements'] / 1e6:.1f}M",
                *(ms(x.seconds(name)) for name in shown),
                times(best[1]) if best else NOTHING,
                percent(x.of_copy()),
            ]
        )
    header = ["ms of a step", "tensors", "elements"]
    header += [*(LABELS.get(name, name) for name in shown), "best other ÷ fuseopt"]
    return table([*header, "of a copy"], rows)


def peers(reading: Reading) -> str:
    """Optimizers of other packages: geometric means over the models they stepped."""
    rows = []
    for name in PEERS:
        for optimizer in RECIPES:
            for dtype in ("float32", "bfloat16"):
                found = reading.steps(optimizer, dtype)
                ratios = [ratio for x in found if (ratio := x.times(name))]
                if not ratios:
                    continue
                version = next(v for x in found if (v := x.told(name, "version")))
                rows.append(
                    [
                        f"{name} {version}",
                        f"{NAMES.get(optimizer, optimizer)}, {dtype}",
                        str(len(ratios)),
                        times(geomean(ratios)),
                        times(min(ratios)),
                    ]
                )
    header = ["package", "step", "models", "its time ÷ fuseopt's", "at worst"]
    return table(header, rows, 2)


def _count(number: float | None) -> str:
    return NOTHING if number is None else f"{number:,}"


def _contenders(found: Sequence[Step]) -> list[str]:
    return list(dict.fromkeys(name for x in found for name in x.figures["contenders"]))


def counts(reading: Reading) -> str:
    """Launches, memory and source, by optimizer, for the model with most tensors."""
    rows = []
    for optimizer in RECIPES:
        found = [x for x in reading.steps(optimizer, "float32") if x.seconds(OWN)]
        if not found:
            continue
        x = max(found, key=lambda x: (x.seconds("inductor") or 0, x.figures["tensors"]))
        for name in (*TORCH, OWN):
            if x.seconds(name) is None:
                continue
            peak = x.count(name, "peak_bytes")
            source = x.count(name, "source_bytes")
            rows.append(
                [
                    f"{NAMES.get(optimizer, optimizer)}, {x.model}",
                    LABELS.get(name, name),
                    _count(x.count(name, "launches")),
                    NOTHING if peak is None else f"{peak / 2**20:.1f}",
                    _count(source),
                ]
            )
    header = ["step", "by", "launches", "peak memory, MiB", "bytes of source"]
    return table(header, rows, 2)


# ---------------------------------------------------------------- compiling


def models_compiled(reading: Reading) -> str:
    """Seconds of the first AdamW step of each model, beside Inductor."""
    rows = []
    for x in reading.steps("AdamW", "float32"):
        own, other = (x.count(c, "first_step_seconds") for c in (OWN, "inductor"))
        if own is None:
            continue
        told = x.figures["contenders"].get("inductor", {}).get("skipped", NOTHING)
        rows.append(
            [
                x.model,
                str(x.figures["tensors"]),
                s(x.count(OWN, "backend_seconds")),
                s(own),
                told if other is None and told.startswith("not fin") else s(other),
                times(other / own if other else None),
            ]
        )
    header = [
        "model",
        "tensors",
        "fuseopt's own share",
        "fuseopt, all",
        "Inductor, all",
    ]
    return table([*header, "Inductor ÷ fuseopt"], rows)


def models_first(reading: Reading) -> str:
    """Cold first steps of models, both ways and Inductor, each in its own process."""
    rows = []
    for model, ways in reading.first_of_models().items():
        other = ways.get("inductor", {})
        row = [model, str(next(iter(ways.values()))["tensors"])]
        row.append(other.get("skipped", s(other.get("first_step_seconds"))))
        for way in ("fuseopt.compile", "backend"):
            own = ways.get(way, {})
            seconds = own.get("first_step_seconds")
            row += [own.get("skipped", s(seconds)), s(own.get("backend_seconds"))]
            known = seconds and other.get("first_step_seconds")
            row.append(times(known / seconds if known else None))
        rows.append(row)
    header = ["model", "tensors", "Inductor, s", "fuseopt.compile, s", "own share"]
    header += ["Inductor ÷ it", 'backend="fuseopt", s', "own share", "Inductor ÷ it"]
    return table(header, rows)


def first_steps(reading: Reading) -> str:
    """First AdamW step by number of parameters, each in a process of its own."""
    rows = []
    for way in ("fuseopt.compile", "backend", "inductor"):
        cold, warm = (reading.first(way, cache) for cache in ("cold", "warm"))
        for params, figures in cold.items():
            again = warm.get(params, {})
            rows.append(
                [
                    {"backend": 'backend="fuseopt"'}.get(way, LABELS.get(way, way)),
                    f"{params:,}",
                    figures.get("skipped", s(figures.get("first_step_seconds"))),
                    again.get("skipped", s(again.get("first_step_seconds"))),
                    s(figures.get("dynamo_seconds")),
                    s(figures.get("backend_seconds")),
                    s(again.get("backend_seconds")),
                    s(figures.get("build_seconds")),
                    *(
                        NOTHING if way == "inductor" else ms(figures.get(key))
                        for key in ("import_seconds", "late_import_seconds")
                    ),
                ]
            )
    header = ["compiled by", "parameters", "cold, s", "warm, s", "of cold: Dynamo"]
    header += ["fuseopt", "fuseopt, warm", "kernel build"]
    header += ["importing fuseopt, ms", "imported with the first graph, ms"]
    return table(header, rows)


def passes(reading: Reading) -> str:
    """Milliseconds of each of fuseopt's passes."""
    cold = reading.first("fuseopt.compile", "cold")
    names = list(dict.fromkeys(n for f in cold.values() for n in f.get("passes", {})))
    rows = [
        [f"{params:,}", *(ms(f.get("passes", {}).get(name)) for name in names)]
        for params, f in cold.items()
    ]
    return table(["parameters", *names], rows)


def host_cost(figures: Figures) -> float | None:
    """Microseconds of a contender's call: the least, in results that have that."""
    cost: float | None = figures.get(
        "host_microseconds_least", figures.get("host_microseconds")
    )
    return cost


def hosts(reading: Reading) -> str:
    """Microseconds of a call, by number of small parameters."""
    rows = []
    found = reading.host()
    has_tail = any("tail" in figures["contenders"] for figures in found.values())
    for params, figures in found.items():
        cost = {n: host_cost(c) for n, c in figures["contenders"].items()}
        for moved in ("", MOVED):
            own, floor = cost.get(f"backend{moved}"), cost.get(f"no-op{moved}")
            if own is None or floor is None:
                continue
            names = ("foreach", "fused", OWN, "backend", "no-op")
            cells = [cost.get(name + moved) for name in names]
            cells.append(own - floor)
            if has_tail:
                cells.append(cost.get(f"tail{moved}"))
            shown = [NOTHING if c is None else f"{c:,.0f}" for c in cells]
            title = f"{params:,}, gradients elsewhere" if moved else f"{params:,}"
            rows.append([title, *shown])
    header = ["parameters", "eager foreach", "torch fused", "fuseopt.compile"]
    header += ['backend="fuseopt"', "no-op backend", "fuseopt above no-op"]
    if has_tail:
        header.append("fuseopt.tail: clip, step, average")
    return table(header, rows)


# ---------------------------------------------------------------- tails


def tails(reading: Reading) -> str:
    """The tail of a training step: in parts, and as one."""
    rows = []
    for model, figures in reading.tails().items():
        ways = figures["contenders"]
        mine = ways[OWN]["p50"]
        best = min(ways[name]["p50"] for name in ("foreach", "fused"))
        copied = ways["copy"]["p50"] * figures["least_bytes"] / ways["copy"]["bytes"]
        rows.append(
            [
                model,
                str(figures["tensors"]),
                f"{figures['elements'] / 1e6:.1f}M",
                *(ms(ways[name]["p50"]) for name in ("foreach", "fused", OWN)),
                times(best / mine),
                percent(copied / mine),
                str(ways[OWN]["launches"]),
                f"{ways[OWN]['bytes'] / figures['elements']:.1f}",
            ]
        )
    header = ["ms of a tail", "tensors", "elements", "parts, eager foreach"]
    header += ["parts, torch fused", "fuseopt.tail", "best other ÷ fuseopt"]
    return table([*header, "of a copy", "launches", "bytes a parameter"], rows)


# ---------------------------------------------------------------- DTensors

STEPS_OF_PARTS = ("for-loop", "foreach", "fused", "inductor", OWN, "plain")
CLIPS_OF_PARTS = ("torch, clip", "fuseopt, clip")
WHOLES_OF_PARTS = ("eager, wholes", "fuseopt, wholes")
TAILS_OF_PARTS = [f"{name}, tail" for name in (*STEPS_OF_PARTS[:4], OWN)]


def shards(reading: Reading) -> str:
    """A step and a clip of DTensors, in one process."""
    rows = []
    for params, figures in reading.shards().items():
        ways = figures["contenders"]
        launches = [ways[x].get("launches") for x in (OWN, "fuseopt, clip")]
        steps = [*STEPS_OF_PARTS, *CLIPS_OF_PARTS]
        rows.append(
            [f"{params}", *_least(ways, steps), " and ".join(map(str, launches))]
        )
    header = ["DTensors", "eager for-loop", "eager foreach", "torch fused", "Inductor"]
    header += ["fuseopt", "fuseopt, plain tensors", "clip, torch", "clip, fuseopt"]
    return table([*header, "launches"], rows)


def shard_tails(reading: Reading) -> str:
    """A clip and a step of DTensors together, and LAMB's step."""
    rows = []
    for params, figures in reading.shards().items():
        ways = figures["contenders"]
        if TAILS_OF_PARTS[-1] not in ways:
            continue
        launches = [ways[x]["launches"] for x in ("fuseopt, tail", "fuseopt, wholes")]
        every = [*TAILS_OF_PARTS, *WHOLES_OF_PARTS]
        rows.append(
            [f"{params}", *_least(ways, every), " and ".join(map(str, launches))]
        )
    header = ["DTensors", "eager for-loop", "eager foreach", "torch fused", "Inductor"]
    header += ["fuseopt.tail", "LAMB, eager", "LAMB, fuseopt", "launches"]
    return table(header, rows) if rows else ""


def _least(ways: Figures, names: Sequence[str]) -> list[str]:
    """Milliseconds of the fastest tenth of each way's turns."""
    return [f"{1e3 * ways[x]['p10']:.2f}" if x in ways else NOTHING for x in names]


# ---------------------------------------------------------------- training


def training(reading: Reading) -> str:
    """Whole training steps: the optimizer's share, and what each way gains."""
    cases = reading.training()
    gains: list[float] = []
    rows = []
    for model, figures in cases.items():
        ways = figures["contenders"]
        gain = _gain(ways, "foreach", OWN)
        gains += [] if gain is None else [gain]
        rows.append(
            [
                model,
                str(figures["tensors"]),
                f"{figures['elements'] / 1e6:.1f}M",
                *(ms(ways[way].get("p50")) for way in WAYS),
                *(percent(ways[way].get("tail_share")) for way in ("foreach", OWN)),
                _signed(_gain(ways, "foreach", "inductor")),
                _signed(gain),
            ]
        )
    if gains:
        mean = geomean(1 + gain for gain in gains)
        blank = [""] * (len(WAYS) + 5)
        rows.append(["geometric mean", *blank, _signed(mean - 1 if mean else None)])
        published = ["published for PyTorch 2.2: "]
        rows += [
            [published[0] + suite, *blank[:-1], claim, ""] for suite, claim in PUBLISHED
        ]
    header = ["model", "tensors", "elements"]
    header += [f"{LABELS.get(way, way)}, ms" for way in WAYS]
    header += ["tail's share, foreach", "tail's share, fuseopt"]
    return table([*header, "gain, Inductor", "gain, fuseopt"], rows)


WAYS = ("foreach", "fused", "inductor", OWN)


def whole_steps(reading: Reading) -> str:
    """The whole train step as one compiled function: fuseopt against Inductor."""
    rows = []
    for model, figures in reading.training().items():
        ways = figures["contenders"]
        pair = [ways.get(f"whole-{name}", {}) for name in ("inductor", OWN)]
        if not any("p50" in way for way in pair):
            continue
        rows.append(
            [
                model,
                *(way.get("skipped", ms(way.get("p50"))) for way in pair),
                *(s(way.get("ready_seconds")) for way in pair),
                _signed(_gain(ways, "whole-inductor", "whole-fuseopt")),
            ]
        )
    header = ["model", "Inductor, ms", "fuseopt, ms", "Inductor, s until warm"]
    return table([*header, "fuseopt, s until warm", "gain"], rows)


def _gain(ways: Figures, before: str, after: str) -> float | None:
    pair = [ways.get(name, {}).get("p50") for name in (before, after)]
    return pair[0] / pair[1] - 1 if all(pair) else None


def _signed(gain: float | None) -> str:
    return NOTHING if gain is None else f"{100 * gain:+.0f} %"


def skipped(reading: Reading) -> str:
    """Who did not run, where and why."""
    rows = [
        [name, reason, str(count)]
        for name, reasons in sorted(reading.skipped().items())
        for reason, count in reasons.items()
    ]
    return table(["contender or case", "why it did not run", "cases"], rows, 2)


Table = Callable[[Reading], str]
