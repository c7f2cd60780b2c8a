"""Nested successive halving over two levels of arms, as HetRL (arXiv 2512.12476) runs it over task groupings and GPU groupings.

With B evaluations, TG the task groupings, GG those of the GPUs of one task grouping, in rounds m and n:

    b_m  = floor(B   / (|TG_m| ceil(log2 |TG|)))      for each task grouping that is left
    b_mn = floor(b_m / (|GG_n| ceil(log2 |GG_m|)))    for each of its GPU groupings that is left

Each arm spends b_mn evaluations; the best half of the GPU groupings stays, then the best half of the task groupings, each with
half of its GPU groupings. Two guards the paper does not print: one arm counts as one round (its logarithm is 0), and where a
budget is below one evaluation an arm, arms are thinned evenly until it is not.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Arm(Protocol):
    """Something that gets better the more evaluations it is given."""

    best_s: float  # the best value so far, less is better; infinite before there is one

    def spend(self, evaluations: int) -> None:
        """Search on for so many evaluations."""
        ...


A = TypeVar("A", bound=Arm)


def rounds(arms: int) -> int:
    """ceil(log2 n) rounds of halving, at least one."""
    return max(1, math.ceil(math.log2(arms))) if arms > 1 else 1


def share(budget: int, left: int, at_first: int) -> int:
    """Evaluations of one arm in a round with `left` arms, of `at_first` in the first."""
    return budget // (left * rounds(at_first))


def thinned(arms: Sequence[A], budget: int) -> list[A]:
    """As many arms, evenly spread over the order given, as get an evaluation each in the first round; at least one."""
    most = len(arms)
    while most > 1 and most * rounds(most) > budget:
        most -= 1
    return [arms[i * len(arms) // most] for i in range(most)]


def best_half(arms: Sequence[A]) -> list[A]:
    """The better half, rounded up, in their order; earlier arms win ties."""
    ranked = sorted(range(len(arms)), key=lambda i: (arms[i].best_s, i))
    return [arms[i] for i in sorted(ranked[: (len(arms) + 1) // 2])]


def halve(arms: Sequence[A], budget: int, halted: Callable[[], bool]) -> list[A]:
    """The inner level: one task grouping's GPU groupings share `budget` evaluations. Returns all arms that took part."""
    taking_part = thinned(arms, budget)
    left = list(taking_part)
    for _ in range(rounds(len(taking_part))):
        each = max(1, share(budget, len(left), len(taking_part)))
        for arm in left:
            if halted():
                return taking_part
            arm.spend(each)
        left = best_half(left)
    return taking_part


def nested_halving(groupings: Sequence[Sequence[A]], budget: int, halted: Callable[[], bool]) -> list[A]:
    """Both levels: `groupings` holds the GPU groupings of each task grouping. Returns the arms of the last survivor."""

    class Outer:
        def __init__(self, arms: Sequence[A]) -> None:
            self.arms = list(arms)

        @property
        def best_s(self) -> float:
            return min((a.best_s for a in self.arms), default=math.inf)

        @best_s.setter
        def best_s(self, value: float) -> None:
            raise AttributeError(value)

        def spend(self, evaluations: int) -> None:
            self.arms = halve(self.arms, evaluations, halted)

    everyone = thinned([Outer(arms) for arms in groupings if arms], budget)
    left = list(everyone)
    for _ in range(rounds(len(everyone)) if everyone else 0):
        each = max(1, share(budget, len(left), len(everyone)))
        for grouping in left:
            if halted():
                break
            grouping.spend(each)
        left = best_half(left)
        for grouping in left:
            grouping.arms = best_half(grouping.arms)
    return best_half(left)[0].arms if left else []
