"""`python -m runtime.profile.beside engine|trainer CONFIG.json FOLDER`: a run's other role at work until stdin ends.

The devices of a CPU share its cores, so what a role does on one depends on what the other does meanwhile: each is measured beside
the other. Says "ready" once it works.
"""

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from runtime.config.schema import Config
from runtime.profile.scratch import scratch_prefix

READY_S = 30.0


@contextlib.contextmanager
def at_work(role: str, config: Config, folder: Path) -> Iterator[None]:
    """The role at work in a process of its own for as long as the context lasts; nobody where it does not come up in time."""
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(), dir=folder) as made:
        file = Path(made) / "config.json"
        file.write_text(config.model_dump_json())
        command = [sys.executable, "-m", "runtime.profile.beside", role, str(file), made]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            waiting = threading.Thread(target=child.stdout.readline if child.stdout else lambda: None, daemon=True)
            waiting.start()
            waiting.join(READY_S)
            yield
        finally:
            child.kill()
            child.communicate()


def main() -> int:
    """Work until there is nobody to work beside."""
    role, file, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    config = Config.model_validate_json(file.read_text())
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait, name="stdin", daemon=True).start()
    import torch

    from runtime.profile import own

    device = torch.device("cpu")
    torch.set_num_threads(own.threads_of(f"run_{role}", device))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if role == "engine":
        own.decode_until(config, device, Path(folder), ended.is_set)
    else:
        own.train_until(config, device, Path(folder), ended.is_set)
    return 0


if __name__ == "__main__":
    sys.exit(main())
