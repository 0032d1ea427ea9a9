"""In: a results file. Out: pictures in docs/pictures, PNG, the same bytes each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.reading import LARGE, NAMES, OWN, Reading
from bench.results import Figures
from bench.tables import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREY, GREEN = "#2563a8", "#d9772b", "#8a8f98", "#3d8b5f"
#: steps of one hue for fuseopt's own passes, lightest first
SHADES = ("#cfe0f2", "#a9c8e8", "#7fabd9", "#568dc7", "#2f6fb2", "#1c5291", "#123a69")

Draw = Callable[[Reading], "Any | None"]


def _axes(width: float, height: float) -> tuple[Any, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)
    return figure, axes


def _logarithmic(axis: Any, ticks: Sequence[float], label: str) -> None:
    """Make an axis logarithmic, with those of these ticks that lie within."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: label.format(value))


def _legend_above(axes: Axes) -> None:
    """Put the legend where no point can lie, beside the title."""
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.1}
    axes.legend(frameon=False, fontsize=8, ncols=4, **place)


def speed(reading: Reading) -> Any | None:
    """Draw by how much fuseopt is faster or slower than the best other, by model."""
    rows = {
        optimizer: [x for x in reading.steps(optimizer, "float32") if x.best_other()]
        for optimizer in ("AdamW", "SGD")
    }
    models = list(dict.fromkeys(x.model for found in rows.values() for x in found))
    if not models:
        return None
    figure, axes = _axes(7.5, 1.2 + 0.24 * len(models))
    for (optimizer, found), colour, shift in zip(
        rows.items(), (BLUE, ORANGE), (-0.16, 0.16), strict=True
    ):
        ratios = [best[1] for x in found if (best := x.best_other())]
        places = [models.index(x.model) + shift for x in found]
        label = NAMES.get(optimizer, optimizer)
        axes.hlines(places, 1, ratios, color=colour, linewidth=2, alpha=0.6)
        axes.plot(ratios, places, "o", color=colour, markersize=5, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    _logarithmic(axes.xaxis, (0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5), "{:g}×")
    axes.set_xlabel("time of the fastest other ÷ time of fuseopt (right of 1: faster)")
    axes.set_title("A step beside the fastest other, float32", loc="left", fontsize=10)
    _legend_above(axes)
    return figure


def bandwidth(reading: Reading) -> Any | None:
    """Draw what part of a copy's bytes per second each reaches, by model size."""
    found = [x for x in reading.steps("AdamW", "float32") if x.of_copy()]
    if not found:
        return None
    figure, axes = _axes(7.5, 4.2)
    kinds = (("foreach", GREY), ("fused", ORANGE), ("inductor", GREEN), (OWN, BLUE))
    for name, colour in kinds:
        points = [
            (x.figures["elements"] / 1e6, part)
            for x in found
            if (part := x.of_copy(name)) is not None
        ]
        if points:
            label = LABELS.get(name, name)
            size = 6 if name == OWN else 4
            axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=size,
                      label=label)  # fmt: skip
    axes.axhline(1, color="black", linewidth=0.8)
    axes.text(axes.get_xlim()[0], 1.01, " a copy", va="bottom", fontsize=8)
    axes.axvspan(LARGE / 1e6, axes.get_xlim()[1], color=GREY, alpha=0.08, linewidth=0)
    _logarithmic(axes.xaxis, (5, 10, 20, 50, 100, 200, 500, 1000), "{:g}M")
    axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("elements of the model (shaded: more than 20M)")
    axes.set_ylabel("least bytes per second ÷ a copy's", fontsize=8)
    axes.set_title("AdamW, float32, beside a copy", loc="left",
                   fontsize=10)  # fmt: skip
    _legend_above(axes)
    return figure


def compiling(reading: Reading) -> Any | None:
    """Draw seconds of the first step against the number of parameters."""
    figure, axes = _axes(7.5, 4.2)
    ways = (
        ("inductor", "Inductor", GREEN),
        ("backend", 'backend="fuseopt"', ORANGE),
        ("fuseopt.compile", "fuseopt.compile", BLUE),
    )
    drawn = False
    for way, label, colour in ways:
        cold = reading.first(way, "cold")
        points = [
            (params, figures["first_step_seconds"])
            for params, figures in cold.items()
            if "first_step_seconds" in figures
        ]
        if points:
            drawn = True
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label)
        own = [(p, f["backend_seconds"]) for p, f in cold.items() if way == OWN_WAY
               and "backend_seconds" in f]  # fmt: skip
        if own:
            axes.plot(*zip(*own, strict=True), "o--", color=colour, alpha=0.6,
                      label="of it fuseopt itself")  # fmt: skip
    inductor = [
        (x.figures["tensors"], seconds)
        for x in reading.steps("AdamW", "float32")
        if (seconds := x.count("inductor", "first_step_seconds"))
    ]
    if inductor:
        drawn = True
        axes.plot(*zip(*inductor, strict=True), "x", color=GREEN,
                  label="Inductor, models")  # fmt: skip
    if not drawn:
        return None
    _logarithmic(axes.xaxis, (10, 30, 100, 300, 1000), "{:g}")
    _logarithmic(axes.yaxis, (0.1, 0.3, 1, 3, 10, 30, 100, 300), "{:g} s")
    axes.set_xlabel("parameters (tensors)")
    axes.set_title("The first AdamW step, cold", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    return figure


OWN_WAY = "fuseopt.compile"


def first_step(reading: Reading) -> Any | None:
    """Draw where the seconds of a cold first step go: Dynamo, each pass, the build."""
    cold = {
        params: figures
        for params, figures in reading.first(OWN_WAY, "cold").items()
        if "passes" in figures
    }
    if not cold:
        return None
    figure, axes = _axes(7.5, 1.5 + 0.5 * len(cold))
    labels = [f"{params:,}" for params in cold]
    most = max(f["first_step_seconds"] for f in cold.values())
    left = [0.0] * len(cold)
    names = list(dict.fromkeys(n for f in cold.values() for n in f["passes"]))
    # what cannot be seen at this scale is one part
    peaks = {n: max(f["passes"].get(n, 0) for f in cold.values()) for n in names}
    large = [name for name, peak in peaks.items() if peak > 0.01 * most]
    parts = [("Dynamo", [f["dynamo_seconds"] for f in cold.values()], GREY)]
    passes = [n for n in large if n != "build"]
    for i, name in enumerate(passes):
        shade = SHADES[(2 + 2 * i) % len(SHADES)]
        parts.append((name, [f["passes"].get(name, 0) for f in cold.values()], shade))
    small = [sum(f["passes"][n] for n in f["passes"] if n not in large)
             for f in cold.values()]  # fmt: skip
    parts.append(("other passes", small, SHADES[0]))
    builds = [f["passes"].get("build", 0) for f in cold.values()]
    parts.append(("kernel build", builds, ORANGE))
    for name, widths, colour in parts:
        axes.barh(labels, widths, left=left, color=colour, label=name, height=0.6,
                  edgecolor="white", linewidth=0.5)  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_ylabel("parameters", fontsize=8)
    axes.set_title("Where a cold first step goes, fuseopt.compile", loc="left",
                   fontsize=10)  # fmt: skip
    axes.legend(frameon=False, fontsize=8, ncols=1, loc="center left",
                bbox_to_anchor=(1, 0.5))  # fmt: skip
    return figure


def tails(reading: Reading) -> Any | None:
    """Draw what the tail of a training step takes, in parts and as one, by model."""
    cases = reading.tails()
    if not cases:
        return None
    figure, axes = _axes(7.5, 1.2 + 0.75 * len(cases))
    models = list(cases)
    ways = (
        ("parts, torch fused", "fused", ORANGE),
        ("fuseopt.tail", OWN, BLUE),
        ("a copy of as many bytes", "copy", GREY),
    )
    for i, (label, way, colour) in enumerate(ways):
        widths = [1e3 * _tail_seconds(cases[model], way) for model in models]
        places = [j + 0.26 * (i - 1) for j in range(len(models))]
        bars = axes.barh(places, widths, height=0.24, color=colour, label=label)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    axes.set_xlabel("ms: unscale, clip by the total norm, AdamW, average, zero_grad")
    axes.set_title("The tail of a step, float32", loc="left", fontsize=10)
    _legend_above(axes)
    return figure


def _tail_seconds(case: Figures, way: str) -> float:
    """Median seconds; those of a copy for as many bytes as a tail must move."""
    figures = case["contenders"][way]
    scale = case["least_bytes"] / figures["bytes"] if way == "copy" else 1.0
    return float(figures["p50"] * scale)


PICTURES: dict[str, tuple[str, Draw]] = {
    "speed": ("speed against the best other, by model", speed),
    "bandwidth": ("bytes per second against a copy's, by model size", bandwidth),
    "compiling": ("seconds of the first step against parameters", compiling),
    "first-step": ("parts of a cold first step", first_step),
    "tail": ("milliseconds of the tail of a training step, by model", tails),
}


def draw(reading: Reading, folder: Path) -> dict[str, Path]:
    """Write the pictures of a results file; return those that there is data for."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, (_, make) in PICTURES.items():
        figure = make(reading)
        if figure is not None:
            made[name] = folder / f"{reading.path.stem}-{name}.png"
            figure.savefig(made[name], metadata={"Software": None})
    return made
