"""vLLM as a rollout engine: a process of its own does the forward passes, this side knows samples, leases and versions.

The process steps by itself, at most `spec.ahead` steps before the replica has taken what came; `step` hands over one of its
steps. It knows requests by number only. A number stands for one sample on one lease over one generation of weights: at new
weights what is held is added again under new numbers, and what still arrives under an old one is dropped. So a token's
version is that of the weights its number was given under, whatever was under way.

Sampling noise is vLLM's own: tokens depend on the batch and the seed, not on the sample's coordinates as in the torch engine.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from runtime.errors import WeightsError
from runtime.rl.engine.fit import UpdateFigures
from runtime.rl.engine.held import Held
from runtime.rl.engine.spec import VllmSpec, vllm_capabilities
from runtime.rl.engine.vllm_host.rows import Request, pack_requests, unpack_rows
from runtime.rl.engine.vllm_host.wire import Message
from runtime.rl.engine.vllm_process import ENGINE, EngineProcess
from runtime.rl.protocols import EngineCapabilities
from runtime.rl.types import Append, ChannelMember, ChannelOffer, EngineStats, Lease, SampleId, WeightsRef

SLICE_S = 0.5  # longest wait of one `step`: between two of them the replica speaks to flow


class VllmEngine:
    """A `RolloutEngine`. Not thread-safe. `close` ends its processes; so does the end of this process, however it ends."""

    def __init__(self, spec: VllmSpec, *, program: str = ENGINE, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes seconds on a CPU, a minute and more on a GPU: returns when the engine has generated a token."""
        self.spec = spec
        self._slots = spec.slots  # in use
        self._clock = clock
        self._process = EngineProcess(spec.plain(), start_s=spec.start_s, program=program, clock=clock)
        self.facts: Message = self._process.ready["facts"]
        self._level: Message = self._process.ready["level"]
        self._by_id: dict[SampleId, Held] = {}
        self._unsent: deque[Held] = deque()  # held here, not yet given to the process
        self._numbers: dict[SampleId, int] = {}  # of those that were
        self._by_number: dict[int, Held] = {}
        self._next = 1
        self._told: deque[Append] = deque()  # arrived while weights were being loaded
        self._credit = 0  # steps the process may still make
        self._silent_s = 0.0  # waited without any token, in `step`
        self._version: int | None = None
        self._digest: str | None = None
        self._update = UpdateFigures()
        self._decoded = self._updates = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return vllm_capabilities(self.spec.max_tp)

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def digest(self) -> str | None:
        return self._digest

    @property
    def process_group(self) -> int:
        """Of everything that belongs to the engine."""
        return self._process.group

    def free_slots(self) -> int:
        return max(0, self._slots - len(self._by_id))

    def held(self) -> tuple[SampleId, ...]:
        """Also those that ended while new weights were laid in, until `step` has told so: nobody else knows yet."""
        return tuple(dict.fromkeys((*self._by_id, *(a.sample for a in self._told))))

    def stats(self) -> EngineStats:
        """Queue and KV cache as of the last step that was taken."""
        given = len(self._numbers)
        running = min(given, self.spec.slots if self._level["running"] is None else self._level["running"])
        return EngineStats(
            running=running,
            waiting=len(self._by_id) - running,
            slots=self._slots,
            kv_used_share=(self._level["kv_used"] or 0.0) if self._by_id else 0.0,
            decoded_tokens=self._decoded,
            prefill_tokens=self._level["prefilled"],
            updates=self._updates,
            direct_updates=self._update.direct,
            update_pause_s=self._update.pause_s,
            update_receive_s=self._update.receive_s,
            update_bytes=self._update.bytes,
            plain_steps=self._level["plain_steps"],
            plain_step_s=self._level["plain_step_s"],
            plain_host_s=self._level["plain_host_s"],
        )

    def limit(self, slots: int | None) -> None:
        self._slots = self.spec.slots if slots is None else min(slots, self.spec.slots)
        self._process.send({"kind": "limit", "slots": self._slots})

    def add(self, leases: Sequence[Lease]) -> None:
        """Queue samples. A newer lease epoch of a held sample replaces it; the same or an older one is ignored."""
        for lease in leases:
            held = self._by_id.get(lease.sample)
            if held is not None:
                if held.epoch >= lease.epoch:
                    continue
                self.abort((lease.sample,))
            held = Held.of(lease, max_length=self.spec.max_length)
            self._by_id[lease.sample] = held
            self._unsent.append(held)

    def abort(self, samples: Sequence[SampleId]) -> tuple[SampleId, ...]:
        held = set(self.held())
        gone = tuple(s for s in dict.fromkeys(samples) if s in held)
        numbers = [self._numbers[s] for s in gone if s in self._numbers]
        for sample in gone:
            self._forget(sample)
        self._unsent = deque(h for h in self._unsent if self._by_id.get(h.sample) is h)
        self._told = deque(a for a in self._told if a.sample not in gone)
        if numbers:
            self._process.send({"kind": "abort", "keys": numbers})
        return gone

    def step(self) -> tuple[Append, ...]:
        """One step of the process, or what had arrived before; at most half a second of waiting.

        Raises DeadlineError when no token came for `spec.token_s` of waiting while samples run, RunError when the
        process has ended: the engine is of no use then.
        """
        if self._version is None:
            return ()
        ended = (*self._take_told(), *self._submit(self._version))
        if not self._numbers:
            return ended
        self._grant()
        began = self._clock()
        message = self._process.receive(0.0 if ended else SLICE_S)
        if message is None:
            self._silent_s += self._clock() - began
            if self._silent_s >= self.spec.token_s:
                raise self._process.hung(f"generate a token for {len(self._numbers)} samples", self.spec.token_s)
            return ended
        return (*ended, *self._rows(message, self._version))

    def load_weights(self, ref: WeightsRef) -> None:
        """The process verifies every tensor, then swaps them between two of its steps; held samples are added again and
        their KV computed anew, unless `kv_on_update` is "keep".

        Raises WeightsError, with `version` None, when anything is not as it must be.
        """
        began = self._clock()
        self._new_weights("load", ref)
        self._update = self._update.after_load(self._clock() - began)

    def join(self, offer: ChannelOffer, member: ChannelMember) -> None:
        self._process.send({"kind": "join", "offer": _plain(offer), "member": _plain(member)})

    def swap_weights(self, ref: WeightsRef) -> bool:
        """Received and verified by the process while it generated: it pauses for the swap alone."""
        figures = self._new_weights("swap", ref)
        if figures is not None:
            self._update = self._update.after_swap(
                figures["pause_s"], receive_s=figures["receive_s"], size=figures["bytes"]
            )
        return figures is not None

    def _new_weights(self, kind: str, ref: WeightsRef) -> Message | None:
        """Have the process take `ref`: figures of the update, None when it does not have it (and nothing changed)."""
        version = self._version
        if kind == "load":  # whatever comes of it: what is in use now will not be served again unverified
            self._version = self._digest = None
        keep = self.spec.kv_on_update == "keep" and version is not None

        def before(message: Message) -> None:
            self._file(message, version)

        command = {"lineage": ref.lineage, "version": ref.version, "path": ref.path, "digest": ref.digest}
        self._process.send({"kind": kind, "ref": command, "keep": keep})
        answer = self._process.wait_for(
            "loaded", "refused", "absent", deadline_s=self.spec.load_s, doing="load the weights", other=before
        )
        if answer["kind"] == "absent":
            return None
        self._version = self._digest = None
        if answer["kind"] == "refused":
            self._requeue()
            raise WeightsError(answer["error"], where=answer["where"] or ref.path)
        self._file(answer, version)
        if not keep:
            self._requeue()
        self._version, self._digest = ref.version, ref.digest
        self._updates += 1
        self._silent_s = 0.0
        figures: Message = answer.get("update", {})
        return figures

    def sleep(self) -> bool:
        """Give the GPU's memory back; whether there was any to give (a CPU engine has none, nor one without `spec.sleep`).
        Held samples are added again later. Nothing is served until weights are loaded after `wake`."""
        version = self._version
        self._version = self._digest = None
        self._process.send({"kind": "sleep"})
        answer = self._process.wait_for(
            "slept", deadline_s=self.spec.load_s, doing="sleep", other=lambda message: self._file(message, version)
        )
        self._requeue()
        return bool(answer["freed"])

    def wake(self) -> None:
        """Take the memory again. The engine stays without a version until `load_weights`: what it holds is undefined."""
        self._process.send({"kind": "wake"})
        self._process.wait_for("woken", deadline_s=self.spec.load_s, doing="wake")

    def check(self) -> None:
        """RunError when the engine's process has ended."""
        self._process.check()

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        self._version = self._digest = None
        self._process.close()

    def _submit(self, version: int) -> tuple[Append, ...]:
        """Give the process what it does not have; those that arrive ended are told so, with no tokens."""
        ended: list[Append] = []
        requests: list[Request] = []
        while self._unsent:
            held = self._unsent.popleft()
            reason = held.finish(self.spec.eos_ids)
            if reason is not None:
                self._forget(held.sample)
                ended.append(held.end(reason, version=version))
                continue
            number, self._next = self._next, self._next + 1
            self._numbers[held.sample], self._by_number[number] = number, held
            requests.append((number, held.tokens, held.limit - len(held.tokens)))
        if requests:
            self._process.send({"kind": "add", "requests": pack_requests(requests)})
        return tuple(ended)

    def _grant(self) -> None:
        """Let the process be `ahead` steps ahead of what was taken."""
        if steps := self.spec.ahead - self._credit:
            self._process.send({"kind": "credit", "steps": steps, "most": self.spec.ahead})
            self._credit = self.spec.ahead

    def _rows(self, message: Message, version: int) -> tuple[Append, ...]:
        """Appends of one step of the process. Samples that ended are forgotten."""
        self._level = message["level"]
        if message["kind"] == "rows":
            self._credit -= 1
        appends: list[Append] = []
        stray: list[int] = []
        by_number, eos_ids, decoded = self._by_number, self.spec.eos_ids, 0
        for number, tokens, logprobs, finished in unpack_rows(message["rows"]):
            decoded += len(tokens)
            held = by_number.get(number)
            if held is None:
                continue  # aborted since
            append = held.take_all(tokens, logprobs, version=version, eos_ids=eos_ids)
            if finished and append.finished is None:
                append = append._replace(finished="length")  # the engine had no room for more
            if append.finished is not None:
                self._forget(held.sample)
                if not finished:
                    stray.append(number)
            appends.append(append)
        self._decoded += decoded
        if message["rows"]["keys"]:
            self._silent_s = 0.0
        if stray:
            self._process.send({"kind": "abort", "keys": stray})
        return tuple(appends)

    def _file(self, message: Message, version: int | None) -> None:
        """What was sampled before new weights took over, or before sleep: told by the next step, under the old version."""
        if version is not None and "rows" in message:
            self._told.extend(self._rows(message, version))

    def _take_told(self) -> Iterable[Append]:
        told, self._told = self._told, deque()
        return told

    def _requeue(self) -> None:
        """What the process had is to be added again, ahead of what it never had."""
        self._numbers.clear()
        self._by_number.clear()
        self._unsent = deque(self._by_id.values())

    def _forget(self, sample: SampleId) -> None:
        self._by_id.pop(sample, None)
        number = self._numbers.pop(sample, None)
        if number is not None:
            self._by_number.pop(number, None)


def _plain(value: ChannelOffer | ChannelMember) -> Message:
    """As JSON values."""
    return {k: getattr(value, k) for k in value.__dataclass_fields__}
