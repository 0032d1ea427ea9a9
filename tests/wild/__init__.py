"""Trainings with public packages, in eager and with the one line that a user changes.

A file for each training; `trainings.py` lists them, `test_trainings.py` compares. What
is not installed is skipped by name: `make wild` installs all of it. nanoGPT's loop
needs no package, so that `make test` runs it.
"""

from tests.wild import inverses  # noqa: F401  before any package is imported
