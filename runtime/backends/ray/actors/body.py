"""Host of a replica or a trainer: one process in a group of its own, the workload's loop in a thread."""

from runtime.backends.ray.actors.host import Work, enter, resolve
from runtime.backends.ray.actors.identity import ActorLevel, Identity
from runtime.backends.ray.actors.marks import write_mark
from runtime.config.schema import Config
from runtime.paths import RunPaths


class BodyActor:
    """Created detached in the body's placement group; `max_restarts=0`: the daemon is the healer.

    `build` names a function `(identity, config, paths, ready) -> str` that builds the workload, calls `ready(gauge)`, runs it to
    its end and returns how it ended.
    """

    def __init__(self, me: Identity, build: str, config: Config, paths: RunPaths) -> None:
        enter(me, own_group=True)
        write_mark(paths, me)
        self._work = Work(me, lambda ready: str(resolve(build)(me, config, paths, ready)))

    def ping(self) -> ActorLevel:
        """The level now; answers from another thread than the loop's."""
        return self._work.level()
