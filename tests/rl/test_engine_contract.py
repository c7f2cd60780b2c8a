"""What every rollout engine keeps true, asked of each in turn: the torch engine always, vLLM where the package is.

One vLLM process serves the whole module (its start takes half a minute on two cores). Both engines load the same generations
from disk, version v being the model of seed v, and are compared with a forward pass of transformers' own model.
"""

import collections
import functools
import importlib.util
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.record import record, replace
from runtime.errors import RunError, WeightsError
from runtime.rl.engine.spec import EngineSpec, VllmSpec
from runtime.rl.engine.torch_engine import TorchEngine
from runtime.rl.engine.vllm_engine import VllmEngine
from runtime.rl.model import DecoderConfig, build_seeded
from runtime.rl.protocols import RolloutEngine, TakesDirect
from runtime.rl.types import Append, ChannelMember, Lease, SampleId, WeightsRef
from runtime.rl.weights import read_generation, write_generation
from runtime.rl.weights.layout import TensorSpec, spec_of
from runtime.rl.weights.sender import WeightsSender

RAW = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU kernels know no smaller ones
    "vocab_size": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,  # the harder case: a reload must reach the head too
}
EOS, SLOTS, TEMPERATURE = 1, 4, 0.7
CLOSE = 1e-4  # of two float32 implementations; seen: torch engine 9e-6, vLLM 0.32 on a CPU 1.4e-5

NEEDS_VLLM = (
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (docs/gpu.md)"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this is of a CPU build; a GPU has benchmarks.check_engine"),
)


@record
class World:
    """An engine, the generations it may be given, and how it was before the first."""

    engine: RolloutEngine
    refs: dict[int, WeightsRef]
    before: tuple[Any, ...]  # version, digest, step, held


def generations(root: Path) -> dict[int, WeightsRef]:
    config = DecoderConfig.from_hf(RAW)
    return {
        v: write_generation(root, dict(build_seeded(config, v, torch.float32).named_parameters()), lineage=0, version=v)
        for v in range(3)
    }


@pytest.fixture(scope="module", params=["torch", *(pytest.param(p, marks=NEEDS_VLLM) for p in ("vllm", "vllm-public"))])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    eos = frozenset({EOS})
    engine: RolloutEngine
    if request.param == "torch":
        spec = EngineSpec(slots=SLOTS, max_length=128, kv_tokens=9999, eos_ids=eos, seed=1, temperature=TEMPERATURE)
        engine = TorchEngine(DecoderConfig.from_hf(RAW), spec, read_generation)
    else:
        engine = VllmEngine(
            VllmSpec(
                model=RAW,
                slots=SLOTS,
                max_length=128,
                eos_ids=eos,
                seed=1,
                temperature=TEMPERATURE,
                batched_tokens=512,
                eager=True,
                direct=request.param == "vllm",
            )
        )
    engine.add([lease(1)])
    before = (engine.version, engine.digest, engine.step(), engine.held())
    yield World(engine=engine, refs=generations(tmp_path_factory.mktemp("weights")), before=before)
    engine.close()


@pytest.fixture
def world(made: World) -> World:
    """The engine, empty, with version 0."""
    made.engine.abort(made.engine.held())
    made.engine.limit(None)
    made.engine.load_weights(made.refs[0])
    return made


def lease(group: int, member: int = 0, *, tokens: Sequence[int] = (), epoch: int = 1, longest: int = 12) -> Lease:
    prompt = tuple(2 + (group * 7 + i * 3) % 20 for i in range(1 + group % 6))
    return Lease(
        sample=SampleId(group, member), epoch=epoch, prompt_tokens=prompt, tokens=tuple(tokens), max_new_tokens=longest
    )


Trace = dict[SampleId, list[Append]]


def drive(engine: RolloutEngine, trace: Trace, *, tokens: int | None = None) -> Trace:
    """Step until nothing is held, or `tokens` more have come; each append must join where the last one ended."""
    while engine.held() and (tokens is None or tokens > 0):
        for append in engine.step():
            had = trace.setdefault(append.sample, [])
            assert not had or append.start == had[-1].start + len(had[-1].tokens)
            assert len(append.tokens) == len(append.logprobs)
            had.append(append)
            tokens = None if tokens is None else tokens - len(append.tokens)
    return trace


def tokens_of(appends: Sequence[Append]) -> list[int]:
    return [t for a in appends for t in a.tokens]


@functools.cache
def reference(version: int) -> Any:
    """transformers' model with the weights of that version."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in RAW.items() if k != "model_type"}))
    state = build_seeded(DecoderConfig.from_hf(RAW), version, torch.float32).state_dict()
    missing, odd = model.load_state_dict(state, strict=False)
    assert (missing, odd) == (["lm_head.weight"], [])  # tied
    return model.float().eval()


def worst_difference(one: Lease, appends: Sequence[Append]) -> float:
    """Between the engine's logprobs and a plain forward of each append's version over the whole prefix."""
    so_far, worst = [*one.prompt_tokens, *one.tokens], 0.0
    for append in appends:
        whole = [*so_far, *append.tokens]
        if append.tokens:
            with torch.no_grad():
                logits = reference(append.version)(torch.tensor([whole])).logits[0].double()
            logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
            for i, (token, logprob) in enumerate(zip(append.tokens, append.logprobs, strict=True)):
                worst = max(worst, abs(logprob - float(logprobs[len(so_far) + i - 1, token])))
        so_far = whole
    return worst


def test_before_the_first_weights_nothing_is_decoded(made: World) -> None:
    assert made.before == (None, None, (), (SampleId(1, 0),))
    assert made.engine.capabilities.name in ("torch", "vllm")
    assert "recompute" in made.engine.capabilities.kv_on_update


def test_samples_end_at_eos_or_at_their_length(world: World) -> None:
    counted = world.engine.stats().decoded_tokens
    leases = [lease(g, m, longest=9) for g in range(8) for m in range(3)]
    world.engine.add(leases)
    trace = drive(world.engine, {})
    reasons = set()
    for one in leases:
        appends = trace[one.sample]
        tokens, last = tokens_of(appends), appends[-1]
        assert [a.finished for a in appends[:-1]] == [None] * (len(appends) - 1)
        assert EOS not in tokens[:-1]
        assert last.finished == ("eos" if tokens[-1] == EOS else "length")
        assert len(tokens) == 9 or last.finished == "eos"
        assert {a.version for a in appends} == {0}
        reasons.add(last.finished)
    assert reasons == {"eos", "length"}
    assert world.engine.stats().decoded_tokens - counted == sum(len(tokens_of(a)) for a in trace.values())


def test_no_more_samples_run_than_the_limit_and_those_that_do_end(world: World) -> None:
    engine = world.engine
    engine.limit(2)
    assert (engine.stats().slots, engine.free_slots()) == (2, 2)
    engine.add([lease(g, longest=9) for g in range(5)])
    assert most_at_once(engine) == 2
    engine.limit(None)
    engine.add([lease(g, longest=9) for g in range(5, 5 + SLOTS)])
    trace = drive(engine, {}, tokens=SLOTS)
    running = set(engine.held())
    assert len(trace) == SLOTS
    engine.limit(1)
    engine.add([lease(g, longest=9) for g in range(20, 24)])
    begun: list[int] = []  # how many others ran when a new one got its first token
    while engine.held():
        appends = engine.step()
        first = [a.sample for a in appends if a.sample.group >= 20 and a.start == 0]
        begun += [len([a for a in appends if a.sample in running]) for _ in first]
        assert len([a for a in appends if a.sample.group >= 20 and a.tokens]) <= 1
    assert begun == [0] * 4, "those that ran go on, and nobody begins beside them"
    engine.limit(99)
    assert engine.stats().slots == SLOTS, "what it was made for"


def most_at_once(engine: RolloutEngine) -> int:
    most = 0
    while engine.held():
        most = max(most, len([a for a in engine.step() if a.tokens]))
    return most


def test_logprobs_are_those_of_transformers_at_the_temperature(
    world: World, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    leases = [lease(g, longest=20) for g in range(10)]
    world.engine.add(leases)
    trace = drive(world.engine, {})
    worst = max(worst_difference(one, trace[one.sample]) for one in leases)
    record_property("max_logprob_difference", worst)
    with capsys.disabled():
        print(f" [{world.engine.capabilities.name}: largest difference {worst:.1e}]", end="")
    assert worst < CLOSE


def test_tokens_are_drawn_at_the_temperature(world: World) -> None:
    """First tokens of 600 samples: each token's count within five standard deviations of what transformers' model says."""
    count = 600
    leases = [Lease(sample=SampleId(7, m), epoch=1, prompt_tokens=(5, 9, 3), max_new_tokens=1) for m in range(count)]
    world.engine.add(leases)
    drawn = collections.Counter(tokens_of(a)[0] for a in drive(world.engine, {}).values())
    with torch.no_grad():
        logits = reference(0)(torch.tensor([[5, 9, 3]])).logits[0, -1].double()
    shares = torch.softmax(logits / TEMPERATURE, -1).tolist()
    for token, share in enumerate(shares):
        sigma = (count * share * (1 - share)) ** 0.5
        assert abs(drawn[token] - count * share) <= 5 * sigma + 1


def test_a_sample_goes_on_from_the_tokens_it_brings(world: World) -> None:
    for member in range(40):  # what is drawn is the engine's business: some end before they have three tokens
        whole = lease(3, member, longest=12)
        world.engine.add([whole])
        so_far = tokens_of(drive(world.engine, {}, tokens=4)[whole.sample])[:3]
        world.engine.abort(world.engine.held())
        if len(so_far) == 3 and EOS not in so_far:
            break
    assert len(so_far) == 3
    assert EOS not in so_far
    again = lease(3, member, tokens=so_far, epoch=2, longest=12)
    world.engine.add([again])
    appends = drive(world.engine, {})[again.sample]
    assert appends[0].start == 3
    assert {a.epoch for a in appends} == {2}
    assert len(so_far) + len(tokens_of(appends)) <= 12
    assert worst_difference(again, appends) < CLOSE


def test_a_resumed_sample_that_had_ended_is_told_so_with_no_token(world: World) -> None:
    counted = world.engine.stats().decoded_tokens
    world.engine.add(
        [
            lease(3, 0, tokens=(4, 5, EOS)),  # its last journalled token is EOS
            lease(3, 1, tokens=[4] * 12),  # already at its length
            lease(3, 2, tokens=[*[4] * 11, EOS]),  # both
        ]
    )
    trace = drive(world.engine, {})
    told = {s.member: [(a.start, a.tokens, a.finished) for a in appends] for s, appends in trace.items()}
    assert told == {0: [(3, (), "eos")], 1: [(12, (), "length")], 2: [(12, (), "eos")]}
    assert world.engine.stats().decoded_tokens == counted


@pytest.mark.parametrize("prompt", [(), (3,) * 128, (3,) * 500])
def test_a_prompt_without_room_ends_for_length_and_harms_nobody(world: World, prompt: tuple[int, ...]) -> None:
    bad = Lease(sample=SampleId(0, 0), epoch=1, prompt_tokens=prompt, max_new_tokens=5)
    world.engine.add([bad, lease(1, longest=2)])
    trace = drive(world.engine, {})
    assert [(a.tokens, a.finished) for a in trace[bad.sample]] == [((), "length")]
    assert tokens_of(trace[SampleId(1, 0)])


def test_a_response_ends_where_the_model_has_no_more_positions(world: World) -> None:
    leases = [Lease(sample=SampleId(g, 0), epoch=1, prompt_tokens=(3,) * 125, max_new_tokens=50) for g in range(4)]
    world.engine.add(leases)
    trace = drive(world.engine, {})
    assert max(len(tokens_of(a)) for a in trace.values()) == 3


def test_duplicates_are_ignored_and_newer_leases_replace(world: World) -> None:
    world.engine.add([lease(5, epoch=3), lease(5, epoch=3), lease(5, epoch=2)])
    assert world.engine.held() == (SampleId(5, 0),)
    trace = drive(world.engine, {}, tokens=1)
    assert {a.epoch for a in trace[SampleId(5, 0)]} == {3}
    world.engine.add([lease(5, epoch=4, tokens=(6, 7))])
    assert world.engine.held() == (SampleId(5, 0),)
    appends = drive(world.engine, {}, tokens=1)[SampleId(5, 0)]
    assert (appends[0].epoch, appends[0].start) == (4, 2)


def test_more_samples_than_slots_wait_their_turn(world: World) -> None:
    world.engine.add([lease(g, longest=5) for g in range(12)])
    assert world.engine.free_slots() == 0
    while world.engine.held():
        world.engine.step()
        stats = world.engine.stats()
        assert stats.running <= SLOTS == stats.slots
        assert stats.running + stats.waiting == len(world.engine.held())
        assert 0.0 <= stats.kv_used_share <= 1.0
    assert world.engine.free_slots() == SLOTS
    assert world.engine.stats().kv_used_share == 0.0


def test_abort_forgets_running_and_waiting(world: World) -> None:
    world.engine.add([lease(g, longest=60) for g in range(8)])
    drive(world.engine, {}, tokens=4)
    held = world.engine.held()
    assert world.engine.abort([*held, SampleId(77, 0)]) == held
    assert world.engine.held() == ()
    assert world.engine.step() == ()
    assert (world.engine.stats().running, world.engine.stats().waiting) == (0, 0)
    world.engine.add([lease(2, longest=3)])
    assert tokens_of(drive(world.engine, {})[SampleId(2, 0)])


def lived_through_versions(leases: Sequence[Lease], trace: dict[SampleId, list[Append]]) -> None:
    """Versions of a sample never go back, some sample has all three, and each token is right under its own."""
    spans = set()
    for one in leases:
        versions = [a.version for a in trace[one.sample]]
        assert versions == sorted(versions)
        spans.add(tuple(sorted(set(versions))))
        assert worst_difference(one, trace[one.sample]) < CLOSE
    assert (0, 1, 2) in spans


def test_weights_swapped_in_mid_sample_give_version_spans_with_kv_computed_anew(world: World) -> None:
    """Every token's logprob is that of its own version's model over the whole prefix: no stale KV, no stale prefix cache."""
    updates = world.engine.stats().updates
    leases = [lease(g, m, longest=30) for g in range(2) for m in range(2)]
    world.engine.add(leases)
    trace = drive(world.engine, {}, tokens=12)
    for version in (1, 2):
        world.engine.load_weights(world.refs[version])
        assert (world.engine.version, world.engine.digest) == (version, world.refs[version].digest)
        drive(world.engine, trace, tokens=12)
    drive(world.engine, trace)
    lived_through_versions(leases, trace)
    assert world.engine.stats().updates == updates + 2


def test_a_generation_that_does_not_verify_leaves_it_unroutable_until_a_good_one(world: World, tmp_path: Path) -> None:
    bad = generations(tmp_path)[1]
    file = next(Path(bad.path).glob("*.safetensors"))
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    one = lease(2, longest=30)
    world.engine.add([one])
    trace = drive(world.engine, {}, tokens=3)
    for wrong in (bad, replace(world.refs[1], digest="0" * 64), replace(world.refs[1], version=2)):
        with pytest.raises(WeightsError):
            world.engine.load_weights(wrong)
        assert (world.engine.version, world.engine.digest) == (None, None)
        assert world.engine.step() == ()
        assert world.engine.held() == (() if trace[one.sample][-1].finished else (one.sample,))
    world.engine.load_weights(world.refs[1])
    drive(world.engine, trace)
    assert worst_difference(one, trace[one.sample]) < CLOSE


def test_a_generation_of_another_model_is_refused_before_anything_is_changed(world: World, tmp_path: Path) -> None:
    good = read_generation(world.refs[0])
    for number, spoilt in enumerate(
        (
            {k: v for k, v in good.items() if k != "model.norm.weight"},
            good | {"extra": torch.zeros(1)},
            good | {"model.norm.weight": torch.zeros(3)},
        )
    ):
        other = write_generation(tmp_path, spoilt, lineage=1, version=number)
        with pytest.raises(WeightsError):
            world.engine.load_weights(other)
        assert world.engine.version is None


class Trainer:
    """A `WeightsSource`: version v is the model of seed v."""

    lineage = 0

    def __init__(self, version: int) -> None:
        self.version = version
        self._model = build_seeded(DecoderConfig.from_hf(RAW), version, torch.float32)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.named_parameters()

    def weight_specs(self) -> list[TensorSpec]:
        return [spec_of(n, t) for n, t in self.full_weights()]


@pytest.fixture
def sender() -> Iterator[WeightsSender]:
    made = WeightsSender(
        host="127.0.0.1", trainer_epoch=1, device=torch.device("cpu"), bucket_bytes=10_000, deadline_s=120.0
    )
    yield made
    made.close()


def joined(world: World, sender: WeightsSender) -> TakesDirect:
    """The engine, connected."""
    engine = world.engine
    assert isinstance(engine, TakesDirect)
    engine.join(sender.offer, ChannelMember(replica="r", epoch=1))
    until = time.monotonic() + 60
    while not sender.members:
        assert time.monotonic() < until, "the engine does not connect"
        world.engine.step()
    return engine


def test_weights_come_straight_from_the_trainer_while_it_generates(world: World, sender: WeightsSender) -> None:
    """Nothing changes until the swap; after it the engine is the trainer's model, and samples go on with version spans."""
    direct = joined(world, sender)
    updates, before = world.engine.stats().updates, world.engine.stats().direct_updates
    leases = [lease(g, longest=60) for g in range(SLOTS)]
    world.engine.add(leases)
    trace = drive(world.engine, {}, tokens=12)
    digest = world.engine.digest
    for version in (1, 2):
        sent = sender.transfer(Trainer(version))
        assert sent is not None
        ref = WeightsRef(lineage=0, version=version, path="", digest=sent.digest)
        assert not direct.swap_weights(replace(ref, version=9)), "another version is not here"
        assert not direct.swap_weights(replace(ref, digest="0" * 64))
        assert (world.engine.version, world.engine.digest) == (version - 1, digest)
        drive(world.engine, trace, tokens=8)
        until = time.monotonic() + 60
        while not direct.swap_weights(ref):  # the last word of the transfer may still be on its way
            assert time.monotonic() < until
        assert (world.engine.version, world.engine.digest) == (version, ref.digest)
        assert not direct.swap_weights(ref), "what is taken is gone from the second buffer"
        digest = ref.digest
        drive(world.engine, trace, tokens=12)
    drive(world.engine, trace)
    lived_through_versions(leases, trace)
    stats = world.engine.stats()
    assert (stats.updates, stats.direct_updates) == (updates + 2, before + 2)
    assert stats.update_bytes == sent.bytes
    assert stats.update_pause_s is not None
    assert stats.update_receive_s is not None
    assert stats.update_receive_s > 0


def test_a_transfer_that_fails_changes_nothing_and_the_disk_still_serves(world: World, sender: WeightsSender) -> None:
    direct = joined(world, sender)
    one = lease(3, longest=40)
    world.engine.add([one])
    trace = drive(world.engine, {}, tokens=5)

    class Failing(Trainer):
        def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            for i, pair in enumerate(super().full_weights()):
                if i == 5:
                    raise ValueError("no more")
                yield pair

        def weight_specs(self) -> list[TensorSpec]:
            return Trainer(self.version).weight_specs()

    with pytest.raises(RunError, match="failed"):
        sender.transfer(Failing(1))
    assert not direct.swap_weights(world.refs[1])
    assert world.engine.version == 0
    drive(world.engine, trace, tokens=5)
    world.engine.load_weights(world.refs[1])
    drive(world.engine, trace)
    assert worst_difference(one, trace[one.sample]) < CLOSE
