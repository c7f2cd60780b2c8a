"""A replica's host path at 256 slots: what its loop and the vLLM engine's two sides cost a token, without any model.

Scripted: no token is computed, so tokens/s here are what the host path alone would let through, never a speed of generation.
All figures are of processor time. `loop`: the replica's loop over an engine that costs nothing, packing for flow included.
`replica`: the same over the vLLM engine's replica side. `process`: the engine's process, the way to the replica alone: what
vLLM itself costs there is not in it. `update`: new weights with 256 samples held, which are all added again.
"""

import gc
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import psutil

from benchmarks.timing import cpu_s
from runtime.profile.bench import Answered
from runtime.rl.engine.held import Held
from runtime.rl.engine.spec import VllmSpec
from runtime.rl.engine.vllm_engine import VllmEngine
from runtime.rl.exchange import PendingReply
from runtime.rl.protocols import EngineCapabilities, RolloutEngine
from runtime.rl.rollout import ReplicaLoop
from runtime.rl.types import (
    Append,
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    Lease,
    SampleId,
    WeightsRef,
)

SLOTS, AHEAD = 256, 32
PROMPT, SHORTEST, LONGEST = 100, 64, 191  # tokens; lengths in between in turn, mean 127.5
TOKENS, WARM_TOKENS = 400_000, 60_000
UPDATES = 20
REF = WeightsRef(lineage=0, version=0, path="scripted", digest="d0")
VOCAB_IDS = tuple(5 + (11 * i) % 49_000 for i in range(PROMPT))


class _Supply:
    """A flow that keeps slots filled and packs what it is sent, as Ray does on the replica's side."""

    def __init__(self) -> None:
        self._held = self._next = self.packed_bytes = 0

    def send(self, request: ExchangeRequest) -> PendingReply:
        self.packed_bytes += len(pickle.dumps(request, protocol=5))
        self._held -= sum(a.finished is not None for a in request.appends)
        leases: tuple[Lease, ...] = ()
        if request.version is not None:
            leases = tuple(self._lease() for _ in range(SLOTS + AHEAD - self._held))
            self._held += len(leases)
        return Answered(ExchangeReply(ack_seq=request.seq, order="serve", leases=leases, weights=REF))

    def _lease(self) -> Lease:
        n = self._next = self._next + 1
        most = SHORTEST + 37 * n % (LONGEST - SHORTEST + 1)
        return Lease(sample=SampleId(n, 0), epoch=1, prompt_tokens=VOCAB_IDS, max_new_tokens=most)


class _Free:
    """An engine that hands out appends made beforehand: its cost is not the loop's."""

    capabilities = EngineCapabilities(name="free", max_tp=1, max_pp=1, kv_on_update=("recompute",))

    def __init__(self) -> None:
        self.version: int | None = None
        self.digest: str | None = None
        self._steps: list[tuple[Append, ...]] = []
        self._ready: dict[SampleId, list[Append]] = {}
        self._decoded = 0
        self.aside_s = 0.0  # processor seconds of its own

    def free_slots(self) -> int:
        return max(0, SLOTS - len(self._ready))

    def limit(self, slots: int | None) -> None: ...

    def add(self, leases: Sequence[Lease]) -> None:
        began = time.process_time()
        for lease in leases:
            held = Held.of(lease, max_length=4096)
            eos: frozenset[int] = frozenset()
            appends = [held.take(7, -0.25, version=0, eos_ids=eos) for _ in range(lease.max_new_tokens)]
            self._ready[lease.sample] = appends[::-1]
        self.aside_s += time.process_time() - began

    def step(self) -> tuple[Append, ...]:
        began = time.process_time()
        appends = tuple(self._ready[s].pop() for s in list(self._ready)[:SLOTS])
        for append in appends:
            if append.finished is not None:
                del self._ready[append.sample]
        self._decoded += len(appends)
        self.aside_s += time.process_time() - began
        return appends

    def abort(self, samples: Sequence[SampleId]) -> tuple[SampleId, ...]:
        return ()

    def held(self) -> tuple[SampleId, ...]:
        return tuple(self._ready)

    def load_weights(self, ref: WeightsRef) -> None:
        self.version, self.digest = ref.version, ref.digest

    def check(self) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(running=min(SLOTS, len(self._ready)), slots=SLOTS, decoded_tokens=self._decoded)


def _run(engine: RolloutEngine, spent: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
    """Processor microseconds a token, of each process or part that `spent` tells the seconds of."""
    loop = ReplicaLoop(engine, _Supply(), replica="bench", epoch=1)
    while engine.stats().decoded_tokens < WARM_TOKENS:
        loop.tick()
    gc.collect()
    tokens, before = engine.stats().decoded_tokens, spent()
    while engine.stats().decoded_tokens < tokens + TOKENS:
        loop.tick()
    tokens = engine.stats().decoded_tokens - tokens
    return tuple(1e6 * (now - then) / tokens for now, then in zip(spent(), before, strict=True))


def _loop_us() -> float:
    free = _Free()
    return _run(free, lambda: (time.process_time() - free.aside_s,))[0]


def _spec() -> VllmSpec:
    return VllmSpec(model={}, slots=SLOTS, max_length=4096, eos_ids=frozenset((0,)), seed=1)


def _engine_us() -> tuple[float, ...]:
    with closing(VllmEngine(_spec(), program="benchmarks.scripted_core")) as engine:
        process = psutil.Process(engine.facts["pid"])
        return _run(engine, lambda: (time.process_time(), cpu_s(process)))


def _update_us() -> tuple[float, ...]:
    """Processor microseconds an update and sample held, of the replica and of the engine's process: from the command to the
    first tokens over the new weights, each sample with a hundred tokens of prompt and one of response."""
    with closing(VllmEngine(_spec(), program="benchmarks.scripted_core")) as engine:
        process = psutil.Process(engine.facts["pid"])
        engine.load_weights(REF)
        leases = [
            Lease(sample=SampleId(n, 0), epoch=1, prompt_tokens=VOCAB_IDS, max_new_tokens=3000) for n in range(SLOTS)
        ]
        engine.add(leases)
        engine.step()
        before, updates = (time.process_time(), cpu_s(process)), UPDATES
        for _ in range(updates):
            engine.load_weights(REF)
            while not engine.step():
                pass
        spent = time.process_time() - before[0], cpu_s(process) - before[1]
    return tuple(1e6 * s / (updates * SLOTS) for s in spent)


def run() -> dict[str, float]:
    """Figures of one run; scripted, so compare them with those of the same machine alone."""
    loop = _loop_us()
    replica, process = _engine_us()
    update, update_process = _update_us()
    return {
        "loop_us_per_token": loop,
        "loop_step_of_256_ms": loop * SLOTS / 1e3,
        "replica_us_per_token": replica,
        "process_us_per_token": process,
        "scripted_replica_tokens_per_cpu_s": 1e6 / replica,
        "update_replica_us_per_sample": update,
        "update_process_us_per_sample": update_process,
    }
