"""How fast: compile time, step time and host cost, each beside its contenders."""

import os

# what is measured is the compiled step, also where eager would be faster
os.environ.setdefault("FUSEOPT_EAGER_IF_FASTER", "0")
