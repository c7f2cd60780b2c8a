"""Whether a generation's tensors are those of a model."""

from collections.abc import Mapping

from torch import Tensor

from runtime.errors import WeightsError
from runtime.rl.types import WeightsRef


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
