"""The simulated accelerator shows what it is there to show: see tests/simulated."""

from __future__ import annotations

import copy
import gc
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.op_cases import OPS


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


# ---------------------------------------------------------------- asynchronous


def test_pinned_memory_written_before_the_copy_has_read_it_gives_wrong_bits(
    sim: ModuleType,
) -> None:
    host, t = pinned(1.0, 2.0), torch.zeros(2, device="sim")
    t.copy_(host, non_blocking=True)
    host.fill_(7.0)
    assert t.tolist() == [7.0, 7.0]


def test_an_event_says_when_pinned_memory_is_free(sim: ModuleType) -> None:
    host, t, done = pinned(1.0, 2.0), torch.zeros(2, device="sim"), torch.Event("sim")
    t.copy_(host, non_blocking=True)
    done.record()
    done.synchronize()
    host.fill_(7.0)
    assert t.tolist() == [1.0, 2.0]


def test_pinned_memory_is_not_given_away_while_a_copy_waits(sim: ModuleType) -> None:
    t = torch.zeros(2, device="sim")
    t.copy_(pinned(1.0, 2.0), non_blocking=True)
    other = pinned(5.0, 5.0)
    assert t.tolist() == [1.0, 2.0]
    assert other.tolist() == [5.0, 5.0]


def test_pageable_memory_is_read_at_the_call(sim: ModuleType) -> None:
    host, t = torch.ones(2), torch.zeros(2, device="sim")
    t.copy_(host, non_blocking=True)
    host.fill_(7.0)
    assert t.tolist() == [1.0, 1.0]


def test_work_waits_until_somebody_waits_for_it(sim: ModuleType) -> None:
    ran: list[int] = []
    for k in range(3):
        sim.enqueue(lambda k=k: ran.append(k))
    assert ran == []
    assert sim.pending() == 3
    sim.synchronize()
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("wait", ["stream", "event", "device", "item", "op", "copy"])
def test_what_waits(sim: ModuleType, wait: str) -> None:
    t = torch.zeros(2, device="sim")
    before = sim.counters().syncs
    sim.enqueue(lambda: sim.host_view(t).fill_(3.0))
    assert sim.host_view(t).tolist() == [0.0, 0.0]
    if wait == "stream":
        sim.current_stream().synchronize()
    elif wait == "event":
        event = torch.Event("sim")
        event.record()
        event.synchronize()
    elif wait == "device":
        torch.accelerator.synchronize()
    elif wait == "item":
        assert t.sum().item() == 6.0
    elif wait == "op":
        t.add_(0.0)
    else:
        t.cpu()
    assert sim.host_view(t).tolist() == [3.0, 3.0]
    # an op runs in its stream, and the host does not wait for it
    assert sim.counters().syncs - before == (wait != "op")


def test_an_event_asked_again_and_again_is_done_at_last(sim: ModuleType) -> None:
    event = torch.Event("sim")
    assert event.query()
    sim.enqueue(lambda: None)
    event.record()
    asked = [event.query() for _ in range(3)]
    assert asked[0] is False
    assert asked[-1] is True


@pytest.mark.parametrize("joined", [False, True])
def test_streams_without_an_event_between_them_run_in_another_order(
    sim: ModuleType, joined: bool
) -> None:
    t = torch.zeros(2, device="sim")
    side = sim.Stream()
    with sim.stream(side):
        sim.enqueue(lambda: sim.host_view(t).fill_(3.0))
    if joined:
        sim.current_stream().wait_stream(side)
    seen: list[float] = []
    sim.enqueue(lambda: seen.extend(sim.host_view(t).tolist()))
    sim.current_stream().synchronize()
    assert seen == ([3.0, 3.0] if joined else [0.0, 0.0])


def test_memory_freed_too_early_on_another_stream_holds_junk(sim: ModuleType) -> None:
    t = torch.ones(2, device="sim")
    view = sim._C().host_view(t, False)  # keeps nothing alive
    seen: list[float] = []
    with sim.stream(sim.Stream()):
        sim.enqueue(lambda: seen.extend(view.tolist()))
        del t
        sim.current_stream().synchronize()
    assert seen != [1.0, 1.0]


def test_memory_freed_on_its_own_stream_is_safe(sim: ModuleType) -> None:
    t = torch.ones(2, device="sim")
    view = sim._C().host_view(t, False)
    seen: list[float] = []
    sim.enqueue(lambda: seen.extend(view.tolist()))
    del t
    again = torch.empty(2, device="sim")
    sim.synchronize()
    assert seen == [1.0, 1.0]
    assert again.data_ptr() == view.data_ptr()
    assert again.tolist() != [1.0, 1.0]


def test_the_current_stream_belongs_to_a_thread(sim: ModuleType) -> None:
    seen: list[torch.Stream] = []
    side = sim.Stream()
    with sim.stream(side):
        thread = threading.Thread(target=lambda: seen.append(sim.current_stream()))
        thread.start()
        thread.join()
        assert sim.current_stream() == side
    assert seen[0].stream_id == 0


def test_devices_have_streams_of_their_own(sim: ModuleType) -> None:
    ran: list[str] = []
    sim.enqueue(lambda: ran.append("sim:0"))
    with sim.device(1):
        sim.enqueue(lambda: ran.append("sim:1"))
        sim.synchronize()
    assert ran == ["sim:1"]
    assert sim.current_device() == 0


def test_a_copy_between_devices_is_in_the_order_of_both(sim: ModuleType) -> None:
    t = torch.zeros(2, device="sim:0")
    view = sim._C().host_view(t, False)  # keeps nothing alive
    sim.enqueue(lambda: view.fill_(3.0))
    other = t.to("sim:1")
    del t
    again = torch.empty(2, device="sim:0")
    assert again.data_ptr() == view.data_ptr()
    again.fill_(5.0)
    assert other.tolist() == [3.0, 3.0]


# ------------------------------------------------------------------------- ops

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES += (torch.int64, torch.int32, torch.uint8, torch.bool)
DTYPES += (torch.complex64, torch.complex128)
LAYOUTS = ("dense", "strided", "number")


class Untouched(TorchDispatchMode):
    """Compares what each ATen call may only read, before it and after it.

    `called`: the calls; `written`: those that wrote to such a tensor.
    """

    def __init__(self, sim: ModuleType) -> None:
        super().__init__()
        self.sim = sim
        self.called: set[str] = set()
        self.written: set[str] = set()

    def contents(self, t: torch.Tensor) -> bytes:
        torch.accelerator.synchronize()
        there = t.device.type == "sim"
        view = self.sim.host_view(t) if there else t.detach()
        data = view.contiguous().clone().flatten()
        return data.view(torch.uint8).numpy().tobytes()

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """As the call is, between two looks at its arguments."""
        kwargs = kwargs or {}
        names = [x.name for x in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        read: list[torch.Tensor] = []
        for x in func._schema.arguments:
            if x.alias_info is None or not x.alias_info.is_write:
                value = given.get(x.name)
                values = value if isinstance(value, (list, tuple)) else [value]
                read += [t for t in values if isinstance(t, torch.Tensor)]
        before = [self.contents(t) for t in read]
        out = func(*args, **kwargs)
        self.called.add(str(func))
        if before != [self.contents(t) for t in read]:
            self.written.add(str(func))
        return out


def operands(dtype: torch.dtype, layout: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    numbers = [torch.randn(6, 8) * 3 for _ in range(3)]
    if dtype.is_complex:
        numbers = [torch.complex(x, x.flip(0)) for x in numbers]
    if layout == "number":
        return [x[0, 0].abs().to(dtype) for x in numbers]
    return [
        x.to(dtype)[:, ::2] if layout == "strided" else x.to(dtype) for x in numbers
    ]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.family(8)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_op_leaves_alone_what_it_only_reads(
    sim: ModuleType, dtype: torch.dtype, layout: str
) -> None:
    """For all ops of the table of rules, and all types that they take on a CPU."""
    more = {"root": lambda x, y, z: x.sqrt(), "copy": lambda x, y, z: x.clone()}
    watch = Untouched(sim)
    ran = 0
    for op in (*OPS.values(), *more.values()):
        there = [x.to("sim") for x in operands(dtype, layout)]
        try:
            op(*operands(dtype, layout))
        except (RuntimeError, IndexError, TypeError):
            continue  # nothing for this type, or for a number
        with watch:
            op(*there)
        ran += 1
    assert watch.written == set()
    assert ran >= 5
    assert watch.called


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_a_root_in_a_capture_leaves_its_argument_alone(
    sim: ModuleType, dtype: torch.dtype
) -> None:
    x = torch.tensor([4.0, 9.0], dtype=dtype).to("sim")
    out, graph = torch.zeros_like(x), sim.Graph()
    with sim.graph(graph):
        torch.sqrt(x, out=out)
    for _ in range(2):
        graph.replay()
        assert out.tolist() == [2.0, 3.0]
        assert x.tolist() == [4.0, 9.0]


# ---------------------------------------------------------------------- graphs


def test_a_graph_records_and_reads_memory_as_it_is_at_the_replay(
    sim: ModuleType,
) -> None:
    t, total = torch.ones(2, device="sim"), torch.zeros(2, device="sim")
    graph = sim.Graph()

    def kernel() -> None:
        sim.host_view(total).add_(sim.host_view(t))

    with sim.graph(graph):
        sim.enqueue(kernel)
    assert total.tolist() == [0.0, 0.0]
    graph.replay()
    t.fill_(10.0)
    graph.replay()
    assert total.tolist() == [11.0, 11.0]
    assert sim.counters().replays == 2


def test_ops_in_a_capture_run_at_the_replay(sim: ModuleType) -> None:
    a, b = torch.ones(2, device="sim"), torch.full((2,), 2.0, device="sim")
    graph = sim.Graph()
    with sim.graph(graph):
        c = a + b
        torch._foreach_mul_([a, c], 3.0)
        b.copy_(c)
    assert (a.tolist(), b.tolist()) == ([1.0, 1.0], [2.0, 2.0])
    graph.replay()
    assert (a.tolist(), b.tolist(), c.tolist()) == ([3.0] * 2, [9.0] * 2, [9.0] * 2)


def test_a_captured_copy_reads_pinned_memory_at_each_replay(sim: ModuleType) -> None:
    host, t = pinned(1.0, 2.0), torch.zeros(2, device="sim")
    graph = sim.Graph()
    with sim.graph(graph):
        t.copy_(host, non_blocking=True)
    host.fill_(4.0)
    graph.replay()
    assert t.tolist() == [4.0, 4.0]


FORBIDDEN = {
    "item": lambda sim, t: t[0].item(),
    "to the host": lambda sim, t: t.cpu(),
    "blocking copy": lambda sim, t: t.copy_(torch.ones(2)),
    "pageable copy": lambda sim, t: t.copy_(torch.ones(2), non_blocking=True),
    "stream": lambda sim, t: sim.current_stream().synchronize(),
    "other stream": lambda sim, t: sim.default_stream().synchronize(),
    "device": lambda sim, t: sim.synchronize(),
    "nonzero": lambda sim, t: t.nonzero(),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_wait_breaks_a_capture(sim: ModuleType, what: str) -> None:
    t, graph = torch.zeros(2, device="sim"), sim.Graph()
    with sim.stream(sim.Stream()):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="when stream is capturing"):
            FORBIDDEN[what](sim, t)
        assert sim.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            graph.capture_end()
        assert not sim.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()
    assert t.tolist() == [0.0, 0.0]


def test_waits_elsewhere_break_a_global_capture_only(sim: ModuleType) -> None:
    event = torch.Event("sim")
    event.record()
    for mode in ("relaxed", "thread_local", "global"):
        graph, failed = sim.Graph(), []
        with sim.stream(sim.Stream()):
            graph.capture_begin(capture_error_mode=mode)

            def wait(failed: list[str] = failed) -> None:
                try:
                    event.synchronize()
                except RuntimeError as error:
                    failed.append(str(error))

            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
            sim.enqueue(lambda: None)
            if mode == "global":
                with pytest.raises(RuntimeError, match="previous error"):
                    graph.capture_end()
            else:
                graph.capture_end()
        assert bool(failed) == (mode == "global")


def test_a_stream_joins_a_capture_and_must_come_back(sim: ModuleType) -> None:
    for back in (True, False):
        ran: list[int] = []
        graph, side = sim.Graph(), sim.Stream()
        with sim.stream(sim.Stream()):
            graph.capture_begin()
            side.wait_stream(sim.current_stream())
            with sim.stream(side):
                sim.enqueue(lambda ran=ran: ran.append(1))
            if back:
                sim.current_stream().wait_stream(side)
                graph.capture_end()
                graph.replay()
                sim.synchronize()
                assert ran == [1]
            else:
                with pytest.raises(RuntimeError, match="unjoined work"):
                    graph.capture_end()


def test_a_capture_waits_for_nothing_outside_of_it(sim: ModuleType) -> None:
    event, graph = torch.Event("sim"), sim.Graph()
    event.record()
    with sim.stream(sim.Stream()):
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="uncaptured work"):
            sim.current_stream().wait_event(event)
        with pytest.raises(RuntimeError, match="previous error"):
            graph.capture_end()


def test_a_graph_is_not_captured_on_the_default_stream(sim: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        sim.Graph().capture_begin()


def test_an_empty_graph_warns(sim: ModuleType) -> None:
    with pytest.warns(UserWarning, match="graph is empty"), sim.graph(sim.Graph()):
        pass


def test_memory_of_a_capture_comes_from_the_pool_of_its_graph(sim: ModuleType) -> None:
    before = sim.memory_allocated()
    pool = sim.graph_pool_handle()
    first, second = sim.Graph(), sim.Graph()
    with sim.graph(first, pool=pool):
        t = torch.ones(100, device="sim")
    assert first.pool() == pool
    assert first.pool_bytes() == 512
    address = t.data_ptr()
    del t
    outside = torch.ones(100, device="sim")
    assert outside.data_ptr() != address
    with sim.graph(second, pool=pool):
        again = torch.ones(100, device="sim")
    assert again.data_ptr() == address
    assert second.pool_bytes() == 512
    del again
    first.reset()
    second.reset()
    # the memory went back to its stream
    held = {outside.data_ptr()}
    assert sim.memory_allocated() - before == 512
    assert address not in held


def test_a_pool_is_not_used_again_when_its_graphs_are_gone(sim: ModuleType) -> None:
    t, pool, stream = (
        torch.zeros(2, device="sim"),
        sim.graph_pool_handle(),
        sim.Stream(),
    )

    def capture() -> None:
        with sim.graph(made := sim.CUDAGraph(), pool=pool, stream=stream):
            t.add_(1)
        graphs.append(made)

    graphs: list[object] = []
    capture()
    capture()
    graphs.pop(0)
    capture()
    for graph in graphs:
        graph.reset()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="use_count > 0 INTERNAL ASSERT FAILED"):
        capture()
    sim.reset()


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_capture_may_not_ask_for_pinned_memory(sim: ModuleType, mode: str) -> None:
    t = torch.zeros(2, device="sim")
    with (
        pytest.raises(RuntimeError, match="pinned memory"),
        sim.graph(sim.CUDAGraph(), capture_error_mode=mode),
    ):
        t.copy_(pinned(1.0, 2.0), non_blocking=True)


def test_a_broken_capture_leaves_the_generator_in_it(sim: ModuleType) -> None:
    torch.rand(1, device="sim")
    graph, t = sim.CUDAGraph(), torch.zeros(2, device="sim")
    with sim.graph(graph):
        t.normal_()
    torch.rand(1, device="sim")
    with pytest.raises(RuntimeError, match="value"), sim.graph(sim.CUDAGraph()):
        t.sum().item()
    with pytest.raises(RuntimeError, match="Offset increment outside graph capture"):
        torch.rand(1, device="sim")
    torch.rand(1, device="sim:1")
    with sim.graph(graph := sim.CUDAGraph()):
        t.add_(1)
    torch.rand(1, device="sim")


def test_a_replay_keeps_the_work_that_waits_alive(sim: ModuleType) -> None:
    ran: list[int] = []
    graph = sim.Graph()
    with sim.graph(graph):
        sim.enqueue(lambda: ran.append(1))
    graph.replay()
    graph.reset()
    del graph
    gc.collect()
    sim.synchronize()
    assert ran == [1]


# ------------------------------------------------------------ counters, faults


def test_counters(sim: ModuleType) -> None:
    host = pinned(1.0, 2.0)
    with sim.counting() as seen:
        t = torch.empty(2, device="sim")
        t.copy_(host, non_blocking=True)
        t.copy_(torch.ones(2))
        sim.enqueue(lambda: None)
        t.add_(1.0)
        del t
    assert (seen.h2d, seen.h2d_bytes, seen.h2d_blocking) == (2, 16, 1)
    assert (seen.launches, seen.executed, seen.syncs) == (1, 1, 1)
    assert (seen.allocations, seen.frees) == (1, 1)
    assert seen.ops == {"aten::add": 1}


def test_the_nth_allocation_is_out_of_memory(sim: ModuleType) -> None:
    sim.fail_allocation(2)
    kept = torch.empty(4, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(4, device="sim")
    assert torch.empty(4, device="sim").data_ptr() != kept.data_ptr()


def test_the_nth_launch_fails(sim: ModuleType) -> None:
    ran: list[int] = []
    sim.fail_launch(2)
    sim.enqueue(lambda: ran.append(1))
    with pytest.raises(RuntimeError, match="invalid configuration argument"):
        sim.enqueue(lambda: ran.append(2))
    sim.enqueue(lambda: ran.append(3))
    sim.synchronize()
    assert ran == [1, 3]


# ------------------------------------------------------------------ a device


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_tensors_of_two_devices_are_an_error(sim: ModuleType, other: str) -> None:
    t = torch.ones(2, device="sim:0")
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        t.add_(torch.ones(2, device=other))
    assert t.add_(torch.tensor(2.0)).tolist() == [3.0, 3.0]


def test_ops_give_the_bits_of_the_cpu(sim: ModuleType) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 7), torch.randn(7, 5)
    a, b = x.to("sim"), y.to("sim")
    for f in (
        lambda x, y: x @ y,
        lambda x, y: x.t()[1:, ::2] * y[1:, ::2],
        lambda x, y: torch.stack([x, y.t()]).norm(dim=0),
        lambda x, y: torch.cat([x[x > 0], y.view(torch.int32).flatten().float()]),
        lambda x, y: torch._foreach_norm([x, y])[1],
        lambda x, y: torch.add(x, 1, out=x.new_empty(0)),
        lambda x, y: x.clone().index_add_(0, (y[:3, 0] > 0).long(), y[:3, :7] @ x),
        lambda x, y: torch.view_as_complex(x[:4].reshape(14, 2)).conj().imag,
    ):
        assert torch.equal(f(a, b).cpu(), f(x, y))


def test_a_tensor_is_copied_moved_and_resized(sim: ModuleType) -> None:
    t = torch.arange(6.0, device="sim:1").view(2, 3).t()
    assert copy.deepcopy(t).stride() == t.stride()
    assert copy.deepcopy(t).device == t.device
    assert t.to("sim:0").tolist() == t.cpu().tolist()
    t.resize_(4, 4)
    assert t.flatten().tolist()[:6] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    other = torch.empty(0, device="sim:1").set_(t.untyped_storage(), 2, (2,), (3,))
    assert other.tolist() == [2.0, 5.0]
    assert torch.nn.Parameter(other).data_ptr() == other.data_ptr()


def test_eager_steps_run_on_it(sim: ModuleType) -> None:
    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.randn(5).to(device))
        opt = torch.optim.AdamW([p], lr=0.1, foreach=True)
        for _ in range(3):
            p.grad = torch.randn(5).to(device)
            opt.step()
        assert opt.state[p]["step"].device.type == "cpu"
        return p.tolist()

    assert train("sim:1") == train("cpu")


def test_it_is_hidden_where_no_test_asks_for_it(sim: ModuleType) -> None:
    assert torch.accelerator.is_available()
    sim.set_available(False)
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) is None
