"""The tests: a folder for each room of the package, and what goes across rooms.

`numerics`: the bits of eager; `gpu`: what `make gpu` runs; `wild`: trainings with
public packages; `tools`: the tools of tests and benchmarks, the examples, and the
pages. Beside them: what several folders share.
"""

from pathlib import Path

#: The checkout.
ROOT = Path(__file__).parent.parent
