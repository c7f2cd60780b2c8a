"""What AReaL-Hex and HetRL report, beside what the planner and its cost model say: `make papers` writes docs/papers.md.

Two tables that share nothing but the claims: first principles over a sweep of what the papers do not print (`claims`, `scenarios`),
and the paper's own measured rates put together anew (`measured`). Every figure of the report comes from here; none is written by
hand, and nothing is fitted to the papers.
"""
