"""The schedulers of HetRL (arXiv 2512.12476): `hetrl`, nested successive halving with an evolutionary search, and
`hetrl_ilp`, exact over its candidates. What differs from the paper is written in docs/concepts/hetrl.md."""

from planner.schedulers.hetrl.ilp import hetrl_ilp
from planner.schedulers.hetrl.search import hetrl

__all__ = ["hetrl", "hetrl_ilp"]
