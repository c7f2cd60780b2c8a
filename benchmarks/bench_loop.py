"""The control loop on 512 devices of a simulated fleet (simulated: it does no work), and the snapshot's way out."""

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.timing import median_ms
from planner.cluster import Cluster, Device, DeviceKind, Link
from planner.model import ModelSpec
from planner.override import Override
from planner.plan import Placement, Plan, Prediction
from planner.problem import Problem
from planner.record import replace
from planner.solution import Explanation, Feasible
from planner.workload import Lengths, Workload
from runtime.api.codec import decode, encode
from runtime.api.wire import RunView, Snapshot
from runtime.backends.simulated.backend import SimulatedBackend
from runtime.core.snapshot import Facts
from runtime.daemon.loop import Loop, LoopSettings
from runtime.planning.process import PlanningResult
from runtime.store.events import open_store

DEVICES = 512
TICK_S = 0.5
KIND = DeviceKind(
    name="wide", peak_flops=1e15, hbm_bytes_per_s=4e12, memory_bytes=96e9, link_bytes_per_s=4e11, price_usd_per_h=2.0
)
LINK = Link(latency_s=1e-5, bytes_per_s=5e9)
CLUSTER = Cluster(
    kinds={"wide": KIND},
    devices=tuple(Device(id=f"d{i}", kind="wide", node=f"n{i // 8}", index=i % 8) for i in range(DEVICES)),
    same_kind=LINK,
    cross_kind=LINK,
)


class FirstTrains:
    """A planner without thought: the loop is what is measured."""

    def __init__(self) -> None:
        self._problem: Problem | None = None

    @property
    def busy(self) -> bool:
        return self._problem is not None

    def start(self, problem: Problem, scheduler: str) -> None:
        self._problem = problem

    def poll(self) -> PlanningResult | None:
        problem, self._problem = self._problem, None
        if problem is None:
            return None
        first, *rest = (d.id for d in problem.cluster.devices)
        placements = (
            Placement(role="train", kind="wide", devices=(first,)),
            *(Placement(role="rollout", kind="wide", devices=(d,)) for d in rest),
        )
        answer = Feasible(
            plan=Plan(placements=placements),
            prediction=Prediction(
                step_s=1, train_s=1, rollout_s=1, update_s=0, tokens_per_s=1, usd_per_h=None, usd_per_mtok=None
            ),
            bound_tokens_per_s=1,
            bound_scope="none",
            explanation=Explanation(headline=""),
            scheduler="first",
            evaluations=1,
        )
        return PlanningResult(solution=answer, error="", solve_s=0.0)

    def cancel(self) -> None:
        self._problem = None


def _problem(devices: tuple[Device, ...], overrides: tuple[Override, ...], in_force: Plan | None) -> Problem:
    lengths = Lengths(mean_tokens=8, max_tokens=16)
    return Problem(
        cluster=replace(CLUSTER, devices=devices),
        model=ModelSpec(name="m", hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=64),
        workload=Workload(prompts_per_step=8, responses_per_prompt=4, prompt=lengths, response=lengths),
        overrides=overrides,
        in_force=in_force,
    )


def run() -> dict[str, float]:
    """A converged loop: what a tick costs while nothing happens."""
    view = RunView(
        id="bench", name="bench", folder="", state="running", label="simulated", started_at_s=0.0, consent="auto",
        hexctl_version="0", daemon_pid=1,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        store = open_store(Path(folder) / "events.db")
        loop = Loop(
            settings=LoopSettings(scheduler="first"),
            store=store,
            planning=FirstTrains(),
            problem=_problem,
            facts=Facts(run=view, kinds=CLUSTER.kinds, groups_per_batch=8),
        )
        now = 1000.0
        loop.begin(epoch=1, pid=1, adopted=False, devices=CLUSTER.devices, now_s=now)
        backend = SimulatedBackend(CLUSTER)
        backend.fleet.now_s = now
        loop.backend = backend

        def tick() -> None:
            nonlocal now
            now += TICK_S
            loop.tick(now)

        for _ in range(200):
            tick()
        tick_ms = median_ms(tick, repeats=40)
        snapshot = loop.snapshot(now)
        assert snapshot is not None
        body = encode(snapshot)
        figures = {
            "tick_512_devices_ms": tick_ms,
            "snapshot_encode_512_devices_ms": median_ms(lambda: encode(snapshot)),
            "snapshot_decode_512_devices_ms": median_ms(lambda: decode(Snapshot, body)),
            "snapshot_512_devices_kb": len(body) / 1e3,
        }
        store.close()
    return figures
