"""The plan's number of samples at work: a real flow, the loop of a replica and the torch engine, turn by turn in one thread."""

from concurrent.futures import Future
from pathlib import Path

from runtime.paths import RunPaths
from runtime.rl.engine.factory import build_engine
from runtime.rl.exchange import LoopTiming
from runtime.rl.flow.open import open_flow
from runtime.rl.rewards.items import RewardResult
from runtime.rl.rollout import ReplicaLoop
from runtime.rl.tokenizer import load_tokenizer
from runtime.rl.train.factory import build_trainer
from runtime.rl.types import ExchangeReply, ExchangeRequest, TrainerHello
from tests.rl.test_learning import CONFIG
from tests.rl.thread_world import Answered

SLOTS = 16


class Replica:
    """One replica at work for a flow that always has more to do."""

    def __init__(self, folder: Path) -> None:
        algorithm = CONFIG.algorithm.model_copy(update={"prompts_per_step": 32, "responses_per_prompt": 4})
        sampling = CONFIG.sampling.model_copy(update={"max_running": SLOTS})
        config = CONFIG.model_copy(update={"algorithm": algorithm, "sampling": sampling})
        paths = RunPaths(folder=folder, short=folder)
        self.items: list[RewardResult] = []
        tokenizer = load_tokenizer(config.model.tokenizer, config.model.path.parent)
        self.flow = open_flow(config, paths, tokenizer, self)
        trainer = build_trainer(config, paths)
        self.flow.hello(TrainerHello(trainer="t", epoch=1, pid=1, complete=()))
        trainer.restore(None, lineage=0)
        self.flow.published(trainer.publish(), 1)
        timing = LoopTiming(flush_s=0.0, finished_flush_s=0.0, idle_s=0.0)
        self.engine = build_engine(config)
        self.loop = ReplicaLoop(self.engine, self, replica="r", epoch=1, timing=timing)

    def submit(self, items: object) -> None:
        """Nobody verifies: nothing is ever trained."""

    def send(self, request: ExchangeRequest) -> Answered:
        future: Future[ExchangeReply] = Future()
        future.set_result(self.flow.exchange(request))
        return Answered(future)

    def running(self, turns: int = 60) -> list[int]:
        """Samples decoded by each turn of the loop that decodes."""
        found = []
        for _ in range(turns):
            before = self.engine.stats().decoded_tokens
            self.loop.tick()
            found.append(self.engine.stats().decoded_tokens - before)
        return [n for n in found if n]


def test_a_replica_runs_as_many_samples_as_the_plan_in_force_says(tmp_path: Path) -> None:
    """It fills what it is allotted, follows another plan while it works, and is never beyond its own limit."""
    replica = Replica(tmp_path)
    replica.flow.allot(1, {"r": 6})
    seen = replica.running()
    assert max(seen) == 6
    assert min(seen[-20:]) == 6, "and full"
    replica.flow.allot(1, {"r": 12})
    assert max(replica.running()) == 12
    replica.flow.allot(1, {"r": 4})
    assert max(replica.running()[-20:]) == 4, "those beyond have ended"
    replica.flow.allot(1, {"r": 1000})
    assert max(replica.running()) == SLOTS
    replica.flow.allot(1, {"other": 2})
    assert max(replica.running()) == SLOTS
    assert replica.loop.level().stats.slots == SLOTS
    replica.flow.close()
