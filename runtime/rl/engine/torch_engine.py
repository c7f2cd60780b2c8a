"""Continuous batching in plain torch: a KV cache row a running sample, one token a step for all of them.

Samples wait in arrival order. Each step first fills the KV rows of those that fit (prompt and tokens so far, all but the
last), then decodes one token for every row, so that a token is sampled on one path whether its sample is new, resumed
from a journal or caught up after new weights. A sample's tokens depend on the weights, the run's seed and its identity
alone; in float64 the batch around it does not matter even to rounding that counts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from planner.record import replace
from runtime.rl.engine.fit import UpdateFigures, check_fit
from runtime.rl.engine.held import Held
from runtime.rl.engine.spec import TORCH_CAPABILITIES, EngineSpec
from runtime.rl.model import DTYPES, Decoder, DecoderConfig, KVCache
from runtime.rl.protocols import EngineCapabilities
from runtime.rl.sampling import noise, sample
from runtime.rl.types import Append, ChannelMember, ChannelOffer, EngineStats, Lease, SampleId, WeightsRef
from runtime.rl.weights.receiver import WeightsReceiver

ReadGeneration = Callable[[WeightsRef], Mapping[str, Tensor]]
"""Tensors of a generation by name, every hash verified; raises WeightsError."""


class TorchEngine:
    """A `RolloutEngine`. Not thread-safe."""

    def __init__(self, config: DecoderConfig, spec: EngineSpec, read_generation: ReadGeneration) -> None:
        self.spec = spec
        self._slots = spec.slots  # in use
        self._read = read_generation
        self._device = torch.device(spec.device)
        self._decoder = Decoder(config, DTYPES[spec.dtype]).to(self._device).requires_grad_(False).eval()
        self._cache = KVCache(config, dtype=DTYPES[spec.dtype], device=self._device, keep_tokens=spec.kv_tokens)
        self._waiting: deque[Held] = deque()
        self._running: list[Held] = []  # index: row of the cache
        self._by_id: dict[SampleId, Held] = {}
        self._version: int | None = None
        self._digest: str | None = None
        self._receiver: WeightsReceiver | None = None
        self._update = UpdateFigures()
        self._decoded = self._prefilled = self._updates = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return TORCH_CAPABILITIES

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def digest(self) -> str | None:
        return self._digest

    def free_slots(self) -> int:
        return max(0, self._slots - len(self._running) - len(self._waiting))

    def held(self) -> tuple[SampleId, ...]:
        return tuple(self._by_id)

    def stats(self) -> EngineStats:
        """Rates are the caller's to measure: it knows when the engine was made to wait."""
        used = sum(len(held.tokens) for held in self._running)
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._slots,
            kv_used_share=min(1.0, used / self.spec.kv_tokens),
            decoded_tokens=self._decoded,
            prefill_tokens=self._prefilled,
            updates=self._updates,
            direct_updates=self._update.direct,
            update_pause_s=self._update.pause_s,
            update_receive_s=self._update.receive_s,
            update_bytes=self._update.bytes,
        )

    def limit(self, slots: int | None) -> None:
        self._slots = self.spec.slots if slots is None else min(slots, self.spec.slots)

    def add(self, leases: Sequence[Lease]) -> None:
        """Queue samples. A newer lease epoch of a held sample replaces it; the same or an older one is ignored.

        A sample whose prompt is empty or leaves no room below `max_length` ends at once, for length.
        """
        for lease in leases:
            held = self._by_id.get(lease.sample)
            if held is not None:
                if held.epoch >= lease.epoch:
                    continue
                self.abort((lease.sample,))
            held = Held.of(lease, max_length=self.spec.max_length)
            self._by_id[lease.sample] = held
            self._waiting.append(held)

    def abort(self, samples: Sequence[SampleId]) -> tuple[SampleId, ...]:
        gone = {s for s in samples if s in self._by_id}
        self._waiting = deque(h for h in self._waiting if h.sample not in gone)
        self._drop_rows(row for row, h in enumerate(self._running) if h.sample in gone)
        for sample_id in gone:
            del self._by_id[sample_id]
        return tuple(s for s in dict.fromkeys(samples) if s in gone)

    def check(self) -> None:
        """Nothing lives outside this process."""

    def close(self) -> None:
        """Nothing lives outside this process but a connection to the trainer."""
        if self._receiver is not None:
            self._receiver.stop()

    @torch.inference_mode()
    def step(self) -> tuple[Append, ...]:
        """Nothing is decoded before the first weights or after a failed update."""
        if self._version is None:
            return ()
        ended = self._admit(self._version)
        return (*ended, *self._decode(self._version)) if self._running else ended

    def load_weights(self, ref: WeightsRef) -> None:
        """Verify everything first, then copy in place; running samples queue up again, ahead of those that wait.

        Raises WeightsError, with `version` None, when a hash, name or shape is not as it must be.
        """
        began = time.monotonic()
        self._version = self._digest = None
        self._lay_in(self._read(ref), ref)
        self._update = self._update.after_load(time.monotonic() - began)

    def join(self, offer: ChannelOffer, member: ChannelMember) -> None:
        if self._receiver is not None:
            self._receiver.stop()
            self._receiver = None  # its second buffer is free before there is another
        self._receiver = WeightsReceiver(offer, replace(member, device=self._device.type), device=self._device)

    def swap_weights(self, ref: WeightsRef) -> bool:
        """Received and verified while decoding went on: the pause is one copy within the device."""
        if self._receiver is None or not self._receiver.holds(ref):
            return False
        began = time.monotonic()
        with self._receiver.taken(ref) as got:
            if got is None:
                return False
            self._version = self._digest = None
            self._lay_in(got.tensors, ref)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the second buffer is free when this returns
        self._update = self._update.after_swap(
            time.monotonic() - began, receive_s=got.received.receive_s, size=got.received.bytes
        )
        return True

    def _lay_in(self, tensors: Mapping[str, Tensor], ref: WeightsRef) -> None:
        """Copy in place once everything fits; running samples queue up again."""
        parameters = dict(self._decoder.named_parameters())
        check_fit(parameters, tensors, ref)
        with torch.no_grad():
            torch._foreach_copy_(list(parameters.values()), [tensors[name] for name in parameters], non_blocking=True)
        self._version, self._digest = ref.version, ref.digest
        self._updates += 1
        self._waiting.extendleft(reversed(self._running))
        self._running = []

    def _admit(self, version: int) -> tuple[Append, ...]:
        """Move waiting samples into rows while they fit; those that arrive ended are told so, with no tokens."""
        ended: list[Append] = []
        new: list[Held] = []
        longest = max((h.limit for h in self._running), default=0)
        to_fill = 0
        while self._waiting and len(self._running) + len(new) < self._slots:
            held = self._waiting[0]
            reason = held.finish(self.spec.eos_ids)
            if reason is not None:
                self._waiting.popleft()
                del self._by_id[held.sample]
                ended.append(held.end(reason, version=version))
                continue
            longest = max(longest, held.limit)
            rows = len(self._running) + len(new) + 1
            if rows > 1 and rows * longest > self.spec.kv_tokens:
                break  # a lone sample always runs, however long
            to_fill = max(to_fill, len(held.tokens) - 1)
            if new and (len(new) + 1) * to_fill > self.spec.prefill_tokens:
                break  # the rest at the next step: those that run are not kept waiting
            new.append(self._waiting.popleft())
        if new:
            self._prefill(new)
        return tuple(ended)

    def _prefill(self, new: list[Held]) -> None:
        """Fill the next rows of the cache in one forward, right-padded."""
        length = max(len(h.tokens) for h in new) - 1
        first_row = len(self._running)
        self._cache.ensure(first_row + len(new), length + 1)
        if length:
            rows = [h.tokens[:-1] + [0] * (length + 1 - len(h.tokens)) for h in new]
            self._decoder.prefill(torch.tensor(rows, device=self._device), self._cache, first_row)
            self._prefilled += sum(len(h.tokens) - 1 for h in new)
        self._running += new

    def _decode(self, version: int) -> tuple[Append, ...]:
        """One token for every row."""
        running = self._running
        positions = [len(h.tokens) - 1 for h in running]
        self._cache.ensure(len(running), max(positions) + 1)
        logits = self._decoder.decode(
            torch.tensor([h.tokens[-1] for h in running], device=self._device),
            torch.tensor(positions, device=self._device),
            self._cache,
        )
        u = noise(
            self.spec.seed,
            [h.sample.group for h in running],
            [h.sample.member for h in running],
            [h.position for h in running],
        )
        chosen, logprobs = sample(logits, torch.from_numpy(u).to(self._device), temperature=self.spec.temperature)
        appends: list[Append] = []
        for held, token, logprob in zip(running, chosen.tolist(), logprobs.tolist(), strict=True):
            appends.append(held.take(token, logprob, version=version, eos_ids=self.spec.eos_ids))
        self._decoded += len(appends)
        self._drop_rows(row for row, append in enumerate(appends) if append.finished is not None)
        for append in appends:
            if append.finished is not None:
                del self._by_id[append.sample]
        return tuple(appends)

    def _drop_rows(self, rows: Iterable[int]) -> None:
        """Free rows; the last rows move into the holes, so that rows in use stay the first ones."""
        for row in sorted(rows, reverse=True):
            last = len(self._running) - 1
            if row != last:
                self._cache.move(last, row)
                self._running[row] = self._running[last]
            self._running.pop()
