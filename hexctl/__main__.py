"""`python -m hexctl` is `hexctl`."""

import sys

from hexctl.cli.main import main

sys.exit(main())
