"""A sample on its way through an engine, and how it ends. Pure: no torch; shared by all engines."""

from dataclasses import dataclass

from runtime.rl.types import Append, FinishReason, Lease, SampleId


@dataclass(slots=True)
class Held:
    """A sample on its way: `tokens` is the prompt and the response so far."""

    sample: SampleId
    epoch: int
    tokens: list[int]
    prompt_length: int
    limit: int  # length at which it ends

    @classmethod
    def of(cls, lease: Lease, *, max_length: int) -> "Held":
        """As a lease brings it; `max_length` bounds prompt and response together."""
        prompt_length = len(lease.prompt_tokens)
        return cls(
            sample=lease.sample,
            epoch=lease.epoch,
            tokens=[*lease.prompt_tokens, *lease.tokens],
            prompt_length=prompt_length,
            limit=min(prompt_length + lease.max_new_tokens, max_length),
        )

    @property
    def position(self) -> int:
        """Response tokens so far: the position of the next one."""
        return len(self.tokens) - self.prompt_length

    def take(self, token: int, logprob: float, *, version: int, eos_ids: frozenset[int]) -> Append:
        """Go on by one token."""
        return self.take_all((token,), (logprob,), version=version, eos_ids=eos_ids)

    def take_all(
        self, tokens: tuple[int, ...], logprobs: tuple[float, ...], *, version: int, eos_ids: frozenset[int]
    ) -> Append:
        """Go on by tokens sampled from the same weights. Every token of a run comes here, nearly always alone: so `finish` is
        written out for it."""
        held = self.tokens
        start = len(held) - self.prompt_length
        held += tokens
        finished: FinishReason | None = None
        if not tokens:
            finished = self.finish(eos_ids)
        elif tokens[-1] in eos_ids:
            finished = "eos"
        elif len(held) >= self.limit:
            finished = "length"
        return Append(self.sample, self.epoch, start, tokens, logprobs, version, finished)

    def end(self, reason: FinishReason, *, version: int) -> Append:
        """Say that there is nothing to add."""
        return Append(self.sample, self.epoch, self.position, (), (), version, reason)

    def finish(self, eos_ids: frozenset[int]) -> FinishReason | None:
        """Why the sample has ended, as far as its tokens say: also for one resumed after its last token."""
        if self.position > 0 and self.tokens[-1] in eos_ids:
            return "eos"
        return "length" if len(self.tokens) >= self.limit or not self.tokens else None
