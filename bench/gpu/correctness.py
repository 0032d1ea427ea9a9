"""Bit for bit eager's on this device? Each case compares after every step.

Cases are all of torch's own list of optimizers, those that the tests have from papers,
and what users do between steps. What reduces, or calls a function of a library, is not
bit for bit, by docs/numerics.md: there the distance is reported.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.gpu.features import FEATURES
from bench.gpu.place import Place
from bench.gpu.race import DTYPES, Race, change, parameters
from bench.gpu.reading import outcome
from bench.gpu.scenarios import SCENARIOS, STEPS
from bench.gpu.surroundings import SURROUNDINGS
from bench.results import Figures

ALONE = False
#: seconds that one case may take
CAP = 120.0
#: What reduces, or calls a function of a library: docs/numerics.md says which bits.
KNOWN = ("reduces", "function")


# ---------------------------------------------------------------- cases


def cases(place: Place) -> list[dict[str, Any]]:
    """All cases; early come those that tell most, should time run out: what goes on
    around a step, each optimizer as it comes.
    """
    found: list[dict[str, Any]] = [
        {"name": f"scenario/{name}", "weight": 4, "early": True}
        for name in (*SURROUNDINGS, *SCENARIOS, *FEATURES)
    ]
    if place.tiny:
        found = [c for c in found if not c["name"].endswith("2**31 elements")]
    for name, kind in _papers():
        found.append(
            {"name": f"paper/{name}", "kind": kind, "weight": 2, "early": True}
        )
    found += [
        {"name": name, "weight": 1, "early": case.description == "default"}
        for name, case in _by_name(_database()).items()
    ]
    if place.tiny:
        chosen = ("scenario/live", "paper/Lion", "torch/SGD-foreach-default")
        found = [c for c in found if c["name"].startswith(chosen)][:3]
    return found


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """What does the case. Raises Different there."""
    group, _, name = case["name"].partition("/")
    if group == "scenario":
        return lambda: {**SCENARIOS, **SURROUNDINGS, **FEATURES}[name](place)
    if group == "paper":
        return _compiled(lambda: _paper(place, name, case["kind"] in KNOWN))
    found = _by_name(_database())[case["name"]]
    return _compiled(lambda: _torch(place, found))


def _compiled(run: Callable[[], Figures]) -> Callable[[], Figures]:
    """What says of a step that runs in eager why it does."""
    from fuseopt.errors import CaptureError

    def told() -> Figures:
        try:
            return run()
        except CaptureError as why:
            return {"not_run": f"runs in eager: {str(why).splitlines()[0][:200]}"}

    return told


def summary(done: dict[str, Figures]) -> list[str]:
    """How many have eager's bits, what is off, and by how much."""
    failed, known, missing, exact = outcome(done)
    lines = [f"{exact} of {len(done)} cases have eager's bits"]
    by_cause: dict[str, list[str]] = {}
    for name in failed:
        by_cause.setdefault(done[name].get("cause", ""), []).append(name)
    # what differs in most cases first: one cause must not hide the others
    for cause, names in sorted(
        by_cause.items(), key=lambda x: (x[0] == "", -len(x[1]))
    ):
        shown = names if not cause else names[:1]
        more = (
            f" ({len(names)} cases: {', '.join(names[:6])})" if len(names) > 1 else ""
        )
        if cause:
            lines.append(f"  DIFFERS {cause}{more}")
        lines += [f"  DIFFERS {n}: {failed[n][:200]}" for n in shown]
    lines += [f"  not run: {n}: {why}" for n, why in missing.items()]
    lines += [f"  known: {n} {ulp:g} ulp" for n, ulp in known.items()]
    return lines[:40]


# ---------------------------------------------------------------- torch's own


def _database() -> list[Any]:
    """All inputs of torch's own list of optimizers, in the forms that Dynamo traces."""
    # torch's list imports a package of test helpers, of which it uses nothing here
    stand_in: Any = types.ModuleType("expecttest")
    stand_in.TestCase = object
    try:
        import expecttest  # noqa: F401
    except ImportError:
        sys.modules["expecttest"] = stand_in
    from tests.optim_cases import CASES, untraceable

    return [
        case
        for case in CASES
        if case.form != "differentiable" and not untraceable(case)
    ]


def _by_name(found: list[Any]) -> dict[str, Any]:
    """Cases by names of their own; of some inputs the list says the same."""
    named: dict[str, Any] = {}
    for case in found:
        name = f"torch/{case!r}"
        same = sum(known.startswith(name) for known in named)
        named[f"{name} ({same + 1})" if name in named else name] = case
    return named


def _torch(place: Place, case: Any) -> Figures:
    from tests.optim_cases import forced

    kind = getattr(torch.optim, case.name)
    own = {**case.options, **forced(case)}
    multiplies = case.name in ("Muon", "Adafactor")

    def options(of: dict[str, Any]) -> dict[str, Any]:
        return {
            key: x.to(place.device) if isinstance(x, Tensor) else copy.deepcopy(x)
            for key, x in of.items()
        }

    figures: Figures = {}
    for graphs in _graph_values(place, case.description == "default"):
        race = Race(
            place,
            lambda params: kind(params, **options(own)),
            known=multiplies,
            params=lambda: parameters(
                place, DTYPES[:1] if multiplies else DTYPES, multiplies
            ),
            **graphs,
        )
        for _ in range(STEPS):
            race.step()
        figures |= race.figures()
        torch._dynamo.reset()
    return figures


def _graph_values(place: Place, both: bool) -> list[dict[str, bool]]:
    """Options for CUDA graphs: as they come, and also without where `both`."""
    values = place.graphs
    if not values:
        return [{}]
    return [{"cudagraphs": value} for value in (values if both else values[:1])]


# ---------------------------------------------------------------- papers


def _papers() -> list[tuple[str, str]]:
    from tests import papers

    found = [(kind.__name__, "") for kind, _ in papers.ELEMENTWISE]
    found += [(kind.__name__, "reduces") for kind, _ in papers.REDUCING]
    return found + [(kind.__name__, "function") for kind, _, _ in papers.INEXACT]


def _paper(place: Place, name: str, known: bool) -> Figures:
    from tests import papers

    every = [*papers.ELEMENTWISE, *papers.REDUCING, *papers.INEXACT]
    ((kind, second),) = [(x[0], x[1]) for x in every if x[0].__name__ == name]

    def make(params: list[Tensor]) -> Optimizer:
        cut = len(params) // 2
        made: Optimizer = kind([{"params": params[:cut]}, {"params": params[cut:]}])
        made.param_groups[1].update(second)
        train = getattr(made, "train", None)
        if callable(train):
            train()
        return made

    race = Race(place, make, known=known)
    for number in range(STEPS):
        if number == 3:
            change(race, lr=lambda x: x * 0.5)
        race.step()
    return race.figures()
