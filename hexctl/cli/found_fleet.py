"""The GPUs of this machine as the planner's cluster, found as `hexctl up` finds them: in a child, which the console waits for.

The console holds no driver and no runtime; the child answers with the cluster and what was left out, or with the error.
"""

import base64
import pickle
import subprocess
import sys

from planner.cluster import Cluster
from runtime.config.schema import Config
from runtime.errors import FleetError

FIND_S = 60.0
_FIND = """
import base64, pickle, sys
from runtime.backends.fleet import discover
from runtime.config.schema import Config
from runtime.errors import RunError
try:
    found = discover(Config.model_validate_json(sys.stdin.read()))
    said = ("found", found.cluster, found.notes)
except RunError as e:
    said = ("error", e.what, e.where, e.got, e.hint)
print(base64.b64encode(pickle.dumps(said)).decode())
"""
_DECLARED = 'to plan the devices that the file lists: --set fleet.source="declared"'


def found_cluster(config: Config) -> tuple[Cluster, tuple[str, ...]]:
    """The free GPUs, and in words why others are left out. FleetError where there are none or the driver does not answer."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FIND],
            input=config.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=FIND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FleetError(
            "the driver does not answer", where="fleet.source", got=f"nothing within {FIND_S:.0f} s", hint=_hint(config)
        ) from None
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise FleetError("the GPUs of this machine cannot be looked for", where="fleet.source", got=why)
    said = pickle.loads(base64.b64decode(done.stdout.strip().splitlines()[-1]))
    if said[0] == "found":
        return said[1], said[2]
    _, what, where, got, hint = said
    raise FleetError(what, where=where, got=got, hint="; ".join(h for h in (hint, _hint(config)) if h))


def _hint(config: Config) -> str:
    return _DECLARED if config.fleet.devices else ""
