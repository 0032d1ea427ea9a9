"""`make gpu`, rehearsed: every section runs, one that fails or hangs stops no other."""

from __future__ import annotations

import importlib
import itertools
import json
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from bench.gpu import __main__ as script
from bench.gpu import correctness, host, race, schedule, tools, worker
from bench.gpu.place import Place
from bench.gpu.schedule import Group, Section, partition
from bench.gpu.surroundings import SURROUNDINGS
from fuseopt.runtime.tables.upload import STAGES
from tests import ROOT, simulated

CPU = Place("cpu", tiny=True)
MODULES = {name: module for group in script.GROUPS for name, module, _, _ in group}

# ---------------------------------------------------------------- sections


def serve(name, place=CPU, cases=None):
    """The cases of a section, in this process: figures by name."""
    section = importlib.import_module(f"bench.gpu.{MODULES[name]}")
    told = []
    task = {
        "place": {"name": place.name, "tiny": place.tiny},
        "module": section.__name__,
        "cases": section.cases(place) if cases is None else cases,
    }
    worker.serve(task, lambda **said: told.append(said), lambda: None)
    done = {x["case"]: x.get("figures", x) for x in told if "case" in x}
    assert set(done) == {case["name"] for case in task["cases"]}
    assert ({"ready": True} in told) == section.ALONE
    json.dumps(told)
    return section, done


@pytest.mark.family(3)
@pytest.mark.parametrize("name", MODULES)
def test_each_section_runs_to_its_end_on_the_cpu(name):
    section, done = serve(name)
    for case, figures in done.items():
        assert "failed" not in figures, f"{case}: {figures['failed']}"
        assert figures["seconds"] >= 0
    lines = section.summary(done)
    assert lines
    assert all(isinstance(line, str) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps", "launches", "host", "tuning"])
def test_a_section_that_measures_on_the_simulated_accelerator(name, sim):
    """As on a GPU: streams, captures, counters of the CPU beside parameters there."""
    _measured_on_the_simulated(name)


@pytest.mark.slow
def test_tails_on_the_simulated_accelerator():
    """In a new process: autograd makes its threads in the first backward, for the
    devices of that moment.
    """
    if simulated.compiler() is None:
        pytest.skip("the simulated accelerator needs a C++ compiler")
    code = (
        "from tests import simulated; simulated.load()\n"
        "from tests.gpu.test_gpu_script import _measured_on_the_simulated\n"
        "_measured_on_the_simulated('tails')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _measured_on_the_simulated(name):
    place = Place("sim", tiny=True)
    section = importlib.import_module(f"bench.gpu.{MODULES[name]}")
    _, done = serve(name, place, section.cases(place)[-2:])
    for case, figures in done.items():
        assert "failed" not in figures, f"{case}: {figures['failed']}"
    assert not any("FAILED" in line for line in section.summary(done))


@pytest.mark.slow
def test_a_step_in_tritons_interpreter():
    pytest.importorskip("triton")
    place = Place("interpreter", tiny=True)
    case = {"name": "scenario/live momentum", "weight": 1}
    _, done = serve("correctness", place, [case])
    assert "failed" not in done[case["name"]], done
    assert done[case["name"]]["launches"][-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_goes_on_around_a_step(name, sim):
    """Each on the simulated accelerator, as on a GPU; it has graphs and two devices."""
    place = Place("sim", tiny=True)
    _, done = serve("correctness", place, [{"name": f"scenario/{name}", "weight": 1}])
    (figures,) = done.values()
    assert "failed" not in figures, figures["failed"]
    assert "not_run" not in figures


@pytest.mark.family(2)
@pytest.mark.parametrize("name", ["awkward layouts", "awkward momentum"])
def test_awkward_parameters_come_by_name(name):
    _, done = serve("correctness", cases=[{"name": f"scenario/{name}", "weight": 1}])
    (figures,) = done.values()
    assert "failed" not in figures, figures["failed"]
    assert figures["awkward"]


def test_parameters_are_dense_unless_they_are_to_be_awkward():
    """Eager's fast kernels for lists take dense tensors alone."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense
    for tiny in (True, False):
        place = Place("cpu", tiny=tiny)
        params = race.parameters(place)
        assert all(map(is_dense, params))
        race.set_grads(place, (params,), 1)
        for p in params:
            assert p.grad.stride() == p.stride() or p.numel() < 2
        awkward = race.parameters(place, awkward=True)
        assert sum(not is_dense(p) for p in awkward) == 2


@pytest.mark.slow
def test_a_capture_that_failed_fails_its_case(monkeypatch, sim):
    def broken(*_):
        raise RuntimeError("no graph today")

    monkeypatch.setattr("fuseopt.runtime.cudagraphs._record", broken)
    case = {"name": "scenario/live momentum", "weight": 1}
    _, done = serve("correctness", Place("sim", tiny=True), [case])
    assert "capture failed: no graph today" in done[case["name"]]["failed"]


def test_differences_are_grouped_by_what_differs_first():
    failed = {
        f"torch/{k}": {
            "failed": f"Different: step 1: parameter {k} (bfloat16 [3]).1.exp_avg: x",
            "cause": "exp_avg, bfloat16 in step 1",
        }
        for k in range(40)
    }
    other = {"failed": "Different: y", "cause": "parameter, float32 in step 3"}
    lines = correctness.summary(
        {**failed, "paper/Lion": other, "last": {"failed": "z"}}
    )
    assert lines[0] == "0 of 42 cases have eager's bits"
    assert lines[1].startswith(
        "  DIFFERS exp_avg, bfloat16 in step 1 (40 cases: torch/"
    )
    assert any("parameter, float32 in step 3" in line for line in lines)
    assert any("paper/Lion: Different: y" in line for line in lines)
    assert any("last: z" in line for line in lines)


def test_all_cases_have_names_of_their_own_and_exist():
    for module in MODULES.values():
        section = importlib.import_module(f"bench.gpu.{module}")
        names = [case["name"] for case in section.cases(Place("cuda"))]
        assert names
        assert len(names) == len(set(names))
        assert section.CAP > 0
    names = [case["name"] for case in correctness.cases(Place("cuda"))]
    for kind in ("scenario/more than 2**31", "paper/LAMB", "torch/AdamW-foreach"):
        assert any(name.startswith(kind) for name in names)


def test_what_tells_most_comes_before_time_runs_out():
    """Two minutes of a small budget are enough for these, if for no others."""
    cases = correctness.cases(Place("cuda"))
    early = [case["name"] for case in cases if case["early"]]
    assert len(early) < len(cases) / 3
    for kind in (
        "scenario/broken capture",
        "paper/LAMB",
        "torch/AdamW-foreach-default",
    ):
        assert kind in early
    for part in partition(cases, 14):
        order = [case["early"] for case in part]
        assert order == sorted(order, reverse=True)


def test_a_wrong_bit_is_told_with_its_place_and_both_values(monkeypatch):
    plain = race.eager_step

    def wrong(optimizer):
        plain(optimizer)
        p = optimizer.param_groups[0]["params"][4]
        p.data.view(-1)[7] += 1

    monkeypatch.setattr(race, "eager_step", wrong)
    case = {"name": "scenario/live momentum", "weight": 1}
    section, done = serve("correctness", cases=[case])
    said = done[case["name"]]["failed"]
    assert "step 1: parameter 4 (float32 [17, 5])" in said
    assert "element 7 is" in said
    assert "eager has" in said
    assert done[case["name"]]["cause"] == "parameter, float32 in step 1"
    lines = section.summary(done)
    assert lines[1] == "  DIFFERS parameter, float32 in step 1"
    assert lines[2].startswith("  DIFFERS scenario/live momentum")


def test_torchs_list_is_read_where_its_test_helpers_are_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "expecttest", None)
    monkeypatch.delitem(sys.modules, "tests.optim_cases", raising=False)
    assert len(correctness._database()) > 200


# ---------------------------------------------------------------- tools


def tool(tmp_path, monkeypatch, name, text, code=0):
    path = tmp_path / name
    path.write_text(f"#!{sys.executable}\nprint({text!r})\nraise SystemExit({code})\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.slow
def test_what_compute_sanitizer_says(tmp_path, monkeypatch):
    name = "compute-sanitizer"
    tool(tmp_path, monkeypatch, name, "done\n========= ERROR SUMMARY: 0 errors")
    _, done = serve("tools", cases=[{"name": "memcheck"}])
    assert done["memcheck"]["errors"] == 0
    tool(tmp_path, monkeypatch, name, "done\n========= ERROR SUMMARY: 3 errors", 1)
    _, done = serve("tools", cases=[{"name": "memcheck"}])
    assert "memcheck found 3 errors" in done["memcheck"]["failed"]
    tool(tmp_path, monkeypatch, name, "what is that", 1)
    _, done = serve("tools", cases=[{"name": "memcheck"}])
    assert "gave no summary (exit 1): what is that" in done["memcheck"]["failed"]


@pytest.mark.parametrize(
    ("name", "case", "text"),
    [
        ("compute-sanitizer", "racecheck", "Internal error\nDevice not supported"),
        ("ncu", "ncu fp32", "==ERROR== ERR_NVGPUCTRPERM - The user does not have it"),
    ],
)
def test_a_tool_that_is_refused_did_not_fail(name, case, text, tmp_path, monkeypatch):
    tool(tmp_path, monkeypatch, name, text, 1)
    _, done = serve("tools", cases=[{"name": case}])
    assert "failed" not in done[case]
    assert done[case]["not_run"] == f"not run: {text.splitlines()[-1]}"


@pytest.mark.slow
def test_the_step_that_tools_watch_runs():
    done = tools._run([], "bfloat16", 33, CPU)
    assert done.stdout.strip() == "done", done.stderr


def test_what_ncu_writes():
    text = (
        '==PROF== Connected\n"ID","Kernel Name","Metric Name","Metric Unit",'
        '"Metric Value"\n"0","fuseopt_step","dram__bytes.sum","byte","1,024"\n'
        '"0","fuseopt_step","launch__registers_per_thread","register/thread","40"\n'
    )
    assert tools.read_ncu(text) == {
        "dram_bytes": "1024 byte",
        "registers": "40 register/thread",
        "kernel": "fuseopt_step",
    }
    with pytest.raises(RuntimeError, match="no table: ==ERROR== no permission"):
        tools.read_ncu("==ERROR== no permission")


# ---------------------------------------------------------------- schedule

#: A worker without torch: cases say what becomes of them.
WORKER = """
import json, os, sys, time
def tell(**said): print(json.dumps(said), flush=True)
task = json.loads(sys.stdin.readline())
waiting = []
for case in task["cases"]:
    tell(begin=case["name"])
    if case.get("dies"): print("Segmentation fault", flush=True); os._exit(11)
    if case.get("hangs"): time.sleep(60)
    if case.get("alone"): waiting.append(case); continue
    tell(case=case["name"], figures={"seconds": 0})
if waiting:
    tell(ready=True)
    sys.stdin.readline()
for case in waiting:
    begin = time.time()
    time.sleep(0.2)
    tell(case=case["name"], figures={"begin": begin, "end": time.time()})
"""


def section(name, cases, cap=30.0, processes=1):
    module = types.SimpleNamespace(
        __name__=name, cases=lambda place: cases, CAP=cap, summary=lambda done: []
    )
    return Section(name, module, CPU, processes)


def run(*sections, seconds=20.0):
    begin = time.monotonic()
    command = [sys.executable, "-u", "-c", WORKER]
    Group(sections, begin + seconds, lambda: None, command).run()
    return time.monotonic() - begin


@pytest.mark.slow
def test_a_case_that_kills_its_process_or_hangs_costs_no_other():
    cases = [{"name": n, n: True} for n in ("first", "dies", "second", "hangs", "last")]
    tried = section("tried", cases, cap=1.0)
    taken = run(tried)
    assert set(tried.done) == {case["name"] for case in cases}
    failed = {name for name, f in tried.done.items() if "failed" in f}
    assert failed == {"dies", "hangs"}
    assert "ended with code 11" in tried.done["dies"]["failed"]
    assert "Segmentation fault" in tried.done["dies"]["trace"]
    assert tried.done["hangs"]["failed"] == "not finished in 1 s"
    assert tried.state == "done"
    assert taken < 20


@pytest.mark.slow
def test_the_deadline_is_kept_and_says_what_was_not_run():
    slow = section("slow", [{"name": n, "hangs": n == "b"} for n in "abc"])
    taken = run(slow, seconds=1.5)
    assert taken < 1.5 + schedule.GRACE
    assert slow.state == "out of time"
    assert slow.content()["not_run"] == ["b", "c"]
    assert list(slow.content()["cases"]) == ["a"]


def test_those_that_measure_take_turns():
    cases = [{"name": str(i), "alone": True} for i in range(3)]
    timed = section("timed", cases, processes=3)
    beside = section("beside", [{"name": "x", "alone": True}])
    run(timed, beside)
    figures = [*timed.done.values(), *beside.done.values()]
    spans = sorted((f["begin"], f["end"]) for f in figures)
    assert len(spans) == 4
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.slow
def test_who_is_ready_measures_though_another_prepares_for_ever():
    cases = [{"name": str(i), "alone": True} for i in range(2)]
    timed = section("timed", cases, processes=2)
    slow = section("slow", [{"name": "slow", "hangs": True}])
    run(timed, slow, seconds=6.0)
    assert set(timed.done) == {"0", "1"}
    assert slow.state == "out of time"


@pytest.mark.slow
def test_a_profiler_that_is_refused_loses_no_time_that_was_measured(monkeypatch):
    from bench.gpu import profiled, steps

    def refused(place, call):
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(profiled, "profiled", refused)
    cases = steps.cases(CPU)[:1]
    _, done = serve("steps", cases=cases)
    (figures,) = done.values()
    own = figures["contenders"]["fuseopt"]
    assert own["not_profiled"].startswith("CUPTI_ERROR")
    assert own["p50"] > 0


def test_cases_are_shared_by_weight():
    cases = [{"name": str(w), "weight": w} for w in (1, 9, 2, 3, 4)]
    parts = partition(cases, 2)
    assert sorted(sum(c["weight"] for c in part) for part in parts) == [9, 10]
    assert partition(cases[:1], 8) == [cases[:1]]


# ---------------------------------------------------------------- the script


@pytest.mark.slow
def test_the_file_the_table_and_a_section_that_cannot_start(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("FUSEOPT_CACHE_DIR", str(tmp_path / "cache"))
    groups = ((("broken", "no_such_module", 0.1, 1),), *script.GROUPS[:1])
    monkeypatch.setattr(script, "GROUPS", groups)
    monkeypatch.setattr(script, "SECTIONS", ["broken", "machine"])
    # the budget counts from the start of the process, which is that of all tests here
    monkeypatch.setattr(script, "age", lambda: 0.0)
    code = script.main(["--rehearse", "cpu", "--budget", "120", "--out", str(tmp_path)])
    assert code == 1
    (path,) = tmp_path.glob("*.json")
    assert path.name == "rehearsal-cpu.json"
    content = json.loads(path.read_text())
    assert content.keys() == {"date", "budget", "place", "seconds", "sections"}
    broken, machine = (content["sections"][n] for n in ("broken", "machine"))
    assert broken["state"] == "failed"
    assert "no_such_module" in broken["error"]
    assert machine["state"] == "done", machine
    found = machine["cases"]["environment"]
    assert {"torch", "triton", "ptxas", "nvidia_smi", "processor"} <= found.keys()
    assert found["first_target"] == "cpp"
    said = capfd.readouterr().out
    assert "== broken: failed" in said
    assert said.strip().endswith(str(path))


def test_the_name_of_the_results_file():
    run = script.Run(Place("cuda"), Path("/somewhere"))
    done = {"environment": {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}}
    run.sections = [Section("machine", None, Place("cuda"), done=done)]
    assert str(run.path()) == "/somewhere/gpu-nvidia-h200-torch2.11.0-cu130.json"


def test_results_come_back_where_the_machine_says(monkeypatch):
    monkeypatch.setenv("OUT", "/given")
    run = script.Run(Place("cuda"))
    assert run.path().parent == Path("/given")
    assert script.Run(Place("cuda"), Path("/else")).path().parent == Path("/else")


def test_a_section_that_comes_to_no_case_fails(monkeypatch):
    run = script.Run(Place("cuda"))
    section = Section("steps", None, Place("cuda"), expected=["a", "b"])
    run.sections = [section]
    assert run.bad
    section.done["a"] = {"p50": 1.0}
    assert not run.bad
    section.done["b"] = {"not_run": "no such tool"}
    assert not run.bad


def test_no_more_calls_are_queued_than_a_table_has_copies():
    assert host.QUEUED < STAGES


def test_without_a_gpu_it_says_how_to_rehearse(monkeypatch, capsys):
    monkeypatch.setattr(script, "_has_gpu", lambda: False)
    assert script.main([]) == 2
    assert "--rehearse cpu|interpreter|sim" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["--sections", "nothing"])
    assert "no section ['nothing']" in capsys.readouterr().err


def test_the_page_has_the_figures_of_the_results() -> None:
    """To write it anew: python -m bench.gpu.page."""
    from bench.gpu.page import PAGE, page

    assert PAGE.read_text() == page()
