"""A simulated accelerator, "sim", for tests of what only an accelerator shows.

    sim = tests.simulated.load()      # or the fixture `sim`; it is torch.sim too
    t = torch.zeros(8, device="sim")  # there are two devices, sim:0 and sim:1

`sim` has the shape of torch.cuda: Stream, Event, current_stream, set_stream, stream(),
synchronize, device, device_count, current_device, set_device, default_stream,
is_current_stream_capturing, graph_pool_handle, Graph (also as CUDAGraph: capture_begin,
capture_end, replay, reset, pool) and graph(), the context manager. torch.accelerator,
torch.Stream, torch.Event, pinned memory and fake tensors know it. Beyond torch.cuda:

enqueue(function)       a kernel launch: queues a Python function on the current stream
host_view(t)            a CPU tensor over the memory of t, as it is now, without a wait
counters(), counting()  launches, executed, captured, captures, replays, h2d, h2d_bytes,
                        h2d_blocking, d2h, d2d, allocations, frees, pinned, syncs,
                        blocked (syncs that found unfinished work), ops (by name)
pending()               how many things are queued and not carried out
fail_allocation(n)      the n-th allocation from now raises torch.OutOfMemoryError
fail_launch(n)          the n-th launch from now raises RuntimeError
memory()                address and bytes of all that kernels may use
memory_allocated(d)     bytes in use; Graph.pool_bytes(): those of a graph's pool

It is asynchronous. Launches, replays, copies within the device and copies from pinned
memory with non_blocking=True are queued on their stream, and nothing moves before
somebody waits for it: a stream, an event or a device synchronised, `.item()`, a
blocking copy, any other op of ATen on that stream. Then only what is waited for runs,
and what that must follow. So memory of the host that is written again before a copy has
read it, or a stream that reads what another one writes without an event between
them, gives wrong bits in each run of a test and not in one of many.

It is strict. In a capture, work is recorded and not run; waits, blocking copies, copies
from pageable memory and waits for work outside of it raise, and break the capture.
Pinned memory is not made there. Memory of a capture comes from the graph's pool; a pool
of which no graph is left is not used again. A capture that breaks leaves its device's
generator in it until another one ends well: random numbers are refused meanwhile, as by
CUDA's. Tensors of two devices in one op raise, but for numbers in CPU tensors. Fresh
and freed memory holds junk.

Memory lies in the host, so that `data_ptr()` can be read there: by Triton's
interpreter, in a function given to `enqueue`. Ops of ATen run with the CPU's kernels.

Once loaded, the device stays registered in the process; the fixture hides it from
`torch.accelerator.is_available()` outside of its tests. `backward()` through tensors of
"sim" works only in a process whose first backward came after `load()`: set `.grad`.
"""

from __future__ import annotations

from .build import compiler
from .device import load

__all__ = ["compiler", "load"]
