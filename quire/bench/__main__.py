"""`python -m quire.bench` is `quire bench`."""

import sys

from quire.entrypoints.cli.main import main

sys.exit(main(["bench", *sys.argv[1:]]))
