"""The cost model: what a plan takes in seconds, bytes and dollars."""

from planner.cost.assumptions import Assumptions
from planner.cost.model import CostModel, Scored

__all__ = ["Assumptions", "CostModel", "Scored"]
