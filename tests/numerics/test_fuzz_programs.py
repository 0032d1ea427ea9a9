"""Random programs: fuseopt's step gives the bits of eager, and its parts agree.

Every program goes through both interpreters, the proof of its schedule and generated
C++; some through Dynamo. 100 programs here, always the same; 2,000 new ones in `make
fuzz`. A failure prints the smallest program that still fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import fuseopt
from fuseopt.backend import fuseopt as backend
from fuseopt.capture import capture
from fuseopt.capture.fx.inputs import static_tensors
from fuseopt.ir.interpreter import run_graph
from tests.ir.test_interpreter import assert_equal_runs, runner
from tests.numerics.fuzz_programs import (
    LAYOUTS,
    RUN_AS_THEY_ARE,
    Program,
    random_program,
)
from tests.steps import same_bits

STRICT = {"fallback": "error"}
#: `make fuzz` runs this many times as many programs, others each time.
TIMES = 20 if settings.get_current_profile_name() == "fuzz" else 1


def fuzz(examples: int) -> Callable[..., Any]:
    """Run a test on seeds; failures make themselves small, so hypothesis need not."""
    return lambda test: settings(
        max_examples=TIMES * examples,
        derandomize=TIMES == 1,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )(given(seed=st.integers(0, 2**32 - 1))(test))


def compare(program: Program, got: Any, want: Any, what: str) -> None:
    names = [*(p.name for p in program.places), *program.results]
    assert len(got) == len(want)
    for name, a, b in zip(names, got, want, strict=False):
        assert same_bits(a, b), f"{what}: {name} is {a}, in eager {b}"
        assert a.stride() == b.stride() or a.numel() < 2, f"{what}: strides of {name}"


def check_interpreters(program: Program) -> None:
    """Graph and schedule do the same, by proof and run both; the graph does eager's."""
    tensors = program.tensors()
    gm = program.graph(tensors)
    args = [*tensors[program.statics :], *program.numbers(0)]
    captured = capture(gm, args)
    pool = [*static_tensors(gm).values()]
    pool += [args[i] for i in captured.tensor_args]
    numbers = captured.evaluate(args, pool.__getitem__)
    externs = runner(captured, numbers)
    assert_equal_runs(captured.graph, pool, numbers, externs)
    mine, theirs = program.tensors(), program.tensors()
    run_graph(captured.graph, mine, numbers, externs)
    with torch.no_grad():
        program.function()(*theirs, *program.numbers(0))
    # the interpreter adds the squares of a norm in an order of its own
    if not any(".norm(" in line for line in program.lines):
        compare(program, mine, theirs, "interpreted")


def check_report() -> None:
    """Nothing went to eager, and only what has no rule is an extern."""
    for report in fuseopt.reports():
        assert report.fallback == ""
        for name, reason in report.externs:
            op = name.split(".")[1].strip("_")
            assert op in RUN_AS_THEY_ARE or reason != "no rule for this op", name


def check_compiled(program: Program) -> None:
    """The graph, compiled, twice: other gradients and numbers at the second call."""
    check_interpreters(program)
    step, statics = program.function(), program.statics
    mine, theirs = program.tensors(), program.tensors()
    gm = program.graph(mine)
    fast = backend(gm, [*mine[statics:], *program.numbers(0)], options=STRICT)
    for turn in (0, 1):
        if turn:
            mine[statics:] = program.tensors(turn)[statics:]
            theirs[statics:] = program.tensors(turn)[statics:]
        with torch.no_grad():
            want = step(*theirs, *program.numbers(turn))
            got = fast(*mine[statics:], *program.numbers(turn))
        compare(program, (*mine, *got), (*theirs, *want), f"call {turn}")
    check_report()


def check_dynamo(program: Program) -> None:
    """The same through torch.compile, where Dynamo writes the graph."""
    torch._dynamo.reset()
    step, fast = program.function(), program.function()
    fast = torch.compile(fast, backend=backend, options=STRICT, fullgraph=True)
    mine, theirs = program.tensors(), program.tensors()
    for turn in (0, 1):
        with torch.no_grad():
            want = step(*theirs, *program.numbers(turn))
            got = fast(*mine, *program.numbers(turn))
        compare(program, (*mine, *got), (*theirs, *want), f"call {turn}")
    check_report()


def fewest(
    lines: Sequence[str], failure: Callable[[Sequence[str]], Exception | None]
) -> tuple[Sequence[str], Exception | None]:
    """As few of some lines as still fail in the same way, and how; the lines and None
    if they do not. `failure(lines)`: what goes wrong with some of them, or None.
    """
    found, at = failure(lines), 0
    while found is not None and at < len(lines):
        fewer = [*lines[:at], *lines[at + 1 :]]
        again = failure(fewer)
        if type(again) is type(found):
            lines, found = fewer, again
        else:
            at += 1
    return lines, found


def check(test: Callable[[Program], None], program: Program) -> None:
    """Run a test; where it fails, on as few of the program's lines as still fail."""

    def failure(lines: Sequence[str]) -> Exception | None:
        try:
            test(replace(program, lines=tuple(lines)))
        except Exception as error:
            return error
        return None

    lines, found = fewest(program.lines, failure)
    if found is not None:
        smallest = replace(program, lines=tuple(lines))
        raise AssertionError(f"{found}\n{smallest}") from found


@fuzz(40)
def test_programs(seed: int) -> None:
    check(check_compiled, random_program(seed))


@fuzz(20)
def test_programs_over_other_strides(seed: int) -> None:
    check(check_compiled, random_program(seed, ("turned", "gaps", "offset")))


@fuzz(30)
def test_programs_over_shared_memory(seed: int) -> None:
    check(check_compiled, random_program(seed, ("flat", "shared", "woven", "tied")))


@fuzz(10)
def test_programs_through_dynamo(seed: int) -> None:
    check(check_dynamo, random_program(seed, LAYOUTS))
