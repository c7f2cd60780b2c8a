"""How the ranks of a trainer act as one: rank 0 has the loop that speaks to flow and says each command, the others follow.

Every command is one call of `TorchTrainer` that all ranks make together. An error at one rank ends that rank, closes its groups,
and thereby ends all: the daemon forms the gang anew in another epoch, and flow hands out the same reserved batch.
"""

from collections.abc import Generator, Mapping

from torch import Tensor

from runtime.errors import RunError
from runtime.rl.train.gang import Gang
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.train.wire import Head, batch_message, batch_of
from runtime.rl.types import CheckpointMark, StepMetrics, TrainBatch, WeightsRef
from runtime.rl.weights.layout import TensorSpec


class Leader:
    """The whole trainer, as rank 0's loop sees it. Implements `runtime.rl.train.loop.TrainerWork`."""

    def __init__(self, trainer: TorchTrainer, gang: Gang) -> None:
        self._trainer, self._gang = trainer, gang

    @property
    def version(self) -> int:
        """Version of the parameters held."""
        return self._trainer.version

    @property
    def lineage(self) -> int:
        """Line of descent of the versions."""
        return self._trainer.lineage

    def complete_checkpoints(self) -> tuple[CheckpointMark, ...]:
        """Checkpoints on disk that are whole."""
        return self._trainer.complete_checkpoints()

    def restore(self, step: int | None, *, lineage: int, load_lineage: int | None = None) -> None:
        """All ranks take the state after `step`."""
        self._gang.tell({"do": "restore", "step": step, "lineage": lineage, "load_lineage": load_lineage})
        self._trainer.restore(step, lineage=lineage, load_lineage=load_lineage)

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        """One optimiser step of all ranks on the whole batch."""
        head, body = batch_message(batch)
        self._gang.tell({"do": "train", "batch": head}, body)
        with self._gang.lost("gradients"):
            return self._trainer.train_step(batch)

    def save_checkpoint(self, ids_hash: str) -> str:
        """Complete checkpoint, of all ranks' rows."""
        self._gang.tell({"do": "checkpoint", "ids_hash": ids_hash})
        return self._trainer.save_checkpoint(ids_hash)

    def begin_checkpoint(self, ids_hash: str) -> bool:
        """Each rank copies its rows and writes them beside the training; False where one has no room for the copy."""
        self._gang.tell({"do": "begin", "ids_hash": ids_hash})
        return self._trainer.begin_checkpoint(ids_hash)

    @property
    def checkpoint_written(self) -> bool:
        """Rank 0 has written its rows: the others' are about as many."""
        return self._trainer.checkpoint_written

    def seal_checkpoint(self) -> float:
        """Each rank waits for its rows, rank 0 seals all."""
        self._gang.tell({"do": "seal"})
        return self._trainer.seal_checkpoint()

    def drop_checkpoint(self) -> None:
        """Nothing remains of a checkpoint that was begun. Rank 0 does this alone, as it ends."""
        self._trainer.drop_checkpoint()

    def publish(self) -> WeightsRef:
        """Write the current weights as a generation."""
        self._gang.tell({"do": "publish"})
        with self._gang.lost("parameters"):
            return self._trainer.publish()

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Of `full_weights`, in its order."""
        return self._trainer.weight_specs()

    def full_weights(self) -> Generator[tuple[str, Tensor], None, None]:
        """Every parameter, whole and in the rollout's dtype, one at a time. Whoever stops on the way must close it: the other
        ranks go through it to the end."""
        self._gang.tell({"do": "gather"})
        weights = self._trainer.full_weights()
        try:
            for named in weights:  # noqa: UP028 - `yield from` would close the gathering with this
                yield named
        finally:
            with self._gang.lost("parameters"):
                for _ in weights:
                    pass

    def idle(self) -> None:
        """There is no work: hear whether the others are there. RunError when one is not."""
        self._gang.tell({"do": "nothing"})
        self._trainer.idle()

    def close(self) -> None:
        """The others end at this."""
        self._gang.tell({"do": "stop"})


def follow(trainer: TorchTrainer, gang: Gang) -> str:
    """A rank other than 0: do as rank 0 says until it says stop; returns how it ended."""
    while True:
        head, body = gang.hear()
        if head["do"] == "stop":
            return "stopped with rank 0"
        with gang.lost(f"its part of {head['do']!r}"):
            _obey(trainer, head, body)


def _obey(trainer: TorchTrainer, head: Head, body: Mapping[str, Tensor]) -> None:
    match head["do"]:
        case "restore":
            trainer.restore(head["step"], lineage=head["lineage"], load_lineage=head["load_lineage"])
        case "train":
            trainer.train_step(batch_of(head["batch"], body))
        case "checkpoint":
            trainer.save_checkpoint(head["ids_hash"])
        case "begin":
            trainer.begin_checkpoint(head["ids_hash"])
        case "seal":
            trainer.seal_checkpoint()
        case "publish":
            trainer.publish()
        case "gather":
            for _ in trainer.full_weights():
                pass
        case "nothing":
            trainer.idle()
        case other:
            raise RunError("rank 0 says what this rank does not know", got=other)
