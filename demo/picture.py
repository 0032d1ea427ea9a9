"""In: the losses of two runs and the seconds of steps. Out: one picture, a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

COLOURS = {"eager": "tab:gray", "fused": "tab:blue", "compiled": "tab:red"}


def colour_of(name: str) -> str:
    """Return the colour of a contender: eager's, torch's fused, or the compiled."""
    return next(
        (colour for word, colour in COLOURS.items() if word in name),
        COLOURS["compiled"],
    )


def draw(
    path: Path,
    title: str,
    losses: Mapping[str, Sequence[float]],
    milliseconds: Mapping[str, float],
) -> None:
    """Draw the loss curves on the left, the milliseconds of a step on the right."""
    # A Figure without pyplot draws with Agg: no screen needed, no global state.
    figure = Figure(figsize=(11, 4), layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(title)

    # The first curve is wide and the second dashed: equal curves are both seen.
    styles = ({"linewidth": 4, "alpha": 0.4}, {"linewidth": 1.2, "linestyle": "--"})
    for (name, values), style in zip(losses.items(), styles, strict=True):
        curve.plot(values, label=name, color=colour_of(name), **style)
    curve.set(xlabel="step", ylabel="loss", title="training loss")
    curve.legend()

    drawn = bars.barh(
        list(milliseconds),
        list(milliseconds.values()),
        color=[colour_of(name) for name in milliseconds],
    )
    bars.bar_label(drawn, fmt="%.2f", padding=4)
    bars.margins(x=0.25)  # room for the label of the longest
    bars.invert_yaxis()
    bars.set(xlabel="milliseconds, median", title="optimizer step")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
