"""One class per way to fail. Each message names the node, tensor or option at fault,
and what to do.

Every error here is raised before a step has written anything: a step is whole or not
at all. (An ATen call that no rule covers runs between kernels as it is; if that raises,
what the kernels before it have written is put back.)
"""

from __future__ import annotations

import traceback
from pathlib import Path


class FuseoptError(RuntimeError):
    """Base of all errors raised by fuseopt.

    `constants_help`: may a trace in which numbers are constants not raise it?
    """

    constants_help = True


class ConfigError(FuseoptError):
    """An option, mode or environment value that fuseopt does not know."""


class CaptureError(FuseoptError):
    """Dynamo's graph cannot be read as an optimizer step."""


class EagerOnly(CaptureError):
    """A call or a kind of tensor that only eager handles; the user is warned of it."""


class UnsupportedInput(FuseoptError):
    """A tensor handed to the step cannot be used: sparse, quantized, wrong device."""


class NotAnOptimizer(FuseoptError, TypeError):
    """fuseopt.compile was given something that is no torch.optim.Optimizer."""


class UnsupportedTorch(FuseoptError):
    """The installed torch gives no way to do what a step needs; nothing was written."""


class NotABackend(FuseoptError, TypeError):
    """The module fuseopt was called, where the backend of that name was meant."""


class AliasError(FuseoptError):
    """Two tensors that the step treats as separate turned out to overlap in memory."""


class GraphError(FuseoptError):
    """An invariant of the IR does not hold; always a defect of a pass."""


class CannotBuild(FuseoptError):
    """No kernel can be built here: no compiler, or nowhere to write one."""


class CompilerMissing(CannotBuild):
    """No usable compiler for the target on this machine, or not the one of $CXX."""


def is_own(error: Exception) -> bool:
    """Is an error a slip of fuseopt's own code, and no word of torch's about the step?

    By its kind, and by where it was raised: not within torch.
    """
    if not isinstance(error, OWN):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or "torch" not in Path(frames[-1].filename).parts


#: What torch does not raise to say that a call cannot be.
OWN = (
    *(KeyError, IndexError, AttributeError, NameError),
    *(AssertionError, RecursionError, ZeroDivisionError),
)


class InternalError(FuseoptError):
    """A step could not be made ready, through a fault of fuseopt's; the message names
    the folder that tells of it. Raised where no step may run elsewhere.
    """


class BuildError(FuseoptError):
    """The compiler refused generated source; the message holds its first lines."""


class VerifyError(FuseoptError):
    """`options={"verify": True}`: a step gave other bits than eager does."""


class LaunchError(FuseoptError):
    """A kernel failed when it was launched; the message names it and its dump."""


class CudaGraphError(FuseoptError):
    """`options={"cudagraphs": "require"}`: a step cannot be captured in a graph."""
