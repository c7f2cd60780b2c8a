"""The schedulers by name. A scheduler offers plans to a `Search`."""

from collections.abc import Mapping
from types import MappingProxyType

from planner.errors import UnknownName
from planner.schedulers.areal_hex import areal_hex
from planner.schedulers.baselines.areal import areal
from planner.schedulers.baselines.deap_search import deap_search
from planner.schedulers.baselines.random_plans import random_plans
from planner.schedulers.baselines.streamrl import streamrl
from planner.schedulers.baselines.verl import verl
from planner.schedulers.exhaustive import exhaustive
from planner.schedulers.hetrl import hetrl, hetrl_ilp
from planner.schedulers.hex import hex_scheduler
from planner.search import Scheduler

SCHEDULERS: Mapping[str, Scheduler] = MappingProxyType(
    {
        "areal-hex": areal_hex,
        "hex": hex_scheduler,
        "exhaustive": exhaustive,
        "hetrl": hetrl,
        "hetrl-ilp": hetrl_ilp,
        "verl": verl,
        "areal": areal,
        "streamrl": streamrl,
        "random": random_plans,
        "deap": deap_search,  # DEAP itself is imported when it runs
    }
)


def scheduler(name: str) -> Scheduler:
    """The scheduler of that name; UnknownName where there is none."""
    try:
        return SCHEDULERS[name]
    except KeyError:
        raise UnknownName("no such scheduler", got=name, expected=", ".join(SCHEDULERS)) from None
