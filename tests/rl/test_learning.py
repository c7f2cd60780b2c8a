"""The built-in task is learnt from scratch: the model, algorithm and task values of the embedded default, without Ray.

Generation here is one plain forward a token. Staleness is simulated as it happens in a run: a sample starts on weights
up to `lag` versions old and takes newer ones on its way, so that its tokens span versions.
"""

import copy
import random
import statistics
from pathlib import Path

import pytest
import torch

from planner.record import record
from runtime.config.load import load_config
from runtime.rl.model import Decoder, build_seeded
from runtime.rl.model import load_config as load_model_config
from runtime.rl.train.advantage import group_advantages
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.types import SampleId, TrainBatch, TrainSample

EOS, DIGITS, EQUALS, SPACE = 1, range(2, 12), 12, 15

CONFIG = load_config(Path(__file__).parents[2] / "configs/local.toml").config
MODEL = load_model_config(CONFIG.model.path, scale_logits=CONFIG.model.scale_logits)


@record
class Setting:
    """One learning problem."""

    shortest: int
    longest: int
    prompts: int
    responses: int = 8
    lag: int = 0


def prompt_of(digits: tuple[int, ...], longest: int) -> tuple[int, ...]:
    """Digits in a field of fixed width, then "=": what is to be copied stands at one distance whatever the length."""
    return (*digits, *(SPACE,) * (longest - len(digits)), EQUALS)


def reward_of(answer: tuple[int, ...], response: tuple[int, ...]) -> float:
    """Share of the positions that are right, the end mark being one; too long counts against it."""
    wanted = (*answer, EOS)
    right = sum(a == b for a, b in zip(wanted, response, strict=False))
    return right / max(len(wanted), len(response))


@torch.no_grad()
def generate(
    history: list[Decoder], starts: list[int], prompts: list[tuple[int, ...]], limit: int, noise: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, logprobs and versions, each [rows, limit]. Row r begins on version starts[r] and ends on the newest."""
    newest = len(history) - 1
    tokens = torch.tensor(prompts)
    logprobs, versions = [], []
    for j in range(limit):
        version = torch.tensor([s + (newest - s) * j // limit for s in starts])
        logits = torch.empty(len(prompts), MODEL.vocab)
        for v in version.unique().tolist():
            rows = version == v
            model = history[v]
            logits[rows] = model.head(model.hidden_states(tokens[rows])[:, -1])
        log_p = torch.log_softmax(logits, -1)
        token = torch.multinomial(log_p.exp(), 1, generator=noise)
        tokens = torch.cat([tokens, token], 1)
        logprobs.append(log_p.gather(1, token)[:, 0])
        versions.append(version)
    return tokens[:, len(prompts[0]) :], torch.stack(logprobs, 1), torch.stack(versions, 1)


def make_batch(
    step: int, history: list[Decoder], s: Setting, draw: random.Random, noise: torch.Generator
) -> TrainBatch:
    """One global batch. `history` holds the weights of versions step - lag ... step, fewer at the start."""
    base = step - len(history) + 1
    answers = [tuple(draw.choice(DIGITS) for _ in range(draw.randint(s.shortest, s.longest))) for _ in range(s.prompts)]
    starts = [draw.randrange(len(history)) for _ in range(s.prompts) for _ in range(s.responses)]
    prompts = [prompt_of(a, s.longest) for a in answers for _ in range(s.responses)]
    tokens, logprobs, versions = generate(history, starts, prompts, s.longest + 1, noise)
    samples: list[TrainSample] = []
    for g, answer in enumerate(answers):
        rows = range(g * s.responses, (g + 1) * s.responses)
        responses = [cut(tokens[r].tolist()) for r in rows]
        rewards = [reward_of(answer, r) for r in responses]
        for m, (row, response) in enumerate(zip(rows, responses, strict=True)):
            n = len(response)
            samples.append(
                TrainSample(
                    sample=SampleId(step * s.prompts + g, m),
                    prompt_tokens=prompts[row],
                    tokens=response,
                    logprobs=tuple(logprobs[row, :n].tolist()),
                    versions=tuple(base + v for v in versions[row, :n].tolist()),
                    weights=(1.0,) * n,
                    reward=rewards[m],
                    advantage=group_advantages(rewards, normalise=True)[m],
                    finish="eos" if response[-1] == EOS else "length",
                )
            )
    return TrainBatch(step=step, ids_hash="", samples=tuple(samples))


def cut(tokens: list[int]) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)


def learn(folder: Path, s: Setting, *, seed: int, steps: int, until: float = 2.0) -> list[dict[str, float]]:
    """Metrics of each step; ends early when the mean reward of the last ten is above `until`."""
    model = build_seeded(MODEL, seed, torch.float32)
    trainer = TorchTrainer(
        model,
        algorithm=CONFIG.algorithm,
        temperature=CONFIG.sampling.temperature,
        checkpoints=folder,
        weights=folder,
    )
    draw, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    history, metrics = [copy.deepcopy(model)], []
    for step in range(steps):
        metrics.append(dict(trainer.train_step(make_batch(step, history, s, draw, noise))))
        history = [*history, copy.deepcopy(model)][-(s.lag + 1) :]
        if len(metrics) >= 10 and mean_reward(metrics[-10:]) > until:
            break
    return metrics


def mean_reward(metrics: list[dict[str, float]]) -> float:
    return statistics.fmean(m["reward_mean"] for m in metrics)


def test_a_short_copy_is_learnt_in_seconds(tmp_path):
    s = Setting(shortest=1, longest=3, prompts=16, lag=2)
    metrics = learn(tmp_path, s, seed=0, steps=150, until=0.4)
    assert metrics[0]["reward_mean"] < 0.2
    assert mean_reward(metrics[-10:]) > 0.4
    assert max(m["staleness_max"] for m in metrics) == 2
    # Fresh tokens: generation and training are the same arithmetic but for the shape of the forward.
    assert max(m["engine_trainer_logprob_diff"] for m in metrics) < 1e-4


@pytest.mark.accept
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_embedded_default_is_learnt_on_every_seed(tmp_path, seed, lag):
    """Answers of 4 to 10 tokens, 32 x 8 samples a step: from below 0.2 to above 0.9 within 250 steps."""
    task, algorithm = CONFIG.task, CONFIG.algorithm
    s = Setting(
        shortest=task.min_length,
        longest=task.max_length,
        prompts=algorithm.prompts_per_step,
        responses=algorithm.responses_per_prompt,
        lag=lag,
    )
    metrics = learn(tmp_path, s, seed=seed, steps=250, until=0.9)
    assert metrics[0]["reward_mean"] < 0.2
    assert mean_reward(metrics[-10:]) > 0.9, f"after {len(metrics)} steps"
    print(f"seed {seed}, lag {lag}: above 0.9 after {len(metrics)} steps")
