"""`python -m sidecar`: the same as the `epd-sidecar` command."""

import sys

from sidecar.cli import main

if __name__ == "__main__":
    sys.exit(main())
