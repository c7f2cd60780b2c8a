"""The trainer: one deterministic AdamW step a batch, whatever the micro-batches; restored bit by bit."""

import math
from pathlib import Path

import pytest
import torch

from planner.record import replace
from runtime.config.schema import AlgorithmSection
from runtime.errors import RunError, WeightsError
from runtime.rl.model import Decoder, DecoderConfig, build_seeded
from runtime.rl.train.checkpoint import checkpoint_folder
from runtime.rl.train.packing import micro_batches
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.types import CheckpointMark, SampleId, TrainBatch, TrainSample
from runtime.rl.weights import read_generation

TINY = {
    "model_type": "qwen3",
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def a_model(dtype: torch.dtype = torch.float64, *, seed: int = 0, **changes: object) -> Decoder:
    return build_seeded(DecoderConfig.from_hf(TINY | changes), seed, dtype)


def a_trainer(folder: Path, *, dtype: torch.dtype = torch.float64, model: Decoder | None = None, temperature: float = 1.0,
              rollout_dtype: torch.dtype | None = None, **algorithm: object) -> TorchTrainer:  # fmt: skip
    settings = AlgorithmSection.model_validate({"learning_rate": 1e-2, "entropy_coefficient": 0.01} | algorithm)
    return TorchTrainer(
        model or a_model(dtype),
        algorithm=settings,
        temperature=temperature,
        checkpoints=folder / "checkpoints",
        weights=folder / "weights",
        rollout_dtype=rollout_dtype,
    )


def a_batch(step: int = 0, *, groups: int = 3, members: int = 4, seed: int = 0, masked: float = 0.0) -> TrainBatch:
    r = torch.Generator().manual_seed(seed * 1000 + step)

    def numbers(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 11, (n,), generator=r).tolist())

    samples = []
    for g in range(groups):
        prompt = numbers(2 + g)
        for m in range(members):
            tokens = numbers(1 + (5 * g + 3 * m) % 7)
            noise = torch.rand(len(tokens), 3, generator=r).tolist()
            samples.append(
                TrainSample(
                    sample=SampleId(step * groups + g, m),
                    prompt_tokens=prompt,
                    tokens=tokens,
                    logprobs=tuple(-2.4 + a for a, _, _ in noise),
                    versions=tuple(max(0, step - int(3 * b)) for _, b, _ in noise),
                    weights=tuple(0.0 if c < masked else 1.0 for _, _, c in noise),
                    reward=float(m % 2),
                    advantage=(1.0, -0.5, 0.3, -0.8)[m % 4],
                    finish="eos" if m else "length",
                )
            )
    return TrainBatch(step=step, ids_hash=f"h{step}", samples=tuple(samples))


def parameters(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in trainer.master_parameters().items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].detach().double() - b[n].detach().double()).abs().max()) for n in a)


def by_hand(
    model: Decoder, batches: list[TrainBatch], *, temperature: float, cap: float, entropy: float
) -> list[float]:
    """The same training written plainly: one sample at a time, one token at a time, torch's AdamW. Returns losses."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for batch in batches:
        optimiser.zero_grad()
        count = sum(1 for s in batch.samples for w in s.weights if w)
        total = torch.zeros((), dtype=torch.float64)
        for s in batch.samples:
            for j, token in enumerate(s.tokens):
                if not s.weights[j]:
                    continue
                logits = model(torch.tensor([s.prompt_tokens + s.tokens[:j]]))[0, -1] / temperature
                p = torch.softmax(logits, -1)
                frozen = p[token].detach()
                w = min(float(frozen) / math.exp(s.logprobs[j]), cap)
                total = total + w * p[token] / frozen * s.advantage - entropy * (p * p.log()).sum()
        loss = -total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_three_steps_equal_plain_training_in_float64(tmp_path):
    batches = [a_batch(i, groups=2, members=3, masked=0.2) for i in range(3)]
    plain = a_model()
    losses = by_hand(plain, batches, temperature=0.8, cap=1.3, entropy=0.01)
    trainer = a_trainer(tmp_path, temperature=0.8, importance_cap=1.3)
    ours = [trainer.train_step(b)["loss"] for b in batches]
    assert ours == pytest.approx(losses, abs=1e-12)
    assert distance(parameters(trainer), dict(plain.named_parameters())) < 1e-11
    assert trainer.version == 3


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-5)])
def test_micro_batches_do_not_matter(tmp_path, dtype, tolerance):
    batch = a_batch(masked=0.1)
    whole, small, single = (a_trainer(tmp_path, dtype=dtype, micro_batch_tokens=n) for n in (65536, 40, 1))
    metrics = [t.train_step(batch) for t in (whole, small, single)]
    for other, m in zip((small, single), metrics[1:], strict=True):
        assert distance(parameters(whole), parameters(other)) < tolerance
        assert m.keys() == metrics[0].keys()
        for name in ("loss", "grad_norm", "entropy", "kl_behaviour", "importance_max", "staleness_mean"):
            assert m[name] == pytest.approx(metrics[0][name], rel=1e-4)


def test_pieces_respect_the_limit_and_hold_every_trained_token_once():
    batch = a_batch(groups=5, masked=0.3)
    pieces = micro_batches(batch, max_tokens=40, dtype=torch.float64, device=torch.device("cpu"))
    assert len(pieces) > 1
    assert all(p.row.tokens.numel() <= 40 for p in pieces)
    assert sum(len(p.targets) for p in pieces) == sum(1 for s in batch.samples for w in s.weights if w)
    for p in pieces:
        # The target is the token right behind the position that predicts it.
        assert torch.equal(p.row.tokens[p.index + 1], p.targets)


def test_order_of_the_samples_does_not_matter(tmp_path):
    batch = a_batch()
    shuffled = replace(batch, samples=tuple(reversed(batch.samples)))
    a, b = a_trainer(tmp_path), a_trainer(tmp_path)
    a.train_step(batch)
    b.train_step(shuffled)
    assert distance(parameters(a), parameters(b)) == 0.0


def test_masked_tokens_do_not_move_anything_and_are_counted(tmp_path):
    batch = a_batch(masked=0.4)
    absurd = replace(
        batch,
        samples=tuple(
            replace(s, logprobs=tuple(lp if w else -900.0 for lp, w in zip(s.logprobs, s.weights, strict=True)))
            for s in batch.samples
        ),
    )
    a, b = a_trainer(tmp_path), a_trainer(tmp_path)
    m, n = a.train_step(batch), b.train_step(absurd)
    assert distance(parameters(a), parameters(b)) == 0.0
    masked = sum(1 for s in batch.samples for w in s.weights if not w)
    assert m["masked_tokens"] == n["masked_tokens"] == masked > 0
    assert m["trained_tokens"] + masked == sum(len(s.tokens) for s in batch.samples)


def test_metrics_of_a_batch(tmp_path):
    batch = a_batch(step=0)
    trainer = a_trainer(tmp_path, warmup_steps=4)
    m = trainer.train_step(batch)
    assert m["reward_mean"] == 0.5
    assert m["reward_std"] == 0.5
    assert m["truncated_share"] == 0.25
    assert m["response_tokens_mean"] == sum(len(s.tokens) for s in batch.samples) / 12
    assert m["learning_rate"] == pytest.approx(1e-2 / 4)
    assert m["clip_fraction"] == 0.0  # one update a batch: current is proximal
    assert m["staleness_max"] == 0.0
    assert 0 < m["entropy"] <= math.log(11)
    assert m["kl_behaviour"] > 0
    assert m["engine_trainer_logprob_diff"] > 0
    assert m["step_s"] >= m["gradients_s"] > 0


def test_engine_difference_is_of_fresh_tokens_only_and_absent_without_any(tmp_path):
    trainer = a_trainer(tmp_path)
    trainer.train_step(a_batch(0))
    stale = replace(a_batch(1), samples=tuple(replace(s, versions=(0,) * len(s.tokens)) for s in a_batch(1).samples))
    m = trainer.train_step(stale)
    assert "engine_trainer_logprob_diff" not in m
    assert (m["staleness_mean"], m["staleness_max"]) == (1.0, 1.0)


def test_behaviour_equal_to_the_policy_has_weight_one(tmp_path):
    trainer = a_trainer(tmp_path)
    model = a_model()
    samples = []
    for s in a_batch().samples:
        logp = torch.log_softmax(model(torch.tensor([s.prompt_tokens + s.tokens]))[0], -1).detach()
        at = len(s.prompt_tokens) - 1
        samples.append(replace(s, logprobs=tuple(float(logp[at + j, t]) for j, t in enumerate(s.tokens))))
    m = trainer.train_step(replace(a_batch(), samples=tuple(samples)))
    assert m["importance_mean"] == pytest.approx(1.0, abs=1e-12)
    assert m["engine_trainer_logprob_diff"] == pytest.approx(0.0, abs=1e-12)
    assert m["kl_behaviour"] == pytest.approx(0.0, abs=1e-12)


def test_plain_objective_clips_against_behaviour(tmp_path):
    m = a_trainer(tmp_path, objective="ppo").train_step(a_batch())
    assert m["clip_fraction"] > 0
    assert m["importance_mean"] == 1.0


def test_a_batch_without_trained_tokens_advances_the_version_only(tmp_path):
    trainer = a_trainer(tmp_path)
    before = parameters(trainer)
    m = trainer.train_step(a_batch(masked=2.0))
    assert (trainer.version, m["update_skipped"], m["trained_tokens"]) == (1, 1.0, 0.0)
    assert distance(before, parameters(trainer)) == 0.0
    trainer.save_checkpoint("h0")
    other = a_trainer(tmp_path)
    other.restore(0, lineage=0)
    a, b = trainer.train_step(a_batch(1)), other.train_step(a_batch(1))
    assert a["loss"] == b["loss"]
    assert distance(parameters(trainer), parameters(other)) == 0.0


def test_a_gradient_that_is_not_finite_changes_no_parameter(tmp_path):
    trainer = a_trainer(tmp_path)
    before = parameters(trainer)
    batch = a_batch()
    poisoned = replace(batch, samples=(replace(batch.samples[0], advantage=float("inf")), *batch.samples[1:]))
    m = trainer.train_step(poisoned)
    assert (trainer.version, m["update_skipped"]) == (1, 1.0)
    assert distance(before, parameters(trainer)) == 0.0
    assert trainer.train_step(a_batch(1))["update_skipped"] == 0.0
    assert distance(before, parameters(trainer)) > 0


def test_a_batch_for_another_version_is_refused(tmp_path):
    with pytest.raises(RunError, match="another version"):
        a_trainer(tmp_path).train_step(a_batch(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_restored_training_continues_bit_by_bit(tmp_path, dtype):
    straight = a_trainer(tmp_path / "a", dtype=dtype, warmup_steps=5)
    for i in range(4):
        straight.train_step(a_batch(i))
    first = a_trainer(tmp_path / "b", dtype=dtype, warmup_steps=5)
    for i in range(2):
        first.train_step(a_batch(i))
    first.save_checkpoint("h1")
    second = a_trainer(tmp_path / "b", dtype=dtype, model=a_model(dtype, seed=9), warmup_steps=5)
    assert second.complete_checkpoints() == (CheckpointMark(step=1, ids_hash="h1"),)
    second.restore(1, lineage=0)
    assert second.version == 2
    for i in (2, 3):
        second.train_step(a_batch(i))
    assert distance(parameters(straight), parameters(second)) == 0.0
    assert straight.publish().digest == second.publish().digest


def test_bfloat16_keeps_float32_masters_and_publishes_what_it_computes_with(tmp_path):
    trainer = a_trainer(tmp_path, dtype=torch.bfloat16, learning_rate=1e-5, micro_batch_tokens=40)
    before = parameters(trainer)
    assert all(p.dtype == torch.float32 for p in before.values())
    for i in range(3):
        assert math.isfinite(trainer.train_step(a_batch(i))["grad_norm"])
    moved = parameters(trainer)
    # Steps of 1e-5 vanish in bfloat16 next to 0.2; the masters keep them.
    assert 0 < distance(before, moved) < 1e-4
    published = read_generation(trainer.publish())
    assert all(torch.equal(published[n], p.bfloat16()) for n, p in moved.items())


def test_rollout_dtype_of_the_generation(tmp_path):
    trainer = a_trainer(tmp_path, rollout_dtype=torch.bfloat16)
    ref = trainer.publish()
    assert (ref.lineage, ref.version) == (0, 0)
    assert {t.dtype for t in read_generation(ref).values()} == {torch.bfloat16}


def test_a_fork_loads_the_old_lineage_and_goes_on_in_the_new(tmp_path):
    trainer = a_trainer(tmp_path)
    trainer.train_step(a_batch(0))
    trainer.save_checkpoint("h0")
    forked = a_trainer(tmp_path)
    forked.restore(0, lineage=1, load_lineage=0)
    assert (forked.version, forked.lineage) == (1, 1)
    ref = forked.publish()
    assert (ref.lineage, ref.version) == (1, 1)
    forked.train_step(a_batch(1))
    forked.save_checkpoint("h1")
    assert checkpoint_folder(tmp_path / "checkpoints", lineage=1, step=1).is_dir()


def test_a_checkpoint_of_another_model_or_none_is_refused(tmp_path):
    trainer = a_trainer(tmp_path)
    with pytest.raises(RunError, match="no step"):
        trainer.save_checkpoint("x")
    trainer.train_step(a_batch(0))
    trainer.save_checkpoint("h0")
    with pytest.raises(WeightsError, match="does not fit"):
        a_trainer(tmp_path, model=a_model(intermediate_size=32)).restore(0, lineage=0)
    with pytest.raises(WeightsError, match="another model"):
        a_trainer(tmp_path, model=a_model(num_hidden_layers=1)).restore(0, lineage=0)
    with pytest.raises(WeightsError, match="does not fit"):
        a_trainer(tmp_path, dtype=torch.float32).restore(0, lineage=0)
    with pytest.raises(RunError, match="fresh trainer"):
        trainer.restore(None, lineage=0)


@pytest.mark.gpu
def test_a_step_on_cuda_equals_one_on_cpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    on_cpu = a_trainer(tmp_path)
    on_cuda = TorchTrainer(
        a_model(),
        algorithm=AlgorithmSection(learning_rate=1e-2, entropy_coefficient=0.01),
        temperature=1.0,
        checkpoints=tmp_path / "c",
        weights=tmp_path / "w",
        device="cuda",
    )
    for i in range(3):
        on_cpu.train_step(a_batch(i))
        on_cuda.train_step(a_batch(i))
    on_cuda.save_checkpoint("h2")
    on_cuda.restore(2, lineage=0)
    assert distance(parameters(on_cpu), {n: p.cpu() for n, p in parameters(on_cuda).items()}) < 1e-9
