"""In: the losses of two runs and the times of what raced. Out: one picture, a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLOURS = {"eager": "0.62", "fused": "tab:blue", "compiled": "tab:red"}
Times = Mapping[str, float]


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
    races: Mapping[str, Times],
) -> None:
    """Draw the loss curves on the left; on the right, of each race the milliseconds of
    all and how many times faster than the first the last is.
    """
    # A Figure without pyplot draws with Agg: no screen needed, no global state.
    figure = Figure(figsize=(12, 1.5 + 1.5 * len(races)), layout="constrained")
    figure.suptitle(title, fontsize=13)
    left, right = figure.subfigures(1, 2, width_ratios=(2, 3))

    curve = left.subplots()
    # The first curve is wide and the second dashed: equal curves are both seen.
    styles = ({"linewidth": 5, "alpha": 0.5}, {"linewidth": 1.4, "linestyle": "--"})
    for (name, values), style in zip(losses.items(), styles, strict=True):
        curve.plot(values, label=name, color=colour_of(name), **style)
    curve.set(xlabel="step", ylabel="loss", title="the same bits after every step")
    curve.legend()

    panels = right.subplots(len(races), 1, squeeze=False)[:, 0]
    for panel, (what, milliseconds) in zip(panels, races.items(), strict=True):
        race(panel, what, milliseconds)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def race(panel: Any, what: str, milliseconds: Times) -> None:
    """Draw the bars of one race, with the times that the last is faster than others."""
    *_, last = milliseconds.values()
    longest = max(milliseconds.values())
    drawn = panel.barh(
        list(milliseconds),
        list(milliseconds.values()),
        color=[colour_of(name) for name in milliseconds],
    )
    labels = [
        f"{taken:.3g} ms" + (f"   {taken / last:.1f}×" if taken != last else "")
        for taken in milliseconds.values()
    ]
    panel.bar_label(drawn, labels=labels, padding=4)
    panel.set_xlim(0, 1.3 * longest)
    panel.invert_yaxis()
    panel.set_xticks([])
    for side in ("top", "right", "bottom"):
        panel.spines[side].set_visible(False)
    first, *_ = milliseconds.values()
    told = f"{what}: {first / last:.1f}× as fast as eager"
    panel.set_title(told, loc="left", weight="bold", fontsize="medium")
