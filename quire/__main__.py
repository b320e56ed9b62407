"""`python -m quire` is the command line."""

import sys

from quire.entrypoints.cli.main import main

sys.exit(main())
