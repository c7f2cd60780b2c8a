"""How many GPUs this machine shows, asked in a child with a deadline: a broken driver hangs whoever asks it."""

import contextlib
import json
import os
import subprocess
import sys

from planner.record import record

PROBE_S = 10.0
_PROBE = """
import ctypes, json, os
lib = ctypes.CDLL(os.environ.get("HEXCTL_NVML") or "libnvidia-ml.so.1")
code = lib.nvmlInit_v2()
n = ctypes.c_uint()
assert code == 0 and lib.nvmlDeviceGetCount_v2(ctypes.byref(n)) == 0, f"NVML answers with code {code}"
def text(function, *args):
    buffer = ctypes.create_string_buffer(96)
    return buffer.value.decode("utf-8", "replace") if function(*args, buffer, 96) == 0 else ""
driver, names = "", []
try:
    driver = text(lib.nvmlSystemGetDriverVersion)
    for i in range(n.value):
        handle = ctypes.c_void_p()
        if lib.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle)) == 0:
            names.append(text(lib.nvmlDeviceGetName, handle))
except AttributeError:
    pass  # a library that counts and tells no more
print(json.dumps({"count": n.value, "driver": driver, "names": [x for x in names if x]}))
"""


@record
class Gpus:
    """`count` is None when the driver does not answer in time; 0 with a reason when there is none."""

    count: int | None
    reason: str = ""
    driver: str = ""
    names: tuple[str, ...] = ()  # of the cards, as the driver gives them


def probe() -> Gpus:
    """Ask the driver."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Gpus(count=None, reason=f"the driver does not answer within {PROBE_S:.0f} s")
    if done.returncode == 0:
        with contextlib.suppress(ValueError, KeyError):
            found = json.loads(done.stdout)
            return Gpus(count=int(found["count"]), driver=found["driver"], names=tuple(found["names"]))
    return Gpus(count=0, reason=(done.stderr.strip().splitlines() or ["no library"])[-1])


def visible() -> int:
    """GPUs a run may look for: none where CUDA_VISIBLE_DEVICES hides them all or the driver does not answer."""
    return 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else probe().count or 0
