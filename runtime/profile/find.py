"""What there is to measure on this machine: free cards by NVML, cores, and who it is."""

import os
import socket

from runtime.backends.fleet import free_cards
from runtime.backends.gpu_kinds import kind_of_name
from runtime.backends.ray.locks import owner
from runtime.errors import RunError
from runtime.profile.agenda import Card, Machine
from runtime.telemetry.client import report_once

_UNKNOWN_BYTES = 16e9  # memory of a card whose driver does not tell


def this_machine(*, gpus: bool = True) -> Machine:
    """The machine this process runs on. Cards of other runs and of foreign processes are left out, and said."""
    host, cores = socket.gethostname(), len(os.sched_getaffinity(0))
    if not gpus or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return Machine(host=host, cores=cores)
    try:
        report = report_once()
    except RunError as e:
        return Machine(host=host, cores=cores, notes=(e.what,))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    order = os.environ.get("CUDA_DEVICE_ORDER")
    free, notes = free_cards(report, visible_devices=visible, device_order=order, owner_of=owner, own_run=None)
    cards = tuple(
        Card(
            uuid=g.id,
            kind=kind_of_name(g.name) or g.name,
            name=g.name,
            memory_bytes=g.memory_total_bytes or _UNKNOWN_BYTES,
        )
        for g in free
    )
    return Machine(host=host, cards=cards, driver=report.driver, cores=cores, notes=notes)
