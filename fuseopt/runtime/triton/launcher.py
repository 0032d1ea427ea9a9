"""Start a generated module's kernel without Triton's dispatch.

Triton's launch binds, specializes and looks up the arguments at each call. A step's
arguments never change. So fuseopt compiles a kernel ahead for its device. It calls
directly the function that Triton would call in the end.

All private names of Triton are here and in `ast_source` of `build`. They are the active
driver and its target, `make_backend`, `CompiledKernel.run` with its arguments, and the
chains of launch hooks. Checked with triton 3.6.0 and 3.7.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import BuildError, ConfigError
from .build import TritonModule, ast_source
from .interpreter import interpreting

#: Option that joins no products and sums. Triton warns where it is missing.
NO_FUSION = {"enable_fp_fusion": False}


class Interpreted:
    """A kernel in Triton's interpreter, over tables in memory that the CPU reads."""

    def __init__(self, module: TritonModule, device: torch.device) -> None:
        if not module.interpreted:
            raise ConfigError(
                "on CPU tensors the triton target runs in Triton's interpreter only. "
                "Set TRITON_INTERPRET=1 before Python starts, or use "
                'options={"target": "cpp"}.'
            )
        self.module = module

    def bind(self, programs: int, tables: Sequence[torch.Tensor]) -> Callable[[], None]:
        return functools.partial(self._start, programs, tuple(tables))

    def _start(self, programs: int, tables: Sequence[torch.Tensor]) -> None:
        module = self.module
        with interpreting():
            module.entry[(programs,)](*tables, **module.sizes, **module.options)


class Compiled:
    """A kernel compiled for the device at hand, and loaded there."""

    def __init__(self, module: TritonModule, device: torch.device) -> None:
        if module.interpreted:
            raise ConfigError(
                f"TRITON_INTERPRET is set, but the tensors are on {device}. Unset it "
                "to run the kernel there."
            )
        import triton
        from triton.compiler import make_backend

        self.module = module
        self.driver = triton.runtime.driver.active
        self.hooks = triton.knobs.runtime
        self.index = 0 if device.index is None else device.index
        with self._current():
            target = self.driver.get_current_target()
            known_options = make_backend(target).parse_options(NO_FUSION).__dict__
            options = {k: v for k, v in module.options.items() if k in known_options}
            try:
                self.kernel = triton.compile(
                    ast_source(module), target=target, options=options
                )
                # loads the binary, and refuses one that the device cannot hold
                self.start = self.kernel.run
            except Exception as error:
                raise BuildError(
                    f"triton refused {module.path} for {device}: {error}"
                ) from error

    def _current(self) -> Any:
        return _Current(self.driver, self.index)

    def bind(self, programs: int, tables: Sequence[torch.Tensor]) -> Callable[[], None]:
        kernel, start, hooks = self.kernel, self.start, self.hooks
        function, metadata = kernel.function, kernel.packed_metadata
        driver, index = self.driver, self.index
        device_now, stream_of = driver.get_current_device, driver.get_current_stream
        # Triton takes an integer as an address; it would query a tensor at each call
        args = (*(t.data_ptr() for t in tables), *self.module.sizes.values())
        grid = (programs, 1, 1)

        def run() -> None:
            if device_now() != index:
                with self._current():
                    run()
                return
            stream = stream_of(index)
            enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
                # a profiler is active
                launch_metadata = kernel.launch_metadata(grid, stream, *args)
                start(
                    *grid,
                    stream,
                    function,
                    metadata,
                    launch_metadata,
                    enter,
                    leave,
                    *args,
                )
            else:
                start(*grid, stream, function, metadata, None, None, None, *args)

        return run


class _Current:
    """Makes a device current for Triton's driver, and restores the former one."""

    def __init__(self, driver: Any, index: int) -> None:
        self.driver = driver
        self.index = index

    def __enter__(self) -> None:
        self.before = self.driver.get_current_device()
        if self.before != self.index:
            self.driver.set_current_device(self.index)

    def __exit__(self, *_: object) -> None:
        if self.before != self.index:
            self.driver.set_current_device(self.before)
