"""Exceptions: one class for each kind of failure.

A message names the node, tensor or option at fault, and the next step. fuseopt raises
these errors before a step writes anything, so that a step happens whole or not at all.
One exception: ATen calls without a rule run between kernels. If such a call raises,
fuseopt restores what earlier kernels of the step wrote.
"""

from __future__ import annotations

import traceback
from pathlib import Path


class FuseoptError(RuntimeError):
    """Base of all errors raised by fuseopt.

    `constants_help`: True if a trace with constant numbers may avoid the error.
    """

    constants_help = True


class ConfigError(FuseoptError):
    """An unknown option or mode, or an invalid value for an option or environment
    variable.
    """


class CaptureError(FuseoptError):
    """Dynamo's graph cannot be read as an optimizer step."""


class EagerOnly(CaptureError):
    """A call or a kind of tensor that only eager can run; fuseopt warns once."""


class UnsupportedInput(FuseoptError):
    """A tensor of the step cannot be used: sparse, quantized, on the wrong device."""


class NotAnOptimizer(FuseoptError, TypeError):
    """The argument of fuseopt.compile is no torch.optim.Optimizer."""


class UnsupportedTorch(FuseoptError):
    """The installed torch lacks something that a step needs; nothing was written."""


class NotABackend(FuseoptError, TypeError):
    """The module `fuseopt` was passed or called in place of the backend."""


class AliasError(FuseoptError):
    """Two tensors that the step treats as separate overlap in memory."""


class GraphError(FuseoptError):
    """An invariant of the IR does not hold; always a defect of a pass."""


class CannotBuild(FuseoptError):
    """No kernel can be built: there is no compiler, or no folder for the result."""


class CompilerMissing(CannotBuild):
    """No usable compiler for the target, or $CXX names one that is missing."""


def is_own(error: Exception) -> bool:
    """Is an error a defect of fuseopt's own code, and not torch's verdict on the step?

    Both the class of the error and the last frame decide: torch must not have raised
    it.
    """
    if not isinstance(error, OWN):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or "torch" not in Path(frames[-1].filename).parts


#: Classes that torch does not use to reject a call.
OWN = (
    *(KeyError, IndexError, AttributeError, NameError),
    *(AssertionError, RecursionError, ZeroDivisionError),
)


class InternalError(FuseoptError):
    """A defect of fuseopt kept a step from being prepared.

    The message names the folder with the details. fuseopt raises this error only where
    the step may not run elsewhere.
    """


class BuildError(FuseoptError):
    """The compiler rejected generated source; the message holds its first lines."""


class VerifyError(FuseoptError):
    """With `options={"verify": True}`: bits of a step differ from those of eager."""


class LaunchError(FuseoptError):
    """A kernel launch failed; the message names the kernel and its dump."""


class CudaGraphError(FuseoptError):
    """With `options={"cudagraphs": "require"}`: CUDA cannot capture the step in a
    graph.
    """
