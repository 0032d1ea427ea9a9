"""The kernels of common steps: `python -m tests.tools.prebuilt FOLDER` builds them.

Each step below is run a few times over small parameters, and the source of every kernel
that it asks for is taken; the text depends on no shape. Each source is then built for
each level of a machine (`fuseopt/runtime/cpp/prebuilt.py`), under the name by which a
machine without a compiler looks for it. `python -m tests.tools.wheel` puts them into
the wheel.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.cli.trial import Trial
from fuseopt.codegen import Source
from fuseopt.compiler.session import session
from fuseopt.runtime.chains import SOURCE as CHAINS
from fuseopt.runtime.cpp import prebuilt
from fuseopt.runtime.cpp.toolchain import find_compiler, flags_of
from fuseopt.runtime.guards.library import HELPER

#: A matrix, a vector, four dimensions.
SHAPES = ((6, 5), (7,), (4, 3, 2, 2))
#: For steps that treat a matrix and a vector otherwise, whose text depends on the mix.
MIXES = (
    ((6, 5),),
    ((7,),),
    ((6, 5), (7,)),
    ((7,), (6, 5)),
    ((4, 3, 2, 2), (7,), (6, 5)),
)
MIXED = ("Adafactor", "AdaFactor", "Lamb", "LAMB")
DTYPES = (torch.float32, torch.bfloat16)
#: Steps of each: state is made in the first; rates move after it.
STEPS = 4
#: Compilers that run at one time.
COMPILERS = 2

DECAY = {"weight_decay": 0.1}
#: Of torch: by class, the options whose text differs.
TORCH: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, **DECAY},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, **DECAY},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, **DECAY},
    ],
    "Adam": [{}, DECAY, {"amsgrad": True}],
    "AdamW": [{}, {"weight_decay": 0.0}, {"amsgrad": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, **DECAY}],
    "RAdam": [{}, {"decoupled_weight_decay": True, **DECAY}],
    "RMSprop": [{}, {"momentum": 0.9}, {"momentum": 0.9, **DECAY}, {"centered": True}],
    "Adagrad": [{}, DECAY],
    "Adadelta": [{}, DECAY],
    "Adamax": [{}, DECAY],
    "ASGD": [{}],
    "Rprop": [{}],
    "Adafactor": [{}, DECAY],
    "Muon": [{}],
}
#: Those whose foreach form, or that for torch's fused kernels, has another text.
FOREACH = ("SGD", "Adam", "AdamW")
#: Of packages and of this repository: module, class, options.
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("lion_pytorch", "Lion", {}),
    ("lion_pytorch", "Lion", DECAY),
    ("schedulefree", "AdamWScheduleFree", {}),
    ("schedulefree", "AdamWScheduleFree", {"warmup_steps": 2, **DECAY}),
    ("schedulefree", "SGDScheduleFree", {"lr": 0.1}),
    ("pytorch_optimizer", "Lion", {}),
    ("pytorch_optimizer", "Lamb", {}),
    ("pytorch_optimizer", "AdEMAMix", {}),
    ("pytorch_optimizer", "AdaFactor", {}),
    ("pytorch_optimizer", "ScheduleFreeAdamW", {}),
    ("pytorch_optimizer", "ADOPT", {}),
    ("pytorch_optimizer", "Adan", {}),
    ("tests.papers", "Lion", DECAY),
    ("tests.papers", "LAMB", {}),
    ("tests.papers", "AdEMAMix", {}),
]
#: Those that people put a tail around.
TAILED = ("SGD", "Adam", "AdamW")


@dataclass(frozen=True)
class Step:
    """A step to take the kernels of: its name, and a function of parameters that
    returns what does it, and its optimizer.
    """

    name: str
    make: Callable[[list[Any]], tuple[Callable[[], Any], Optimizer]]
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = SHAPES

    def run(self) -> None:
        """Do it a few times over new parameters."""
        torch.manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(s).to(self.dtype)) for s in self.shapes
        ]
        if "Muon" in self.name:
            params = params[:1]
        step, optimizer = self.make(params)
        for number in range(STEPS):
            for p in params:
                p.grad = torch.randn_like(p)
            step()
            for group in optimizer.param_groups:
                if number and isinstance(group.get("lr"), float):
                    group["lr"] *= 0.9


def steps(only: Iterable[str] = ()) -> Iterator[Step]:
    """All of them; `only`: those whose name begins with one of these words."""
    wanted = tuple(only)
    for step in _all():
        if wanted and not step.name.startswith(wanted):
            continue
        yield step
        if step.name.startswith(MIXED):
            yield from (dataclasses.replace(step, shapes=mix) for mix in MIXES)


def _all() -> Iterator[Step]:
    yield Step("doctor", lambda params: _compiled(Trial(params)))
    for dtype in DTYPES:
        for name, every in TORCH.items():
            made = getattr(torch.optim, name)
            for options in every:
                yield _step(f"{name} {dtype}", made, options, dtype)
                if name in FOREACH:
                    more = {"foreach": True, **options}
                    yield _step(f"{name} {dtype} foreach", made, more, dtype)
        for module, name, options in OTHERS:
            with contextlib.suppress(ImportError):
                made = getattr(importlib.import_module(module), name)
                yield _step(f"{name} {dtype} {module}", made, options, dtype)
    for name in TAILED:
        for options in TORCH[name]:
            made = getattr(torch.optim, name)
            yield from _tails(name, made, options)


def _step(name: str, made: Any, options: dict[str, Any], dtype: torch.dtype) -> Step:
    """Over one group; where it decays, some of which do not are a second one."""

    def make(params: list[Any]) -> tuple[Callable[[], Any], Optimizer]:
        groups: list[Any] = [{"params": params}]
        optimizer = made(groups, **options)
        if optimizer.param_groups[0].get("weight_decay") and len(params) > 1:
            groups = [{"params": params[:1]}]
            groups.append({"params": params[1:], "weight_decay": 0.0})
            _compiled_and_run(made([{"params": params}], **options), params)
            optimizer = made(groups, **options)
        return _compiled(optimizer)

    return Step(name, make, dtype)


def _compiled(optimizer: Any) -> tuple[Callable[[], Any], Optimizer]:
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()
    fuseopt.compile(optimizer, eager_if_faster=False)
    return optimizer.step, optimizer


def _compiled_and_run(optimizer: Any, params: list[Any]) -> None:
    step, _ = _compiled(optimizer)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn_like(p)
        step()


def _tails(name: str, made: Any, options: dict[str, Any]) -> Iterator[Step]:
    def tailed(**around: Any) -> Callable[[list[Any]], Any]:
        def make(params: list[Any]) -> tuple[Callable[[], Any], Optimizer]:
            optimizer = made(params, **options)
            more = dict(around)
            if more.pop("averaged", False):
                more["ema"] = [([p.detach().clone() for p in params], 0.99)]
            return fuseopt.tail(optimizer, **more), optimizer

        return make

    for more in (
        {"clip_grad_norm": 1.0},
        {"clip_grad_norm": 1.0, "zero_grad": True},
        {"clip_grad_norm": 1.0, "averaged": True},
        {"clip_grad_norm": 1.0, "averaged": True, "zero_grad": True},
        {"averaged": True},
    ):
        yield Step(f"{name} tail", tailed(**more))

    def clipped(params: list[Any]) -> tuple[Callable[[], Any], Optimizer]:
        step, optimizer = _compiled(made(params, **options))

        def both() -> None:
            fuseopt.clip_grad_norm_(params, 1.0)
            step()

        return both, optimizer

    yield Step(f"{name} tail clip_grad_norm_", clipped)


def collected(wanted: Iterable[Step]) -> dict[str, Source]:
    """The sources that the steps ask for, each once, by text."""
    found = {source.text: source for source in (HELPER, CHAINS)}
    load = session.builder.load

    def noted(source: Source, *args: Any, **kwargs: Any) -> Any:
        found.setdefault(source.text, source)
        return load(source, *args, **kwargs)

    session.builder.load = noted  # type: ignore[method-assign]
    try:
        for step in wanted:
            torch._dynamo.reset()
            before = len(found)
            begun = time.monotonic()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step.run()
            took = time.monotonic() - begun
            told = f"{took:5.1f} s {step.name}: {len(found) - before} new"
            print(told, file=sys.stderr, flush=True)
            session.reset()
    finally:
        del session.builder.load
    return found


def compiler_for(machine: str) -> tuple[str, ...]:
    """The command of the compiler that is here for a machine. Raises CompilerMissing
    or ValueError.
    """
    if machine == platform.machine():
        return find_compiler().command
    cross = f"{machine}-linux-gnu-g++"
    if shutil.which(cross) is None:
        raise ValueError(f"{cross} was not found (Debian: g++-{machine}-linux-gnu)")
    return (cross,)


def build(
    source: Source, level: str, folder: Path, compiler: tuple[str, ...] = ()
) -> Path:
    """Build one source for a level; its library."""
    target = folder / level / f"{prebuilt.key(source, False, level)}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler = compiler or find_compiler().command
    with tempfile.TemporaryDirectory() as work:
        text, compiled = Path(work) / "kernel.cpp", Path(work) / "kernel.o"
        text.write_text(source.text, encoding="utf-8")
        flags = [x for x in flags_of(source, False, level) if x != "-shared"]
        run = functools.partial(subprocess.run, check=True)
        run([*compiler, *flags, "-c", "-o", str(compiled), str(text)])
        # a second call, since GCC links OpenMP by name wherever -fopenmp is said
        after = prebuilt.libraries(source)
        run([*compiler, "-shared", "-o", str(target), str(compiled), *after])
    return target


def build_all(
    folder: Path, only: Iterable[str] = (), machine: str = platform.machine()
) -> int:
    """Build the kernels of the steps into a folder; how many of each level."""
    compiler = compiler_for(machine)
    sources = collected(steps(only))
    with ThreadPoolExecutor(COMPILERS) as compilers:
        jobs = [
            compilers.submit(build, source, level, folder, compiler)
            for source in sources.values()
            for level in prebuilt.LEVELS[machine]
        ]
        for job in jobs:
            job.result()
    return len(sources)


def main() -> None:
    """Build them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    add_machine(parser)
    given = parser.parse_args()
    kernels = build_all(given.folder, given.only, given.machine)
    print(f"{kernels} kernels for each of {', '.join(prebuilt.LEVELS[given.machine])}")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """The option `--machine`."""
    parser.add_argument(
        "--machine", choices=[*prebuilt.LEVELS], default=platform.machine()
    )


if __name__ == "__main__":
    main()
