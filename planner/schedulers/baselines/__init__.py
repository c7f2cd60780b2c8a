"""Schedulers to beat, scored by the same cost model and judge: what other systems do, and plain search.

`verl`, `areal` and `streamrl` model how those systems place an RL workflow; `random` and `deap` search whole plans without
knowing anything of the problem. None is a port: each module says what it models, from which public source, and where the
plan space makes it differ.
"""
