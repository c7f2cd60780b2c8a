"""Migration steps: imperative, idempotent, each with a deterministic id. The backend carries them out."""

from planner.record import record


@record
class StartReplica:
    """Start a rollout replica on `devices` (one placement group)."""

    replica: str
    epoch: int
    devices: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"start-replica:{self.replica}:{self.epoch}"


@record
class DrainReplica:
    """Give no new samples; suspend those that run; when it holds none it is drained."""

    replica: str
    epoch: int

    @property
    def id(self) -> str:
        return f"drain-replica:{self.replica}:{self.epoch}"


@record
class StopReplica:
    """End the replica's process group and free its placement group. Also for dead ones: clears the body."""

    replica: str
    epoch: int

    @property
    def id(self) -> str:
        return f"stop-replica:{self.replica}:{self.epoch}"


@record
class StartTrainer:
    """Start a trainer on `devices`, a rank each, from the newest complete checkpoint. `shares`: of every batch's tokens, by
    device; () for equal ones."""

    trainer: str
    epoch: int
    devices: tuple[str, ...]
    shares: tuple[float, ...] = ()

    @property
    def id(self) -> str:
        return f"start-trainer:{self.trainer}:{self.epoch}"


@record
class QuiesceTrainer:
    """Let the trainer stop at its next step boundary, its checkpoint complete."""

    trainer: str
    epoch: int

    @property
    def id(self) -> str:
        return f"quiesce-trainer:{self.trainer}:{self.epoch}"


@record
class StopTrainer:
    """End the trainer's process and free its placement group. Also for dead ones."""

    trainer: str
    epoch: int

    @property
    def id(self) -> str:
        return f"stop-trainer:{self.trainer}:{self.epoch}"


Step = StartReplica | DrainReplica | StopReplica | StartTrainer | QuiesceTrainer | StopTrainer


def describe(step: Step) -> str:
    """A step in words, for events and the console."""
    match step:
        case StartReplica():
            return f"start {step.replica} on {', '.join(step.devices)}"
        case DrainReplica():
            return f"drain {step.replica}"
        case StopReplica():
            return f"stop {step.replica}"
        case StartTrainer():
            return f"start trainer {step.trainer} on {', '.join(step.devices)}"
        case QuiesceTrainer():
            return f"quiesce trainer {step.trainer} at its step boundary"
        case StopTrainer():
            return f"stop trainer {step.trainer}"
