"""`python -m runtime.profile`."""

import os
import sys

from runtime.profile.main import main

if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in a run's processes; read when torch is imported
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of libraries must not keep a profile that is done
