"""A decoder whose parameters, gradients and moments are spread over the ranks of a gang (FSDP2).

Every parameter is a DTensor sharded by rows; a rank holds rows `first_row(n)` and after of n. For a bfloat16 model the shards are
float32: they are the master parameters, cast as they are gathered for a layer, so there is no second copy. Gradients are summed
over ranks in float32 (float64 for a float64 model), never averaged: the loss is already a share of the whole batch's.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from runtime.rl.model import Decoder
from runtime.rl.train.gang import Gang


def shard(model: Decoder, gang: Gang) -> Decoder:
    """Spread `model` over the gang, in place. All ranks pass equal models; layer after layer leaves the host's memory."""
    half = next(model.parameters()).dtype
    policy = MixedPrecisionPolicy()
    if half in (torch.bfloat16, torch.float16):
        # Inputs are as the decoder makes them on one rank too: its rotations stay as exact.
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        _to_masters(layer)
        fully_shard(layer, mesh=gang.mesh, mp_policy=policy)
    _to_masters(model)
    # The output embedding ends the forward pass and begins the backward pass: it stays gathered between them.
    fully_shard(model, mesh=gang.mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows sums only
    return model


def _to_masters(module: nn.Module) -> None:
    """Half-precision parameters to float32, those that are sharded already left alone."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds; a plain tensor is held whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All rows. Every rank of a gang calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_row(rows: int, gang: Gang) -> int:
    """The first row this rank holds of a tensor of `rows` rows: FSDP2 cuts as `torch.chunk` does."""
    return min(rows, gang.rank * -(-rows // gang.world))
