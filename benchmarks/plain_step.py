"""The step that hexctl's trainer is measured against: `transformers` as most people write it, on one GPU or over FSDP2.

bfloat16 weights and moments, its own attention (sdpa), logits of all positions and a policy loss on them.
"""

import argparse
from typing import Any

from benchmarks.trainer_work import SEED, fresh, model_config, peak_bytes, print_kernels, sizes, timed


def plain(shape: str, length: int, given: argparse.Namespace, gang: Any = None) -> dict[str, Any]:
    """Its figures. Micro-batches are halved on want of memory, and at one sample activations are checkpointed; of several ranks
    each has every n-th sample, and all begin with what is given, since they must run out of memory together."""
    import torch

    lengths = sorted(sizes(length, given), reverse=True)
    mine = lengths[gang.rank :: gang.world] if gang is not None else lengths
    micro, checkpointing = given.hf_micro_tokens, given.hf_checkpointing
    while True:
        try:
            done = _plain(shape, mine, given, gang, micro=micro, checkpointing=checkpointing)
            return {**done, "tokens": sum(lengths)}
        except torch.OutOfMemoryError:
            if gang is not None or (micro <= max(lengths) and checkpointing):
                raise
            micro, checkpointing = (micro // 2, False) if micro > max(lengths) else (micro, True)
        fresh(torch.device(given.device))


def _plain(
    shape: str, lengths: list[int], given: argparse.Namespace, gang: Any, *, micro: int, checkpointing: bool
) -> dict[str, Any]:
    import torch
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from runtime.rl.model import DTYPES

    device, dtype = torch.device(given.device) if gang is None else gang.device, DTYPES[given.dtype]
    fresh(device)
    raw = {k: v for k, v in model_config(shape, given.layers).items() if k not in ("model_type", "architectures")}
    config = Qwen2Config(**{**raw, "max_position_embeddings": 32768}, attn_implementation="sdpa", use_cache=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(SEED)
    try:
        with device:
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if gang is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=gang.mesh)
        fully_shard(model, mesh=gang.mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
    pieces = []
    for group in _groups(lengths, micro):
        at = torch.arange(group[0], device=device)
        ends = torch.tensor(group, device=device)[:, None]
        tokens = torch.randint(4, config.vocab_size, (len(group), group[0]), device=device)
        pieces.append((tokens, (at < ends).to(dtype), torch.randn(len(group), 1, device=device)))
    count = sum(lengths)

    def step(i: int) -> None:
        del i
        for tokens, mask, advantages in pieces:
            # Padding is on the right and the loss leaves it out, so causal attention needs no mask.
            logits = model(input_ids=tokens).logits[:, :-1].float()
            logp = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            ratio = torch.exp(logp - logp.detach())
            unclipped, bounded = ratio * advantages, ratio.clamp(0.8, 1.28) * advantages
            loss = -(torch.minimum(unclipped, bounded) * mask[:, 1:]).sum() / count
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    seconds = timed(step, device, given)
    if given.profile:
        print_kernels(lambda: step(0), device, given.profile)
    facts = {"attention": "sdpa", "compile": "off", "micro_tokens": str(micro), "checkpointing": str(checkpointing)}
    return {"seconds": seconds, "peak_bytes": peak_bytes(device), "facts": facts}


def _groups(lengths: list[int], micro: int) -> list[list[int]]:
    """Micro-batches of at most `micro` padded tokens, longest first: the first of a group is its width."""
    groups: list[list[int]] = []
    for n in lengths:
        if groups and (len(groups[-1]) + 1) * groups[-1][0] <= micro:
            groups[-1].append(n)
        else:
            groups.append([n])
    return groups
