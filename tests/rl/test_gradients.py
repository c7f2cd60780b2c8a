"""Packed rows, the chunked head and what fits: each against the plain computation it stands in for."""

import shutil
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rl.test_trainer import a_batch, a_model

from runtime.config.schema import TrainerSection
from runtime.rl.model import Decoder, DecoderConfig, build_seeded
from runtime.rl.model.attention import by_length, choose_attention, grouped
from runtime.rl.model.packed import Halves, LayerPass
from runtime.rl.train.gradients import GradientComputer, of_decoder
from runtime.rl.train.head import ChunkKernels, Chunks, chunked_loss, chunked_scores
from runtime.rl.train.loss import Objective, policy_loss, token_logprobs, token_terms
from runtime.rl.train.packing import pack, plan_rows, size_of
from runtime.rl.train.room import device_room, joined_bytes, layer_bytes
from runtime.rl.types import SampleId, TrainSample

OBJECTIVE = Objective(entropy_coefficient=0.02, importance_cap=1.5)
QWEN2 = {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": None}


def samples_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[TrainSample]:
    """Samples of (prompt, response) tokens with some masked ones among them."""
    r = np.random.default_rng(seed)
    out = []
    for i, (prompt, size) in enumerate(lengths):
        out.append(
            TrainSample(
                sample=SampleId(i, 0),
                prompt_tokens=tuple(r.integers(0, 11, prompt).tolist()),
                tokens=tuple(r.integers(0, 11, size).tolist()),
                logprobs=tuple((-2.4 + r.normal(size=size) * 0.3).tolist()),
                versions=(0,) * size,
                weights=tuple(r.choice([0.0, 1.0], size=size, p=[0.2, 0.8]).tolist()),
                reward=1.0,
                advantage=float(r.normal()),
                finish="eos",
            )
        )
    return out


def padded_loss(model: Decoder, samples: list[TrainSample], temperature: float, denominator: float) -> torch.Tensor:
    """The loss by one padded batch and full logits; its backward is the oracle's gradient."""
    kept = [s for s in samples if any(s.weights)]
    width = max(map(size_of, kept))
    tokens = torch.tensor([s.prompt_tokens + s.tokens + (0,) * (width - size_of(s)) for s in kept])
    at = [(i, len(s.prompt_tokens) - 1 + j, s, j) for i, s in enumerate(kept) for j, w in enumerate(s.weights) if w]
    logits = model(tokens)[[i for i, _, _, _ in at], [c for _, c, _, _ in at]]
    float_ = logits.dtype
    current, entropy = token_logprobs(logits, torch.tensor([s.tokens[j] for _, _, s, j in at]), temperature=temperature)
    terms = token_terms(
        current,
        proximal=current.detach(),
        behaviour=torch.tensor([s.logprobs[j] for _, _, s, j in at], dtype=float_),
        advantages=torch.tensor([s.advantage for _, _, s, _ in at], dtype=float_),
        objective=OBJECTIVE,
    )
    weights = torch.tensor([s.weights[j] for _, _, s, j in at], dtype=float_)
    return policy_loss(terms, entropy, weights, denominator=denominator, entropy_coefficient=0.02)


def computer(model: Decoder, tokens: int = 48, **options: str) -> GradientComputer:
    return of_decoder(
        model,
        objective=OBJECTIVE,
        temperature=0.8,
        micro_batch_tokens=tokens,
        masters=dict(model.named_parameters()),
        options=TrainerSection.model_validate(options),
    )


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 17)), min_size=1, max_size=9),
    seed=st.integers(0, 1000),
    capacity=st.sampled_from([1, 20, 48, 500]),
    family=st.sampled_from([{}, QWEN2, {"num_key_value_heads": 2, "attention_bias": True}]),
)
def test_packed_rows_equal_the_padded_batch_in_float32(lengths, seed, capacity, family):
    samples = samples_of(lengths, seed)
    if not any(w for s in samples for w in s.weights):
        return
    model, plain = (a_model(torch.float32, seed=seed % 5, **family) for _ in range(2))
    denominator = sum(w for s in samples for w in s.weights)
    expected = padded_loss(plain, samples, 0.8, denominator)
    expected.backward()
    done = computer(model, capacity).compute(samples, step=0, denominator=denominator)
    assert done.loss == pytest.approx(expected.item(), abs=1e-6, rel=1e-6)
    for name, got in gradients(model).items():
        want = dict(plain.named_parameters())[name].grad
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * max(1.0, float(want.abs().max())))
    assert done.tokens == sum(size_of(s) for s in samples if any(s.weights))


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 17)), min_size=1, max_size=30),
    capacity=st.integers(1, 90),
)
def test_rows_hold_every_sample_once_and_are_few(lengths, capacity):
    samples = samples_of(lengths)
    rows = plan_rows(samples, capacity)
    assert sorted(s.sample for r in rows for s in r) == [s.sample for s in samples]
    sums = [sum(map(size_of, r)) for r in rows]
    assert all(n <= capacity or len(r) == 1 for n, r in zip(sums, rows, strict=True))
    long = sum(1 for s in samples if size_of(s) > capacity)
    rest = sum(size_of(s) for s in samples if size_of(s) <= capacity)
    # Any two rows of first-fit together hold more than one row's worth.
    assert len(rows) <= long + 2 * rest / capacity + 1
    assert plan_rows(samples[::-1], capacity) == rows


def test_a_packed_row_by_hand():
    a, b = samples_of([(2, 3), (1, 1)])
    a = TrainSample(**{f: getattr(a, f) for f in a.__dataclass_fields__} | {"weights": (1.0, 0.0, 1.0)})
    b = TrainSample(**{f: getattr(b, f) for f in b.__dataclass_fields__} | {"weights": (1.0,)})
    piece = pack((a, b), step=3, dtype=torch.float32, device=torch.device("cpu"), multiple=4)
    assert piece.row.lengths == (5, 2, 1)
    assert piece.row.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]
    assert piece.row.bounds.tolist() == [0, 5, 7, 8]
    assert piece.row.tokens.tolist() == [*a.prompt_tokens, *a.tokens, *b.prompt_tokens, *b.tokens, 0]
    assert piece.index.tolist() == [1, 3, 5]
    assert piece.targets.tolist() == [a.tokens[0], a.tokens[2], b.tokens[0]]
    assert piece.ages.tolist() == [3, 3, 3]
    torch.testing.assert_close(piece.advantages, torch.tensor([a.advantage, a.advantage, b.advantage]))


@pytest.mark.parametrize(
    "way",
    [
        grouped,
        partial(grouped, multiple=4),
        by_length(partial(grouped, multiple=5), grouped, long_from=8),
        by_length(grouped, grouped, long_from=100),
        by_length(grouped, grouped, long_from=1),
    ],
)
@pytest.mark.parametrize("lengths", [(9, 8, 8, 3, 3, 1), (3, 9, 2)])
def test_packed_attention_equals_a_mask(way, lengths):
    r = torch.Generator().manual_seed(1)
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, 4, generator=r, dtype=torch.float64) for h in (4, 2, 2))
    row = pack(samples_of([(1, n - 1) for n in lengths]), step=0, dtype=torch.float64, device=torch.device("cpu")).row
    assert row.lengths == lengths
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (owner[:, None] == owner[None]) & torch.ones(total, total, dtype=torch.bool).tril()
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), attn_mask=seen, enable_gqa=True
    )
    torch.testing.assert_close(way(row)(q, k, v), want[0].transpose(0, 1), rtol=0, atol=1e-12)


def test_an_attention_that_does_not_work_here_is_replaced_and_said():
    way = choose_attention("varlen", torch.device("cpu"), torch.float32, heads=4, kv_heads=2, head_dim=8)
    assert way.name == "sdpa"
    assert way.note.startswith("varlen ")


def head_case(seed: int, rows: int = 7, vocab: int = 9, hidden: int = 4) -> tuple[torch.Tensor, ...]:
    r = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, hidden, generator=r, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, hidden, generator=r, dtype=torch.float64, requires_grad=True)
    return states, weight, torch.randint(0, vocab, (rows,), generator=r)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_scores_pass_gradcheck_and_equal_full_logits(chunk):
    states, weight, targets = head_case(chunk)
    chunks = Chunks(rows=chunk, factor=0.7, kernels=ChunkKernels())
    got = chunked_scores(states, weight, targets, chunks)
    want = token_logprobs(states @ weight.t() * 0.35, targets, temperature=0.5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda h, w: chunked_scores(h, w, targets, chunks), (states, weight))


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
@pytest.mark.parametrize("chunk", [2, 7])
def test_the_loss_in_chunks_has_the_gradient_of_the_whole(chunk, coefficient):
    states, weight, targets = head_case(5)
    behaviour = torch.linspace(-3, -1, 7, dtype=torch.float64)
    advantages = torch.linspace(-1, 2, 7, dtype=torch.float64)

    def loss_of(at: slice, current: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        terms = token_terms(
            current,
            proximal=current.detach(),
            behaviour=behaviour[at],
            advantages=advantages[at],
            objective=OBJECTIVE,
        )
        ones = torch.ones_like(current)
        return policy_loss(terms, entropy, ones, denominator=9.0, entropy_coefficient=coefficient)

    whole = loss_of(slice(None), *token_logprobs(states @ weight.t() * 1.3, targets, temperature=1.0))
    want = torch.autograd.grad(2.5 * whole, (states, weight))
    chunks = Chunks(rows=chunk, factor=1.3, kernels=ChunkKernels())
    total, logprobs, _ = chunked_loss(states, weight, targets, chunks, loss_of)
    got = torch.autograd.grad(2.5 * total, (states, weight))
    torch.testing.assert_close(total, whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert not logprobs.requires_grad


def test_spans_cover_the_rows_with_chunks_of_like_size():
    chunks = Chunks(rows=4, factor=1.0, kernels=ChunkKernels())
    assert chunks.spans(0) == []
    assert [s.stop - s.start for s in chunks.spans(9)] == [3, 3, 3]
    assert [s.stop - s.start for s in chunks.spans(4)] == [4]
    large = Chunks(rows=1024, factor=1.0, kernels=ChunkKernels()).spans(2500)
    assert [s.stop - s.start for s in large] == [896, 896, 708]


def test_half_precision_states_keep_a_float32_sum_of_the_weights_gradient():
    states, weight, targets = (x.detach() for x in head_case(3, rows=64))
    low = [x.bfloat16().requires_grad_() for x in (states, weight)]
    high = [x.detach().float().requires_grad_() for x in low]
    grads = []
    for pair, chunk in ((low, 4), (high, 64)):
        chunks = Chunks(rows=chunk, factor=1.0, kernels=ChunkKernels())
        grads.append(torch.autograd.grad(chunked_scores(*pair, targets, chunks)[0].sum(), pair))
    assert grads[0][1].dtype == torch.bfloat16
    torch.testing.assert_close(grads[0][1].float(), grads[1][1], rtol=0.03, atol=0.1)


def test_recomputed_layers_give_the_same_bits():
    batch = a_batch(groups=4, masked=0.2)
    found = []
    for way in ("off", "on"):
        model = a_model(torch.float32)
        work = computer(model, activation_checkpointing=way)
        assert work.facts["recomputed_layers"].startswith("2 of" if way == "on" else "0 of")
        done = work.compute(batch.samples, step=0, denominator=10.0)
        found.append((done.loss, gradients(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][n], g) for n, g in found[1][1].items())


def test_passes_made_for_company_change_nothing():
    batch = a_batch(groups=3, masked=0.2)
    found = []
    for rounds in (0, 9):
        model = a_model()
        calls: list[tuple[int, int]] = []
        done = computer(model).compute(
            batch.samples, step=0, denominator=10.0, rounds=rounds, on_row=lambda i, n, to=calls: to.append((i, n))
        )
        assert calls == [(i, done.rows) for i in range(done.rows)]
        found.append((done.rows, done.loss, len(done.figures), gradients(model)))
    (few, loss, figures, grads), (many, loss9, figures9, grads9) = found
    assert few < many == 9
    assert (loss, figures) == (loss9, figures9)
    assert all(torch.equal(grads[n], g) for n, g in grads9.items())


def test_gradients_of_half_precision_parameters_lie_in_the_masters_alone():
    batch = a_batch(groups=2)
    model = a_model(torch.bfloat16)
    masters = {n: torch.nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
    work = of_decoder(model, objective=OBJECTIVE, temperature=1.0, micro_batch_tokens=16, masters=masters)
    work.compute(batch.samples, step=0, denominator=10.0)
    assert all(p.grad is None for p in model.parameters())
    assert all(m.grad is not None and m.grad.dtype == torch.float32 for m in masters.values())
    once = {n: m.grad.clone() for n, m in masters.items() if m.grad is not None}
    work.compute(batch.samples, step=0, denominator=10.0)
    for name, master in masters.items():
        torch.testing.assert_close(master.grad, 2 * once[name])


SHAPE = DecoderConfig.from_hf(
    {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
)


def room(card_bytes: int | None, way: str = "auto", tokens: int = 65536):
    with torch.device("meta"):
        parameters = list(Decoder(SHAPE, torch.bfloat16).parameters())
        masters = [torch.empty_like(p, dtype=torch.float32) for p in parameters]
    return device_room(
        SHAPE,
        parameters=parameters,
        masters=masters,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        micro_batch_tokens=tokens,
        compiled=True,
        checkpointing=way,
        card_bytes=card_bytes,
    )


def test_kept_bytes_by_hand():
    # x, normed x, q, k, v, attention's output, x, normed x, gate, up, their product:
    # 4 * 896 + 2 * 896 + 2 * 128 + 3 * 4864 values of two bytes; 16 float32.
    assert layer_bytes(SHAPE, torch.bfloat16, compiled=True) == (2 * 20224 + 4 * 16, 2 * 896)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.accept)])
def test_kept_bytes_are_those_that_autograd_keeps(compiled):
    if compiled and shutil.which("g++") is None:
        pytest.skip("the compiler's CPU backend needs g++")
    config = DecoderConfig.from_hf(
        {
            "model_type": "qwen2",
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 80,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    )
    model, tokens = build_seeded(config, 0, torch.float32), 240
    row = pack(samples_of([(1, tokens - 1)]), step=0, dtype=torch.float32, device=torch.device("cpu")).row
    way = LayerPass(mix=grouped(row), halves=Halves(compiled=compiled), recompute=False)
    x = torch.zeros(tokens, 32, requires_grad=True)
    cos, sin = torch.ones(tokens, 1, 4), torch.zeros(tokens, 1, 4)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = way.through(model.model.layers[0], x, cos, sin)
    for known in (*model.parameters(), cos, sin):
        kept.pop(known.untyped_storage().data_ptr(), None)
    said = tokens * layer_bytes(config, torch.float32, compiled=compiled)[0]
    found = sum(kept.values()) - joined_bytes(config, torch.float32)
    assert found == pytest.approx(said, rel=0.02 if compiled else 0.25)  # what norms keep uncompiled differs by device
    del y


def test_smaller_cards_have_shorter_rows_then_computed_layers():
    sizes = [141 * 2**30, 80 * 2**30, 40 * 2**30, 24 * 2**30, 16 * 2**30]
    rooms = [room(size) for size in sizes]
    rows = [r.row_tokens for r in rooms]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 32768
    assert rows[-1] == 8192
    assert rooms[0].recomputed(65536) == 0
    again = [r.recomputed(40960) for r in rooms]  # a sample longer than rows are
    assert again == sorted(again)
    assert again[-1] > 0
    for r in rooms:
        for tokens in (1024, r.row_tokens, 65536):
            k = r.recomputed(tokens)
            need = tokens * ((r.layers + 1 - k) * r.kept_bytes + k * r.input_bytes)
            assert k in (0, r.layers) or need <= r.free_bytes
    assert room(None).row_tokens == 65536
    assert room(None).recomputed(10**9) == 0
    assert room(16 * 2**30, "on").recomputed(1) == 24
    assert room(16 * 2**30, "off").recomputed(10**9) == 0


@pytest.mark.accept
def test_a_compiled_step_equals_a_plain_one():
    if shutil.which("g++") is None:
        pytest.skip("the compiler's CPU backend needs g++")
    batch = a_batch(groups=4, masked=0.2)
    found = []
    for way in ("off", "on"):
        model = a_model(torch.float32)
        work = computer(model, compile=way, activation_checkpointing="on")
        done = work.compute(batch.samples, step=0, denominator=10.0)
        assert work.facts["compile"] == way
        found.append((done.loss, gradients(model)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-6)
    for name, g in found[1][1].items():
        torch.testing.assert_close(g, found[0][1][name], rtol=1e-4, atol=1e-6)
