"""Build a run's flow from its configuration and its folder."""

import time
from collections.abc import Callable

from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.paths import RunPaths
from runtime.policy.staleness import StalenessPolicy
from runtime.rl.flow.flow import Flow
from runtime.rl.flow.state import FlowFiles, FlowSettings
from runtime.rl.ledger import KEEP_STEPS, Ledger
from runtime.rl.rewards.items import RewardClient
from runtime.rl.tasks import make_task
from runtime.rl.tokenizer import Tokenizer
from runtime.rl.train.schedule import most_unsaved
from runtime.rl.types import RunLimits

SILENCE_TIMEOUTS = 3  # verifiers that answer nothing for that many time limits, and a little, are asked again
SILENCE_FLOOR_S = 30.0


def flow_settings(config: Config, limits: RunLimits | None = None) -> FlowSettings:
    """What flow acts on."""
    algorithm, task = config.algorithm, config.task
    if task is None:
        raise ConfigError("this configuration is for planning only", expected="a [task] table", hint="add [task]")
    return FlowSettings(
        policy=StalenessPolicy(
            eta=algorithm.bound, prompts_per_step=algorithm.prompts_per_step, stale=algorithm.stale_policy
        ),
        responses_per_prompt=algorithm.responses_per_prompt,
        max_new_tokens=config.sampling.max_new_tokens,
        normalise_advantage=algorithm.normalise_advantage,
        limits=limits or RunLimits(steps=config.run.steps),
        reward_deadline_s=SILENCE_TIMEOUTS * task.reward_timeout + SILENCE_FLOOR_S,
        eval_every_steps=config.evaluation.every_steps,
        eval_prompts=config.evaluation.prompts,
    )


def kept_steps(checkpoint_every: int) -> int:
    """Applied steps whose tokens stay: a crash may lose all that are in no complete checkpoint, and a few of those that are."""
    return KEEP_STEPS + most_unsaved(checkpoint_every)


def open_flow(
    config: Config,
    paths: RunPaths,
    tokenizer: Tokenizer,
    rewards: RewardClient,
    *,
    limits: RunLimits | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    on_change: Callable[[], None] = lambda: None,
) -> Flow:
    """Open (or create) the run's ledger and build its flow. Paths in `config` must be resolved already; `limits`: default
    those of the configuration. ConfigError for data that does not fit, LedgerError when the ledger cannot be used."""
    settings = flow_settings(config, limits)
    task = make_task(config, tokenizer)
    return Flow(
        settings=settings,
        ledger=Ledger(paths.ledger, keep_steps=kept_steps(config.trainer.checkpoint_every_steps)),
        task=task,
        tokenizer=tokenizer,
        rewards=rewards,
        files=FlowFiles(metrics=paths.metrics, samples=paths.samples, evaluations=paths.evaluations),
        clock=clock,
        wall=wall,
        on_change=on_change,
    )
