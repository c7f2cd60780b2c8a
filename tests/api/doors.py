"""A daemon's door made of memory, and a server thread that serves it on a real socket."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.errors import UnknownName
from planner.record import replace
from runtime.api import wire
from runtime.daemon.server import serve
from runtime.errors import RefusedError


def device(index: int, **changes: object) -> wire.DeviceRow:
    base = wire.DeviceRow(
        id=f"paced-{index}", display=f"n0/gpu{index}", kind="wide", node="n0", index=index, role="rollout", status="ok",
        paced=True, replica=f"r{index}", version=7, digest="9f3c", util_share=0.74, memory_used_bytes=2e6,
        memory_total_bytes=9.6e7, power_w=None, temperature_c=None, tokens_per_s=812.0, predicted_tokens_per_s=820.0,
        usd_per_h=0.6, usd_per_mtok=0.42, running=24, slots=64, pid=4242 + index, cordoned=False, pinned=None, age_s=0.4,
    )  # fmt: skip
    return replace(base, **changes)


PLAN = wire.PlanView(
    rev=3, scheduler="areal-hex", step_s=0.61, train_s=0.45, rollout_s=0.61, tokens_per_s=3400.0, usd_per_h=3.12,
    usd_per_mtok=0.255, bound_tokens_per_s=3420.0, bound_scope="runtime", gap=0.006, solve_s=0.8,
    headline="fast trains, the rest generates", why=("fast has the most FLOP/s",), trigger="start", made_at_s=1000.0,
    placements=(
        wire.PlacementRow(role="train", kind="fast", devices=("paced-0",), tp=1, pp=1, dp=1, rate_tokens_per_s=4551.0),
        wire.PlacementRow(role="rollout", kind="wide", devices=("paced-1",), tp=1, pp=1, dp=1, rate_tokens_per_s=812.0),
    ),
)  # fmt: skip

FLOW = wire.FlowView(
    version=7, eta=4, staleness_mean=1.4, staleness_p95=3.0, staleness_max=4, reward_mean=0.83, generated_tokens=19000,
    trained_tokens=15000, masked_tokens=12, in_flight_tokens=3900, wasted_tokens={"cancelled": 88}, redone_tokens=5,
    queue_groups=67, queue_batches=2.1, generated_tokens_per_s=1842.0, tokens_per_s=1790.0, usd_per_h=3.12,
    usd_per_mtok=0.48, power_w=700.0, kwh_per_mtok=0.109, trainer_wait_share=0.03, admission_wait_share=0.0, waits="trainer waits for data",
    samples_by_state={"LEASED": 40, "DONE": 12}, steps_done=7, spans_two_versions_share=0.31,
    metrics={"grad_norm": 0.7, "kl": float("nan")},
)  # fmt: skip


def snapshot(**changes: object) -> wire.Snapshot:
    base = wire.Snapshot(
        seq=1, at_s=1060.0, flow=FLOW, flow_age_s=0.2, plan=PLAN, proposal=None,
        run=wire.RunView(
            id="local-7f3a", name="local", folder="/somewhere/runs/local-7f3a", state="running", label="paced",
            started_at_s=1000.0, consent="auto", hexctl_version="0.1.0", daemon_pid=77,
        ),
        devices=(device(0, role="train", kind="fast", replica="t0"), device(1)),
        migration=wire.MigrationView(running=(), waiting=()), events=(), series={"reward": (0.1, 0.5, 0.83)},
    )  # fmt: skip
    return replace(base, **changes)


class MemoryDoor:
    """A daemon that remembers. Lives in the server's event loop."""

    def __init__(self) -> None:
        self.current = snapshot()
        self.rows: list[wire.EventRow] = []
        self.commands: list[wire.Command] = []
        self.override_rev = 0
        self.waiting = threading.Event()  # a long poll is open
        self.slow: asyncio.Event | None = None  # commands wait for it
        self._changed: asyncio.Condition | None = None

    def snapshot(self) -> wire.Snapshot:
        return self.current

    def _condition(self) -> asyncio.Condition:
        if self._changed is None:
            self._changed = asyncio.Condition()
        return self._changed

    async def put(self, **changes: object) -> None:
        async with self._condition():
            self.current = replace(self.current, seq=self.current.seq + 1, **changes)
            self._condition().notify_all()

    async def wait_snapshot(self, after: int, timeout_s: float) -> wire.Snapshot | None:
        self.waiting.set()
        try:
            async with asyncio.timeout(timeout_s), self._condition():
                await self._condition().wait_for(lambda: self.current.seq > after)
        except TimeoutError:
            return None
        return self.current

    def events(self, after: int, limit: int) -> tuple[wire.EventRow, ...]:
        return tuple(row for row in self.rows if row.seq > after)[:limit]

    async def command(self, c: wire.Command) -> wire.CommandResult:
        self.commands.append(c)
        if self.slow is not None:
            await self.slow.wait()
        if c.device == "n9/gpu9":
            raise UnknownName("no such device", got=c.device, hint="hexctl gpus lists them")
        if c.name == "approve" and c.plan_rev != 4:
            raise RefusedError("that proposal is no longer open", got=c.plan_rev, expected="4")
        if c.reason == "boom":
            raise ZeroDivisionError("secret detail")
        self.override_rev += 1
        return wire.CommandResult(accepted=True, message=f"{c.name} done", override_rev=self.override_rev, plan_rev=3)


class Served:
    """A server in a thread of its own; `run` runs a coroutine function in its loop."""

    def __init__(self, door: MemoryDoor, path: Path) -> None:
        self.door, self.path = door, path
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.loop = asyncio.new_event_loop()
        self.stop = asyncio.Event()
        self.thread = threading.Thread(target=self._main, name="served", daemon=True)

    def _main(self) -> None:
        try:
            self.loop.run_until_complete(serve(self.door, self.path, self.stop, on_ready=self.ready.set))
        except BaseException as e:  # noqa: BLE001  (handed to the test)
            self.error = e
        finally:
            self.ready.set()

    def start(self) -> None:
        self.thread.start()
        assert self.ready.wait(60)

    def put(self, **changes: object) -> None:
        asyncio.run_coroutine_threadsafe(self.door.put(**changes), self.loop).result(60)

    def end_soon(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)

    def end(self) -> None:
        if self.thread.is_alive():
            self.end_soon()
            self.thread.join(60)
        assert not self.thread.is_alive()
        self.loop.close()


@contextmanager
def served(path: Path, door: MemoryDoor | None = None) -> Iterator[Served]:
    """A server on a real socket at `path`."""
    s = Served(door or MemoryDoor(), path)
    s.start()
    try:
        if s.error is not None:
            raise s.error
        yield s
    finally:
        s.end()
