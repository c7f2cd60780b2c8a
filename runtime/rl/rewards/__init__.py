"""Rewards: verifiers, in children that can be killed."""

from runtime.rl.rewards.items import RewardClient, RewardItem, RewardResult
from runtime.rl.rewards.pool import RewardPool, verifier_spec
from runtime.rl.rewards.verifiers import VerifierSpec, make_verifier

__all__ = ["RewardClient", "RewardItem", "RewardPool", "RewardResult", "VerifierSpec", "make_verifier", "verifier_spec"]
