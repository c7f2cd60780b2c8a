"""Prompts that the samples of a group share in a replica's KV cache.

Whole groups go to one replica, whose engine keeps a block of KV tokens once for all that begin with the same ones. Of a prompt of
P tokens that is Q = block * floor((P - 1) / block): whole blocks alone, and never the last token, which every sample needs
computed to sample from. Responses are each sample's own.

*Prefilled*: a group's first sample computes P tokens, each other one P - Q. *Held*: a group's Q tokens, from its first sample's
beginning to its last one's end. By Little's law so many groups are held where b samples run,

    D(b) = groups begun a second * E[a group's time] = b / (S E[L]) * E[max over i of (i E[L] / b + L_i)],    i < S

as places become free every E[L] / b tokens and the samples of a group take them one after the other. The expectation is above
both of the lines that touch it, at b -> infinity (all begin at once, any of them is the last: M is E[max of S] / E[L]) and at
small b (the last to begin is the last to end), and within a tenth of the larger:

    D(b) = max(b M + (S - 1) / 2, b + S - 1) / S,    at most b, and no more than there are groups
"""

from planner.cost.lengths import Moments, quantiles
from planner.record import record
from planner.workload import Lengths, Workload

_POINTS = 256


@record
class Sharing:
    """What the samples of a group share on a replica; tokens of one prompt, and tokens squared."""

    group: int = 1  # samples
    tokens: float = 0.0  # E[Q]
    tokens2: float = 0.0  # E[Q^2]
    tail: float = 1.0  # M
    most: int = 1  # groups that there are at once

    def held_groups(self, running: float) -> float:
        """Mean number of groups that have a sample among so many running ones; it never falls as more run."""
        lasting = max(running * self.tail + (self.group - 1) / 2, running + self.group - 1) / self.group
        return min(running, lasting, max(self.most, running / self.group))

    def spared_tokens(self, running: float) -> float:
        """Tokens of KV that so many running samples need not hold each for itself."""
        return (running - self.held_groups(running)) * self.tokens

    def spared_tokens2(self, running: float) -> float:
        """The same of squares: what attention is spared where the prefixes of all of them are computed."""
        return (running - self.held_groups(running)) * self.tokens2

    @property
    def each_spared(self) -> float:
        """Share of the samples that find their group's prompt computed."""
        return 1 - 1 / self.group


def sharing(workload: Workload, m: Moments, block: int | None) -> Sharing:
    """What is shared of a workload's prompts in blocks of so many tokens; None: nothing."""
    if block is None or workload.responses_per_prompt == 1:
        return Sharing()
    tokens, tokens2 = shared_tokens(workload.prompt, block)
    return Sharing(
        group=workload.responses_per_prompt,
        # Moments are of the whole distribution, quantiles of one that is cut: nothing is spared that is not there.
        tokens=min(tokens, m.prompt),
        tokens2=min(tokens2, m.prompt2),
        tail=m.tail_group,
        most=workload.prompts_per_step * (1 if workload.synchronous else workload.eta + 1),
    )


def shared_tokens(prompt: Lengths, block: int) -> tuple[float, float]:
    """(E[Q], E[Q^2]) of prompts of that distribution."""
    whole = block * ((quantiles(prompt, 1 if prompt.cv == 0 else _POINTS) - 1) // block)
    return float(whole.mean()), float((whole**2).mean())
