"""What every cost function looks at besides its subject."""

from planner.calibration.records import Calibration
from planner.cluster import Cluster, DeviceKind
from planner.cost.assumptions import Assumptions
from planner.cost.lengths import Moments, moments
from planner.cost.rates import Rates
from planner.cost.sharing import Sharing, sharing
from planner.model import ModelSpec
from planner.plan import Task
from planner.problem import AttentionKernel, Problem, TrainerKind
from planner.record import record, replace
from planner.workload import Workload


@record
class Context:
    """A problem without its overrides and objective, the moments of its lengths, and the assumptions."""

    cluster: Cluster
    model: ModelSpec
    workload: Workload
    trainer: TrainerKind
    m: Moments
    a: Assumptions
    rates: Rates
    weights_full_every: int = 1  # `Capabilities.weights_full_every`
    row_tokens: int | None = None  # `Capabilities.train_row_tokens`
    direct: bool = False  # `Capabilities.direct_updates`
    shared: Sharing = Sharing()  # of prompts, in a replica
    train_attention: AttentionKernel = "flash_2"  # `Capabilities.train_attention`
    critic: ModelSpec | None = None  # None: shaped like `model`
    reward: ModelSpec | None = None

    def kind(self, name: str) -> DeviceKind:
        """The device kind of that name."""
        return self.cluster.kinds[name]

    def of(self, task: Task) -> "Context":
        """This context as one task sees it: with the model that it runs as `model`."""
        own = {"critic_training": self.critic, "critic_values": self.critic, "reward": self.reward}.get(task)
        return self if own is None or own == self.model else replace(self, model=own)

    @property
    def batch_tokens(self) -> float:
        """Mean prompt and response tokens of a step."""
        return self.workload.samples_per_step * self.m.sequence

    @property
    def head_share(self) -> float:
        """Share of a batch's tokens whose logits training needs: of a packing trainer the response's, of others all."""
        return 1.0 if self.row_tokens is None else self.m.response / self.m.sequence


def context_of(
    problem: Problem, assumptions: Assumptions | None = None, calibration: Calibration | None = None
) -> Context:
    """The context of a problem; what its engine can run at once caps the assumption."""
    a, can = assumptions or Assumptions(), problem.capabilities
    if can.rollout_max_running is not None:
        a = replace(a, max_running=min(a.max_running, can.rollout_max_running))
    m = moments(problem.workload)
    return Context(
        cluster=problem.cluster,
        model=problem.model,
        workload=problem.workload,
        trainer=can.trainer,
        m=m,
        a=a,
        rates=Rates(calibration or problem.calibration),
        weights_full_every=can.weights_full_every,
        row_tokens=can.train_row_tokens,
        direct=can.direct_updates,
        shared=sharing(problem.workload, m, can.rollout_prefix_block),
        train_attention=can.train_attention,
        critic=problem.critic_model,
        reward=problem.reward_model,
    )
