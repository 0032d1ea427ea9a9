"""fuseopt compiles optimizer steps: `torch.compile(opt.step, backend="fuseopt")`."""

from .backend import fuseopt, reports
from .explain import Report

__version__ = "0.1.0"
__all__ = ["Report", "__version__", "fuseopt", "reports"]
