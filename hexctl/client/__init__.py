"""The client of a daemon's API: httpx over its Unix socket.

`Client` is for commands and scripts, `AsyncClient` for the dashboard. Both raise the errors of `runtime.errors`:
UnreachableError when nobody answers in time, RefusedError when the daemon (or a permission) says no, ConfigError for a
request the daemon does not understand.
"""

from hexctl.client.aio import AsyncClient
from hexctl.client.sync import Client

__all__ = ["AsyncClient", "Client"]
