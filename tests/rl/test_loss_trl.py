"""Our loss against TRL's, called without a trainer around it: only what its `_compute_loss` reads is provided."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.rl.train.loss import Objective, policy_loss, token_logprobs, token_terms


def trl_loss(
    logits: Tensor,
    *,
    tokens: Tensor,
    mask: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    objective: Objective,
    correct: bool,
) -> Tensor:
    """GRPOTrainer._compute_loss with loss_type "dapo" on logits [B,T,V], tokens [B,T], mask [B,T].

    `correct` turns its truncated engine correction on: exp(old - sampling), clamped from above.
    """
    from trl import GRPOTrainer

    def logps_and_entropies(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        log_p = torch.log_softmax(logits, -1)
        return log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1), None

    gather = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        sync_gradients=False,
    )
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    fields: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": logps_and_entropies,
        "model": SimpleNamespace(training=False),
        "accelerator": gather,
        "args": args,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "dapo",
        "epsilon_low": objective.clip_low,
        "epsilon_high": objective.clip_high,
        "use_vllm": correct,
        "vllm_importance_sampling_correction": correct,
        "vllm_importance_sampling_mode": "token_truncate",
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "_metrics": {mode: _Lists() for mode in ("train", "eval")},
    }
    for name, value in fields.items():
        object.__setattr__(trainer, name, value)
    inputs = {
        "prompt_ids": torch.zeros(tokens.shape[0], 1, dtype=torch.long),
        "prompt_mask": torch.ones(tokens.shape[0], 1),
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": proximal,
        "importance_sampling_ratio": torch.exp(proximal - behaviour).clamp(max=objective.importance_cap),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(None, inputs)
    assert isinstance(loss, Tensor)
    return loss


class _Lists(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        self[key] = []
        return self[key]


@pytest.mark.optional
@pytest.mark.parametrize("decoupled", [False, True])
def test_equal_to_trl(decoupled):
    """TRL's GRPO loss (two-sided clipping, token-level mean) with its truncated sampling correction."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    rows, length, vocabulary = 4, 6, 11
    r = torch.Generator().manual_seed(3)
    logits = (torch.randn(rows, length, vocabulary, generator=r) * 2).requires_grad_(True)
    tokens = torch.randint(0, vocabulary, (rows, length), generator=r)
    mask = torch.ones(rows, length)
    mask[1, 3:] = mask[3, 1:] = 0
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0].detach()
    proximal = chosen + 0.4 * torch.randn(rows, length, generator=r)
    behaviour = proximal + (0.8 * torch.randn(rows, length, generator=r) if decoupled else 0)
    advantages = torch.tensor([1.2, -0.7, 0.4, -0.9])
    o = Objective(decoupled=True, clip_low=0.2, clip_high=0.28, importance_cap=2.0)

    theirs = trl_loss(
        logits,
        tokens=tokens,
        mask=mask,
        proximal=proximal,
        behaviour=behaviour,
        advantages=advantages,
        objective=o,
        correct=decoupled,
    )
    theirs.backward()
    their_gradient, logits.grad = logits.grad.clone(), None
    kept = mask.bool()
    current, entropy = token_logprobs(logits[kept], tokens[kept], temperature=1.0)
    spread = advantages[:, None].expand(rows, length)[kept]
    terms = token_terms(current, proximal=proximal[kept], behaviour=behaviour[kept], advantages=spread, objective=o)
    ours = policy_loss(terms, entropy, mask[kept], denominator=float(mask.sum()), entropy_coefficient=0.0)
    ours.backward()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(logits.grad, their_gradient, atol=1e-6, rtol=1e-4)
