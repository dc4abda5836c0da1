"""The command line: ``python -m sam_optax``."""

import sys

from sam_optax.experiments.entry import main

if __name__ == "__main__":
    sys.exit(main())
