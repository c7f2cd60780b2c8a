"""`python -m runtime.daemon`."""

import sys

from runtime.daemon.main import main

if __name__ == "__main__":
    sys.exit(main())
