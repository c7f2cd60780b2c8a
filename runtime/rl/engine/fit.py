"""Whether a generation's tensors are those of a model, and what an update took."""

from collections.abc import Mapping

from torch import Tensor

from planner.record import record, replace
from runtime.errors import WeightsError
from runtime.rl.types import WeightsRef


@record
class UpdateFigures:
    """Of an engine's updates: those received directly, and how the last one went."""

    direct: int = 0
    pause_s: float | None = None
    receive_s: float | None = None
    bytes: int = 0

    def after_load(self, pause_s: float) -> "UpdateFigures":
        """Once weights came from disk."""
        return replace(self, pause_s=pause_s)

    def after_swap(self, pause_s: float, *, receive_s: float, size: int) -> "UpdateFigures":
        """Once weights came from the second buffer."""
        return UpdateFigures(direct=self.direct + 1, pause_s=pause_s, receive_s=receive_s, bytes=size)


def check_fit(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], ref: WeightsRef) -> None:
    """The generation must hold exactly this model's tensors."""
    odd = sorted(parameters.keys() ^ tensors.keys())
    if odd:
        raise WeightsError(
            f"generation {ref.version} is of another model", where=ref.path, got=f"{len(odd)} odd names, first {odd[0]}"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise WeightsError(
                f"generation {ref.version}: tensor {name} has another shape",
                where=ref.path,
                got=tuple(tensors[name].shape),
                expected=str(tuple(parameter.shape)),
            )
