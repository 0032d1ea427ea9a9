"""Run the command line `python -m fuseopt`; see fuseopt/cli/main.py."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
