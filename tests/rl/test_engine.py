"""The torch engine: the same tokens whatever the batch, the hop or the slot; versions; the traps of resuming."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.record import replace
from runtime.errors import WeightsError
from runtime.rl.engine.spec import EngineSpec
from runtime.rl.engine.torch_engine import TorchEngine
from runtime.rl.model import Decoder, DecoderConfig, build_seeded
from runtime.rl.protocols import RolloutEngine
from runtime.rl.sampling import noise, sample
from runtime.rl.types import Append, Lease, SampleId, WeightsRef
from runtime.rl.weights import read_generation, write_generation

CONFIG = DecoderConfig.from_hf(
    {
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 12,
        "max_position_embeddings": 128,
        "initializer_range": 0.4,
    }
)
EOS = 1
SEED = 42


class Generations:
    """Weight generations in memory: version v is the model of seed v."""

    def __init__(self) -> None:
        self.decoders: dict[int, Decoder] = {}
        self.broken: set[int] = set()

    def decoder(self, version: int) -> Decoder:
        if version not in self.decoders:
            self.decoders[version] = build_seeded(CONFIG, version, torch.float64)
        return self.decoders[version]

    def __call__(self, ref: WeightsRef) -> Mapping[str, torch.Tensor]:
        if ref.version in self.broken:
            raise WeightsError("hash does not match", where=ref.path)
        return dict(self.decoder(ref.version).named_parameters())


def ref(version: int) -> WeightsRef:
    return WeightsRef(lineage=0, version=version, path=f"v{version}", digest=f"d{version}")


def engine(generations: Generations, *, version: int | None = 0, dtype: str = "float64", **changes: Any) -> TorchEngine:
    base = EngineSpec(slots=8, max_length=128, kv_tokens=10_000, seed=SEED, eos_ids=frozenset({EOS}), dtype=dtype)
    made = TorchEngine(CONFIG, replace(base, **changes), generations)
    if version is not None:
        made.load_weights(ref(version))
    return made


def lease(group: int, member: int = 0, *, tokens: Sequence[int] = (), epoch: int = 1, longest: int = 12) -> Lease:
    prompt = tuple(2 + (group * 7 + i * 3) % 10 for i in range(1 + group % 6))
    return Lease(
        sample=SampleId(group, member), epoch=epoch, prompt_tokens=prompt, tokens=tuple(tokens), max_new_tokens=longest
    )


Trace = dict[SampleId, list[Append]]


def drive(made: RolloutEngine, trace: Trace, *, steps: int | None = None) -> Trace:
    """Step until nothing is held (or for `steps`), filing appends by sample; each must join where the last one ended."""
    while made.held() and steps != 0:
        for append in made.step():
            had = trace.setdefault(append.sample, [])
            assert not had or append.start == had[-1].start + len(had[-1].tokens)
            had.append(append)
        steps = None if steps is None else steps - 1
    return trace


def tokens_of(appends: Iterable[Append]) -> list[int]:
    return [t for a in appends for t in a.tokens]


@functools.cache
def alone(group: int, member: int = 0, longest: int = 12) -> list[int]:
    """The tokens of a sample by a plain loop: a full forward for each, without engine or cache."""
    decoder, one = build_seeded(CONFIG, 0, torch.float64), lease(group, member)
    tokens: list[int] = []
    while len(tokens) < longest and tokens[-1:] != [EOS]:
        with torch.no_grad():
            logits = decoder(torch.tensor([[*one.prompt_tokens, *tokens]]))[:, -1]
        u = torch.from_numpy(noise(SEED, group, member, len(tokens)))
        tokens.append(int(sample(logits, u, temperature=1.0)[0]))
    return tokens


# ---- one sample


def test_it_is_a_rollout_engine() -> None:
    made: RolloutEngine = engine(Generations(), version=None)
    assert made.capabilities.name == "torch"
    assert made.capabilities.kv_on_update == ("recompute",)
    made.add([lease(1)])
    assert made.step() == ()  # nothing without weights
    assert made.version is None
    assert made.held() == (SampleId(1, 0),)


def test_logprobs_are_those_of_a_fresh_forward_at_the_temperature() -> None:
    generations = Generations()
    made = TorchEngine(
        CONFIG,
        EngineSpec(
            slots=2, max_length=64, kv_tokens=999, eos_ids=frozenset({EOS}), seed=1, temperature=0.6, dtype="float64"
        ),
        generations,
    )
    made.load_weights(ref(0))
    one = lease(4)
    made.add([one])
    appends = drive(made, {})[one.sample]
    check_logprobs(generations, one, appends, temperature=0.6)


def check_logprobs(
    generations: Generations, one: Lease, appends: Sequence[Append], *, temperature: float = 1.0
) -> None:
    """Every append's logprobs against a full forward of its own version over the whole prefix."""
    so_far = [*one.prompt_tokens, *one.tokens]
    for append in appends:
        whole = [*so_far, *append.tokens]
        with torch.no_grad():
            logits = generations.decoder(append.version)(torch.tensor([whole]))[0]
        logprobs = torch.log_softmax(logits / temperature, -1)
        for i, (token, logprob) in enumerate(zip(append.tokens, append.logprobs, strict=True)):
            assert logprob == pytest.approx(float(logprobs[len(so_far) + i - 1, token]), abs=1e-10)
        so_far = whole


def test_samples_end_at_eos_or_at_their_length() -> None:
    generations = Generations()
    made = engine(generations)
    leases = [lease(g, m, longest=9) for g in range(10) for m in range(4)]
    made.add(leases)
    trace = drive(made, {})
    reasons = set()
    for one in leases:
        appends = trace[one.sample]
        tokens, last = tokens_of(appends), appends[-1]
        assert [a.finished for a in appends[:-1]] == [None] * (len(appends) - 1)
        assert EOS not in tokens[:-1]
        assert last.finished == ("eos" if tokens[-1] == EOS else "length")
        assert len(tokens) == 9 or last.finished == "eos"
        reasons.add(last.finished)
    assert reasons == {"eos", "length"}
    assert made.stats().decoded_tokens == sum(len(tokens_of(a)) for a in trace.values())


# ---- batches, slots, hops

SCRIPT = st.lists(
    st.tuples(st.integers(0, 11), st.integers(0, 1), st.integers(0, 7), st.integers(1, 12)),
    min_size=2,
    max_size=12,
    unique_by=lambda row: row[:2],
)


@settings(max_examples=15)
@given(script=SCRIPT, slots=st.integers(1, 5), prefill=st.integers(1, 40), kv_tokens=st.integers(20, 90))
def test_tokens_are_the_same_alone_in_any_batch_and_across_a_hop(
    script: list[tuple[int, int, int, int]], slots: int, prefill: int, kv_tokens: int
) -> None:
    """Each sample arrives at its own step, is aborted after some tokens and resumed on another engine: same tokens."""
    generations = Generations()
    first = engine(generations, slots=slots, prefill_tokens=prefill, kv_tokens=kv_tokens)
    second = engine(generations, slots=3)
    trace: Trace = {}
    resumed: Trace = {}
    for group, member, steps, _ in script:
        first.add([lease(group, member)])
        drive(first, trace, steps=steps)
        for g, m, _, cut in script:
            so_far = tokens_of(trace.get(SampleId(g, m), ()))
            if SampleId(g, m) in first.held() and len(so_far) >= cut:
                assert first.abort([SampleId(g, m), SampleId(99, 9)]) == (SampleId(g, m),)
                second.add([lease(g, m, tokens=so_far, epoch=2)])
    drive(first, trace)
    drive(second, resumed)
    for group, member, _, _ in script:
        name = SampleId(group, member)
        whole = tokens_of(trace.get(name, ())) + tokens_of(resumed.get(name, ()))
        assert whole == alone(group, member)


def test_a_resumed_sample_that_had_ended_is_told_so_with_no_token() -> None:
    generations = Generations()
    made = engine(generations, slots=1)
    made.add(
        [
            lease(3, 0, tokens=(4, 5, EOS)),  # its last journalled token is EOS
            lease(3, 1, tokens=tuple([4] * 12)),  # already at its length
            lease(3, 2, tokens=(*[4] * 11, EOS)),  # both
            lease(3, 3),
        ]
    )
    first = made.step()
    assert [(a.sample.member, a.start, a.tokens, a.finished) for a in first[:3]] == [
        (0, 3, (), "eos"),
        (1, 12, (), "length"),
        (2, 12, (), "eos"),
    ]
    assert first[3].sample == SampleId(3, 3)
    assert len(first[3].tokens) == 1
    assert made.held() == (SampleId(3, 3),) or first[3].finished
    assert made.stats().decoded_tokens == 1


def test_an_eos_inside_the_prompt_does_not_end_the_response() -> None:
    made = engine(Generations())
    made.add([Lease(sample=SampleId(0, 0), epoch=1, prompt_tokens=(3, EOS), max_new_tokens=2)])
    assert len(made.step()[0].tokens) == 1


@pytest.mark.parametrize("prompt", [(), tuple([3] * 128), tuple([3] * 500)])
def test_a_prompt_without_room_ends_for_length_and_harms_nobody(prompt: tuple[int, ...]) -> None:
    made = engine(Generations())
    made.add([Lease(sample=SampleId(0, 0), epoch=1, prompt_tokens=prompt, max_new_tokens=5), lease(1)])
    appends = made.step()
    assert (appends[0].tokens, appends[0].finished) == ((), "length")
    assert len(appends[1].tokens) == 1


def test_a_response_ends_where_the_model_has_no_more_positions() -> None:
    made = engine(Generations(), max_length=20)
    made.add([Lease(sample=SampleId(g, 0), epoch=1, prompt_tokens=(3,) * 17, max_new_tokens=50) for g in range(8)])
    trace = drive(made, {})
    assert max(len(tokens_of(a)) for a in trace.values()) == 3


# ---- leases


def test_duplicates_are_ignored_and_newer_leases_replace() -> None:
    made = engine(Generations())
    made.add([lease(5, epoch=3), lease(5, epoch=3), lease(5, epoch=2)])
    assert made.held() == (SampleId(5, 0),)
    assert made.stats().waiting == 1
    first = made.step()
    assert [a.epoch for a in first] == [3]
    made.add([lease(5, epoch=4, tokens=(6, 7))])
    assert [(a.epoch, a.start) for a in made.step()] == [(4, 2)]


def test_more_samples_than_slots_wait_their_turn() -> None:
    made = engine(Generations(), slots=3)
    made.add([lease(g) for g in range(10)])
    assert made.free_slots() == 0
    made.step()
    stats = made.stats()
    assert stats.running <= 3
    assert stats.running + stats.waiting == len(made.held())
    while made.held():
        made.step()
        assert made.stats().running <= 3
    assert made.free_slots() == 3
    assert made.stats().kv_used_share == 0.0


def test_the_kv_budget_bounds_rows_times_length_but_one_sample_always_runs() -> None:
    made = engine(Generations(), kv_tokens=40)
    made.add([lease(0, m, longest=12) for m in range(6)])  # 13 positions each
    made.step()
    assert made.stats().running <= 3
    assert made.stats().waiting == 3
    made.abort(made.held())
    made.add([lease(0, m, longest=100) for m in range(2)])
    made.step()
    assert made.stats().running <= 1
    assert made.stats().waiting == 1


def test_abort_forgets_running_and_waiting() -> None:
    made = engine(Generations(), slots=2)
    made.add([lease(g, longest=50) for g in range(4)])
    made.step()
    held = made.held()
    assert made.abort([*held, SampleId(77, 0)]) == held
    assert made.held() == ()
    assert made.step() == ()
    assert (made.stats().running, made.stats().waiting) == (0, 0)


# ---- weights


def test_weights_swapped_in_mid_sample_give_version_spans() -> None:
    generations = Generations()
    made = engine(generations, slots=4)
    leases = [lease(g, longest=20) for g in range(6)]
    made.add(leases)
    trace = drive(made, {}, steps=3)
    made.load_weights(ref(1))
    drive(made, trace, steps=4)
    made.load_weights(ref(2))
    drive(made, trace)
    spans = set()
    for one in leases:
        versions = [a.version for a in trace[one.sample]]
        assert versions == sorted(versions)
        spans.add(tuple(sorted(set(versions))))
        check_logprobs(generations, one, trace[one.sample])
    assert (0, 1, 2) in spans
    assert made.stats().updates == 3


def test_running_samples_keep_their_turn_over_those_that_wait() -> None:
    made = engine(Generations(), slots=2)
    made.add([lease(g, longest=40) for g in (2, 3, 4, 5)])
    before = {a.sample for a in made.step() if a.finished is None}
    made.load_weights(ref(1))
    after = {a.sample for a in made.step()}
    assert before <= after


def test_a_generation_that_fails_leaves_the_engine_unroutable_until_a_good_one() -> None:
    generations = Generations()
    made = engine(generations)
    one = lease(2, longest=30)
    made.add([one])
    trace = drive(made, {}, steps=2)
    generations.broken.add(1)
    with pytest.raises(WeightsError):
        made.load_weights(ref(1))
    assert (made.version, made.digest) == (None, None)
    assert made.step() == ()
    assert made.held() == (one.sample,)
    made.load_weights(ref(0))
    assert (made.version, made.digest) == (0, "d0")
    drive(made, trace)
    assert tokens_of(trace[one.sample]) == alone(2, longest=30)


def test_a_generation_of_another_model_is_refused_before_anything_is_copied() -> None:
    good = dict(build_seeded(CONFIG, 0, torch.float64).named_parameters())
    for spoilt in (
        {k: v for k, v in good.items() if k != "model.norm.weight"},
        good | {"extra": torch.zeros(1)},
        good | {"model.norm.weight": torch.zeros(3)},
    ):
        made = TorchEngine(
            CONFIG,
            EngineSpec(slots=1, max_length=9, kv_tokens=9, eos_ids=frozenset({EOS}), seed=0),
            lambda _, tensors=spoilt: tensors,  # type: ignore[misc]
        )
        with pytest.raises(WeightsError):
            made.load_weights(ref(0))
        assert made.version is None


def test_generations_on_disk_are_verified(tmp_path: Path) -> None:
    decoder = build_seeded(CONFIG, 0, torch.float32)
    made = TorchEngine(
        CONFIG, EngineSpec(slots=1, max_length=64, kv_tokens=64, eos_ids=frozenset({EOS}), seed=0), read_generation
    )
    written = write_generation(tmp_path, dict(decoder.named_parameters()), lineage=0, version=3)
    made.load_weights(written)
    assert (made.version, made.digest) == (3, written.digest)
    file = next(Path(written.path).glob("*.safetensors"))
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(WeightsError):
        made.load_weights(written)
    assert made.version is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrower_engines_stay_close_to_their_own_forward(dtype: str) -> None:
    generations = Generations()
    made = engine(generations, dtype=dtype)
    leases = [lease(g, longest=10) for g in range(8)]
    made.add(leases)
    trace = drive(made, {})
    decoder = build_seeded(CONFIG, 0, getattr(torch, dtype))
    for one in leases:
        tokens = tokens_of(trace[one.sample])
        with torch.no_grad():
            logits = decoder(torch.tensor([[*one.prompt_tokens, *tokens]]))[0].double()
        wanted = torch.log_softmax(logits, -1)[len(one.prompt_tokens) - 1 : -1].gather(
            1, torch.tensor(tokens)[:, None]
        )[:, 0]
        got = torch.tensor([lp for a in trace[one.sample] for lp in a.logprobs], dtype=torch.float64)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 if dtype == "float32" else 0.12)
