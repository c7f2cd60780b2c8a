"""Host of the reward workers: verifiers in children of this actor that can be killed hard."""

import inspect
from typing import Any

from runtime.backends.ray.actors.host import Broken, built, enter, level_of, resolve
from runtime.backends.ray.actors.identity import ActorLevel, Identity
from runtime.backends.ray.actors.marks import write_mark
from runtime.config.schema import Config
from runtime.paths import RunPaths


class RewardActor:
    """An async actor in a process group of its own. `build` names `(identity, config, paths) -> pool`."""

    def __init__(self, me: Identity, build: str, config: Config, paths: RunPaths) -> None:
        enter(me, own_group=True)
        write_mark(paths, me)
        self._me = me
        self._pool: Any = built(me, lambda: resolve(build)(me, config, paths))

    async def ping(self) -> ActorLevel:
        """The level now: `failed` with the reason when the pool could not be built."""
        return self._pool.level() if isinstance(self._pool, Broken) else level_of(self._me, "running")

    async def ready(self) -> None:
        """Raises what kept the pool from being built."""
        if isinstance(self._pool, Broken):
            raise self._pool.error

    async def score(self, *request: Any) -> Any:
        """Rewards of finished samples, as the pool answers."""
        value = self._pool.score(*request)
        return await value if inspect.isawaitable(value) else value
