"""How a kernel is started on a device: tables, copies, streams, and what can fail."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.codegen.triton.kernel import TritonTarget
from fuseopt.errors import BuildError, ConfigError, LaunchError
from fuseopt.runtime import run_tables
from fuseopt.runtime.tables.upload import SPARES, STAGES, Arena
from fuseopt.runtime.triton import registry
from fuseopt.runtime.triton.build import TABLES, TritonBuilder
from fuseopt.runtime.triton.launcher import Compiled
from fuseopt.runtime.triton.table import triton_factory
from tests.simulated.twins import Clipped, SimTwins
from tests.triton_cases import Case, kernels

triton = pytest.importorskip("triton")

PLAIN = partial(torch.optim.SGD, lr=0.1, weight_decay=0.01, foreach=True)


# ---------------------------------------------------------------- the arena


def test_only_what_changed_is_sent(sim: ModuleType) -> None:
    arena = Arena(1000, torch.device("sim:0"))
    arena.host.copy_(torch.arange(1000))
    arena.push()
    arena.host[10], arena.host[14] = -1, -2
    arena.changed(10, 11)
    arena.changed(14, 15)
    with sim.counting() as found:
        arena.push()
        arena.push()
    assert (found.h2d, found.h2d_bytes, found.h2d_blocking) == (1, 40, 0)
    assert torch.equal(arena.device.cpu(), arena.host)


def test_a_copy_reads_what_the_host_had_then(sim: ModuleType) -> None:
    """The host runs ahead: no copy's source is written before the copy is done."""
    arena = Arena(4, torch.device("sim:0"))
    seen: list[int] = []
    for k in range(3 * STAGES):
        arena.host.fill_(k)
        arena.changed(0, 4)
        arena.push()
        sim.enqueue(lambda: seen.append(int(sim.host_view(arena.device)[0])))
    assert sim.pending() > 0
    sim.synchronize()
    assert seen == list(range(3 * STAGES))


def test_the_host_waits_for_the_oldest_of_many_copies_alone(sim: ModuleType) -> None:
    arena = Arena(4, torch.device("sim:0"))
    with sim.counting() as found:
        for _ in range(STAGES):
            arena.changed(0, 4)
            arena.push()
    assert found.blocked == 0
    with sim.counting() as found:
        arena.changed(0, 4)
        arena.push()
    assert found.blocked <= 1
    assert sim.pending() > 0


def test_stages_are_used_again(sim: ModuleType) -> None:
    arena = Arena(4, torch.device("sim:0"))
    for k in range(50):
        arena.host.fill_(k)
        arena.changed(0, 4)
        arena.push()
        sim.synchronize()
    # and what captures of the user may take
    assert sim.counters().pinned <= 2 + SPARES
    assert arena.device.tolist() == [49] * 4


# ---------------------------------------------------------------- a step


def test_a_call_whose_tensors_stay_is_a_launch_alone(sim: ModuleType) -> None:
    twins = SimTwins(PLAIN, cudagraphs=False)
    twins.step()
    twins.step(stay=True)
    with sim.counting() as found:
        twins.optimizer.step()
    assert (found.launches, found.h2d, found.d2h, found.syncs) == (1, 0, 0, 0)
    assert (found.allocations, found.pinned) == (0, 0)


@pytest.mark.slow
def test_moved_grads_are_one_copy_for_all_kernels(sim: ModuleType) -> None:
    twins = SimTwins(Clipped, whole=True, cudagraphs=False)
    for _ in range(3):
        twins.step()
    assert twins.report.launches == 2
    twins.set_grads()
    with sim.counting() as found:
        twins.optimizer.step()
    assert found.launches == 2
    assert found.h2d_blocking == 0
    # once for both kernels: what they need is known before the first starts
    assert found.h2d == 1


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False])
def test_steps_follow_the_current_stream(graphs: bool, sim: ModuleType) -> None:
    twins = SimTwins(Clipped, whole=True, cudagraphs=graphs)
    stream = sim.Stream()
    for k in range(6):
        with sim.stream(stream if k % 2 else sim.default_stream()):
            stream.wait_stream(sim.default_stream())
            twins.step()
            sim.default_stream().wait_stream(stream)
        assert twins.differences() == []


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [True, False])
def test_another_device_than_the_current_one(graphs: bool, sim: ModuleType) -> None:
    twins = SimTwins(Clipped, whole=True, device="sim:1", cudagraphs=graphs)
    for _ in range(5):
        twins.step()
        assert twins.differences() == []
    assert sim.current_device() == 0
    assert (sim.counters().replays > 0) == graphs


def test_tables_outlive_their_step_on_another_stream(sim: ModuleType) -> None:
    """Their memory is not given away while a kernel that reads it waits."""
    p = torch.nn.Parameter(torch.ones(40, device="sim"))
    p.grad = torch.ones(40, device="sim")
    optimizer = fuseopt.compile(torch.optim.SGD([p], lr=0.5), cudagraphs=False)
    optimizer.step()
    sim.synchronize()
    stream = sim.Stream()
    with sim.stream(stream):
        optimizer.step()
    del optimizer
    torch._dynamo.reset()
    gc.collect()
    junk = [torch.full((64,), -1, dtype=torch.int64, device="sim") for _ in range(20)]
    sim.current_stream().synchronize()
    stream.synchronize()
    assert p.tolist() == [0.0] * 40
    del junk


# ---------------------------------------------------------------- what can fail


@pytest.mark.parametrize("graphs", [True, False])
def test_a_failed_launch_names_kernel_and_file(graphs: bool, sim: ModuleType) -> None:
    twins = SimTwins(PLAIN, cudagraphs=graphs)
    twins.set_grads()
    sim.fail_launch()
    with pytest.raises(LaunchError, match=r"kernel0 failed on sim:0.*fuseopt_\w+\.py"):
        twins.optimizer.step()
    # nothing was written, and the next call is whole
    twins.step_eager()
    twins.optimizer.step()
    assert twins.differences() == []


@pytest.mark.family(5)
@pytest.mark.parametrize("n", range(1, 6))
def test_without_memory_for_tables_nothing_is_written(n: int, sim: ModuleType) -> None:
    twins = SimTwins(PLAIN)
    twins.set_grads()
    sim.fail_allocation(n)
    with pytest.raises(torch.OutOfMemoryError):
        twins.optimizer.step()
    sim.fail_allocation(0)
    for _ in range(3):
        twins.step_eager()
        twins.optimizer.step()
        assert twins.differences() == []


@pytest.mark.slow
def test_without_memory_in_a_capture_the_step_runs_without_one(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tables, "KEPT_REMOTE", 0)
    twins = SimTwins(Clipped, whole=True)
    twins.step()
    twins.set_grads()
    twins.step_eager()
    sim.fail_allocation(1)
    twins.optimizer.step()
    sim.fail_allocation(0)
    assert twins.report.cudagraph.startswith("off: capture failed")
    twins.step()
    assert twins.differences() == []


def test_a_device_without_an_entry_is_named(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(registry.DEVICES, "sim")
    with pytest.raises(ConfigError, match="fuseopt has no launcher for sim"):
        registry.type_of(torch.device("sim:0"))


# ---------------------------------------------------------------- Triton's own launch


class Driver:
    """A driver of Triton's that notes launches and has no device."""

    def __init__(self) -> None:
        self.current, self.launched, self.loaded = 0, [], 0
        self.launcher_cls = lambda source, metadata: self.launch
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**17},
            load_binary=self.load,
            unload_module=lambda module: None,  # from triton 3.9 on
        )

    def load(self, *args: Any) -> tuple[Any, ...]:
        self.loaded += 1
        return object(), 7000 + self.current, 32, 0, 1024

    def launch(self, *args: Any) -> None:
        self.launched.append((self.current, args))

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.current

    def set_current_device(self, index: int) -> None:
        self.current = index

    def get_current_stream(self, index: int) -> int:
        return 100 + index


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(type(triton.runtime.driver), "active", made)
    yield made
    gc.collect()  # kernels ask their driver to unload them, from triton 3.9 on


def _program(folder: Path, device: str) -> Any:
    (kernel,) = kernels(Case("AdamW"))
    module = TritonBuilder().load(TritonTarget().render(kernel), str(folder), False)
    return Compiled(module, torch.device(device))


@pytest.mark.slow
def test_a_kernel_is_compiled_and_loaded_ahead(driver: Driver, tmp_path: Path) -> None:
    program = _program(tmp_path, "cuda:0")
    assert driver.loaded == 1
    assert not driver.launched
    tables = [torch.zeros(4, dtype=torch.int64) for _ in TABLES]
    run = program.bind(5, tables)
    run()
    run()
    assert driver.loaded == 1
    assert len(driver.launched) == 2
    _, args = driver.launched[1]
    assert args[:5] == (5, 1, 1, 100, 7000)
    assert args[5] == program.kernel.packed_metadata
    assert args[6:9] == (None, None, None)
    sizes = tuple(program.module.sizes.values())
    assert args[9:] == (*(t.data_ptr() for t in tables), *sizes)


@pytest.mark.slow
def test_each_device_has_its_own(driver: Driver, tmp_path: Path) -> None:
    program = _program(tmp_path, "cuda:1")
    run = program.bind(1, [torch.zeros(1)] * len(TABLES))
    assert driver.current == 0
    run()
    ((current, args),) = driver.launched
    assert (current, args[3], args[4]) == (1, 101, 7001)
    assert driver.current == 0


@pytest.mark.slow
def test_profilers_are_told_of_launches(driver: Driver, tmp_path: Path) -> None:
    run = _program(tmp_path, "cuda:0").bind(3, [torch.zeros(1)] * len(TABLES))
    hooks = triton.knobs.runtime

    def listen(metadata: Any) -> None: ...

    hooks.launch_enter_hook.add(listen)
    try:
        run()
    finally:
        hooks.launch_enter_hook.remove(listen)
    ((_, args),) = driver.launched
    assert args[6].get()["name"] == "fuseopt_step"
    assert args[7:9] == (hooks.launch_enter_hook, hooks.launch_exit_hook)


def test_a_kernel_that_a_device_cannot_hold_is_refused_ahead(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any) -> Any:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(driver.utils, "load_binary", load)
    with pytest.raises(
        BuildError, match=r"fuseopt_\w+\.py for cuda:0: no kernel image"
    ):
        _program(tmp_path, "cuda:0")


def test_the_interpreter_is_refused_where_there_is_a_device(tmp_path: Path) -> None:
    (kernel,) = kernels(Case("AdamW"))
    source = TritonTarget().render(kernel)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET is set"):
        triton_factory(source, str(tmp_path), "cuda:0", interpret=True)


@pytest.mark.parametrize("name", ["cuda", "xpu"])
def test_entries_name_what_torch_has(name: str) -> None:
    kind = registry.DEVICES[name]
    module = torch.get_device_module(name)
    graph = getattr(module, kind.graph)
    taken = inspect.signature(graph.capture_begin).parameters
    assert {"pool", *kind.capture} <= set(taken)
    for needed in (
        "Stream",
        "Event",
        "stream",
        "device",
        "current_device",
        "current_stream",
        "graph_pool_handle",
        "is_current_stream_capturing",
    ):
        assert callable(getattr(module, needed)), needed
    assert {"capture_end", "replay", "reset"} <= set(dir(graph))
