"""A machine for the kernels of a GPU, on a CPU: Triton's PTX for sm_90, carried out.

    text.py       PTX -> instructions, each with its line in the kernel's source
    encode.py     instructions -> numbers of registers and functions
    uses.py       where what a load has loaded is used
    machine.cpp   runs them; arithmetic.h, memory.h, order.h, values.h are its parts
    machine.py    `Machine(ptx).run(programs, addresses, regions, seed)` -> a `Run`
    kernels.py    kernels of "sim" (tests/simulated), launched, captured and replayed
    twins.py      an optimizer in eager, and the same on "sim" with these kernels

With seed 0 the programs run in order, the threads of a warp together; accesses of warps
are counted in sectors of 32 bytes. With another seed any thread may be the next one.
What the machine reports, with the line of the kernel:

- memory that no tensor or table has, accesses that are not aligned to their size;
- memory, shared memory and registers that are used before anything has written them;
- accesses of the same bytes by several threads, one of them a write, that no barrier
  and no atomic orders: by what the kernel says, whatever order this run had;
- barriers and warps' instructions that some threads leave out.

A program's threads may read what one of them overwrites, if they use it for nothing:
all load a lane's number, and one stores the new one.

It follows unwritten registers in parts of 16 bits, and not through all arithmetic: in a
step of split masters it takes numbers for unwritten that have the right bits.

It has no calls: kernels with powers of float64 (ASGD; capturable steps in float64) call
a function, and are refused with a ValueError.

Estimates (`div.full`, `rcp.approx`, `ex2.approx`, `lg2.approx`) are exact here, except
`sqrt.approx`, which is off by as much as it may be. Stores are seen at once, so what
only a weak memory shows is found by its missing order.
"""

from __future__ import annotations
