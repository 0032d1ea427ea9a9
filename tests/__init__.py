"""The tests: a folder for each room of the package, and what goes across rooms.

`numerics`: the bits of eager; `gpu`: what `make gpu` runs; `wild`: trainings with
public packages; `tools`: the tools of tests and benchmarks, the examples, and the
pages. Beside them: what several folders share.
"""

import os
from pathlib import Path

#: The checkout.
ROOT = Path(__file__).parent.parent

# Read when torch is loaded, also by the processes that tests start. As many of these as
# there are processors run at once: threads that spin while they wait for work take the
# processor from another test.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
