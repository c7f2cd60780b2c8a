"""eta = 0 is exactly synchronous: three replicas through flow, journal and ledger against one plain loop.

The plain loop is written here and shares with the product only the decoder and the noise function: no KV cache, no
batching by arrival, no journal, no importance ratio, no micro-batches.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config.schema import Config
from runtime.rl.model import build_seeded, load_config
from runtime.rl.rewards.items import RewardItem
from runtime.rl.sampling import noise
from runtime.rl.tasks import CopyTask
from runtime.rl.tokenizer import CharTokenizer
from tests.rl.thread_world import ThreadWorld

ROOT = Path(__file__).resolve().parents[2]
STEPS, PROMPTS, RESPONSES, LIMIT = 20, 4, 4, 8


def _config(**algorithm: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": 3, "steps": STEPS},
            "model": {
                "source": "seeded",
                "path": ROOT / "configs/models/tiny-qwen3",
                "dtype": "float64",
                "scale_logits": True,
            },
            "task": {"source": "copy", "min_length": 2, "max_length": 5, "reward": "prefix"},
            "algorithm": {
                "eta": 0,
                "prompts_per_step": PROMPTS,
                "responses_per_prompt": RESPONSES,
                "learning_rate": 2e-3,
                "entropy_coefficient": 0.003,
                "weight_decay": 0.01,
                "warmup_steps": 5,
                **algorithm,
            },
            "sampling": {"max_new_tokens": LIMIT, "temperature": 0.9},
            "lengths": {"prompt_max": 8},
        }
    )


def _closeness(item: RewardItem) -> float:
    """Share of characters in place, so that groups differ from the first step on."""
    same = sum(a == b for a, b in zip(item.response, item.answer, strict=False))
    return same / max(len(item.response), len(item.answer), 1)


class PlainLoop:
    """Synchronous GRPO in one thread."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tokenizer = CharTokenizer()
        self.task = CopyTask(self.tokenizer, seed=config.run.seed, min_length=2, max_length=5)
        self.model = build_seeded(load_config(config.model.path, scale_logits=True), config.run.seed, torch.float64)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
        )

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens]))[0] / self.config.sampling.temperature

    def generate(self, group: int, member: int) -> list[int]:
        prompt = list(self.task.prompt(group).prompt_tokens)
        response: list[int] = []
        while len(response) < LIMIT and (not response or response[-1] != self.tokenizer.eos_id):
            with torch.no_grad():
                p = torch.softmax(self._logits(prompt + response)[-1], dim=-1).numpy()
            u = float(noise(self.config.run.seed, group, member, len(response))[0])
            response.append(int(np.searchsorted(np.cumsum(p), u * p.sum(), side="right")))
        return response

    def step(self, i: int) -> dict[tuple[int, int], list[int]]:
        made: dict[tuple[int, int], list[int]] = {}
        terms: list[torch.Tensor] = []
        for group in range(i * PROMPTS, (i + 1) * PROMPTS):
            item = self.task.prompt(group)
            responses = [self.generate(group, m) for m in range(RESPONSES)]
            made |= {(group, m): r for m, r in enumerate(responses)}
            rewards = np.array([self._reward(r, item.answer) for r in responses])
            spread = rewards.std(ddof=1)
            advantages = (rewards - rewards.mean()) / (spread + 1e-4) if spread > 0 else np.zeros(RESPONSES)
            for response, advantage in zip(responses, advantages, strict=True):
                prompt = list(item.prompt_tokens)
                log_p = torch.log_softmax(self._logits(prompt + response)[len(prompt) - 1 : -1], dim=-1)
                chosen = log_p[torch.arange(len(response)), torch.tensor(response)]
                entropy = -(log_p.exp() * log_p).sum(-1)
                # On policy the clipped ratio is 1: its gradient is that of the logprob.
                terms.append(torch.exp(chosen - chosen.detach()) * float(advantage) + 0.003 * entropy)
        loss = -torch.cat(terms).mean()
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for g in self.optimiser.param_groups:
            g["lr"] = 2e-3 * min(1.0, (i + 1) / 5)
        self.optimiser.step()
        return made

    def _reward(self, response: list[int], answer: str) -> float:
        text = self.tokenizer.decode([t for t in response if t != self.tokenizer.eos_id])
        same = sum(a == b for a, b in zip(text, answer, strict=False))
        return same / max(len(text), len(answer), 1)


def test_three_replicas_equal_one_plain_loop(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = _config()
    world = ThreadWorld(config, tmp_path, replicas=3, verify=_closeness)
    world.run(deadline_s=240)
    plain = PlainLoop(config)
    assert len(world.batches) == STEPS
    for i, batch in enumerate(world.batches):
        expected = plain.step(i)
        assert {(s.sample.group, s.sample.member): list(s.tokens) for s in batch.samples} == expected, f"step {i}"
        assert {v for s in batch.samples for v in s.versions} == {i}
        assert all(w == 1.0 for s in batch.samples for w in s.weights)
    for name, mine in plain.model.named_parameters():
        theirs = world.trainer.master_parameters()[name]
        assert math.isclose(0.0, float((mine.detach() - theirs).abs().max()), abs_tol=1e-9), name
    status = world.flow.status()
    assert status.staleness_max == 0
    assert (
        status.generated_tokens == status.trained_tokens == sum(len(s.tokens) for b in world.batches for s in b.samples)
    )


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """A plain loop with another learning-rate schedule drifts by more than the tolerance: the test above is not blind."""
    torch.set_num_threads(1)
    config = _config(warmup_steps=0)
    config = config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})})
    world = ThreadWorld(config, tmp_path, replicas=1, verify=_closeness)
    world.run(deadline_s=240)
    plain = PlainLoop(config)
    for i in range(2):
        plain.step(i)
    gaps = [
        float((mine.detach() - world.trainer.master_parameters()[n]).abs().max())
        for n, mine in plain.model.named_parameters()
    ]
    assert max(gaps) > 1e-6


@pytest.mark.parametrize("eta", [1, 3])
def test_with_slack_nothing_trained_is_older_than_eta(tmp_path: Path, eta: int) -> None:
    torch.set_num_threads(1)
    config = _config(eta=eta)
    world = ThreadWorld(config, tmp_path, replicas=2, verify=_closeness)
    world.run(deadline_s=240)
    for batch in world.batches:
        for s in batch.samples:
            assert all(w == float(batch.step - v <= eta) for w, v in zip(s.weights, s.versions, strict=True))
    status = world.flow.status()
    assert status.staleness_max is not None
    assert status.staleness_max <= eta
    spent = status.trained_tokens + status.masked_tokens + status.in_flight_tokens + sum(status.wasted_tokens.values())
    assert status.generated_tokens == spent
