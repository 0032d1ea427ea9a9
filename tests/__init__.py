"""The tests: a folder for each room of the package, and what goes across rooms.

`numerics`: the bits of eager; `gpu`: what `make gpu` runs; `tools`: the tools of
tests and benchmarks, and the pages. Beside them: what several folders share.
"""

from pathlib import Path

#: The checkout.
ROOT = Path(__file__).parent.parent
