"""The steps of a plan, one after another: kernels, runs of them, ATen calls.

`in_order` runs them on the tensors of a call; how a kernel is started is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..ir.graph import Kernel, Run
from .cpp.table import KernelTable
from .memory import Memory
from .plan import Plan


def prepared(plan: Plan, tensors: Sequence[torch.Tensor]) -> tuple[Memory, object]:
    """The memory of a plan of kernels alone, all of which is there before the first
    starts; and what is to be held until the last has ended.
    """
    memory = Memory(plan.memory, tensors, plan.pool, plan.position, plan.numbers or ())
    held = None if plan.blocks is None else plan.blocks.take(plan.pool)
    memory.allocate(plan.allocated)
    return memory, held


def in_order(
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    launch: Callable[[KernelTable], None],
    temps: Sequence[int] | None = None,
) -> Memory | None:
    """Run the steps of a plan; the memory of what they made, None if they made none.

    All memory that no ATen call returns is there before the first kernel starts:
    `temps`, or what the plan has of it.
    """
    if plan.simple:
        for table in plan.tables.values():
            launch(table)
        return None
    memory = Memory(plan.memory, tensors, plan.pool, plan.position, plan.numbers or ())
    held = plan.blocks.take(plan.pool)
    memory.allocate(plan.allocated if temps is None else temps)
    # what is known now goes to the device at once, before the first kernel
    for table in plan.on_devices:
        table.refresh()
    with torch.no_grad():
        for step in plan.order:
            if isinstance(step, (Kernel, Run)):
                launch(plan.tables[step.name])
            else:
                memory.run(plan.externs[step.payload])
    del held
    return memory
