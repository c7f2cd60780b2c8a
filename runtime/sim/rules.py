"""What a simulated run keeps to."""

from planner.record import record
from runtime.policy.staleness import StalenessPolicy
from runtime.sim.lengths import LengthModel

INF = float("inf")


@record
class WeightsPath:
    """How new weights reach a replica."""

    link: str = "none"  # transfers over links of one name share it
    bytes_per_s: float = INF
    size_bytes: float = 0.0
    fixed_s: float = 0.0
    swap_s: float = 0.0  # for which a replica stops that went on while they came


@record
class FlowRules:
    """The workload's rules, in the words of the planner's workload. `steps`: None goes on for ever."""

    policy: StalenessPolicy
    responses_per_prompt: int
    prompt: LengthModel
    response: LengthModel
    reward_s: float = 0.0
    pause_all: bool = False  # the trainer waits for every replica's update
    overlapped: bool = False  # nobody waits for the transfer, but for the swap at its end
    recompute: bool = True  # new weights make running samples prefill again
    block: int | None = (
        None  # tokens of the KV blocks in which samples of a group share their prompt; None: nothing is shared
    )
    windows: int = 8  # in the mean time that a sample takes
    steps: int | None = None
