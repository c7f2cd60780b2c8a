"""The daemon's life: plan, serve the API, open the backend, turn the loop, end the run or leave it."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Literal

from planner.cluster import Device
from planner.errors import HexError
from planner.model import load_model_spec
from planner.override import Override
from planner.plan import Plan
from planner.problem import Problem
from planner.record import record, replace
from runtime.api.wire import FleetLabel, RunView
from runtime.backends.protocol import Attentive, Backend, Gathering
from runtime.config.calibration import load_calibration
from runtime.config.drift import drift_rule
from runtime.config.schema import Config
from runtime.core.event import RunEnded, RunEndRequested
from runtime.core.limits import CPU_LEASE_S, CPU_LIMITS, Limits, allowing, loading_s
from runtime.core.snapshot import Facts
from runtime.core.trigger import ConsentRule
from runtime.daemon.desk import Desk
from runtime.daemon.loop import IN_SERVICE, Loop, LoopSettings
from runtime.daemon.server import serve
from runtime.daemon.startup import OpenRun, Options, update_run
from runtime.daemon.worlds import Found, World
from runtime.errors import DeadlineError, InfeasibleError, RunError
from runtime.planning.process import PlanningProcess
from runtime.rl.types import RunLimits
from runtime.store.events import EventStore, open_store

TICK_S = 0.5
CALM_TICK_S = 1.0  # nothing is on its way, and the backend wakes the loop when something happens
FINISH_S = 30.0
FIRST_PLAN_EXTRA_S = 90.0  # beyond the planner's own time: its process starts, on a loaded machine
START_UP_S = 300.0  # a time limit begins to count after that at the latest
LAST_LOOK_S = 0.5  # the ended run stays readable for long polls
UNEXPECTED = 10  # turns in a row that may fail before the daemon gives up

logger = logging.getLogger("hexctl")
Ending = Literal["leave", "interrupted"]


@record
class Outcome:
    """How the daemon ended."""

    exit_code: int


class Service:
    """One daemon. `run` is its life from the first plan to the end."""

    def __init__(self, opened: OpenRun, options: Options, world: World) -> None:
        self._opened, self._options, self._world = opened, options, world
        self._info = opened.info
        self._wake = asyncio.Event()
        self._stop_api = asyncio.Event()
        self._api: asyncio.Task[None] | None = None
        self._living = opened.adopted  # something outlives this daemon
        self._attentive: Attentive | None = None  # the backend, where it wakes the loop by itself
        self._leave: Ending | None = None
        self._interrupts = 0
        self._started_s = time.monotonic()
        self._served_s: float | None = None
        self._unexpected = 0

    async def run(self, on_serving: Callable[[], None] = lambda: None) -> Outcome:
        """Live until the run or only this daemon ends. Raises HexError for what makes it impossible."""
        self._catch_signals()
        try:
            found = await asyncio.to_thread(self._world.discover, self._opened.config, self._info.id)
            for note in found.notes:
                logger.info("%s", note)
            self._info = update_run(self._opened.paths.folder, label=found.label)
            with open_store(self._opened.paths.events) as store:
                return await self._with_store(store, found, on_serving)
        except HexError as e:
            if not self._living:
                update_run(self._opened.paths.folder, state="ended", ending=e.what)
            raise

    async def _with_store(self, store: EventStore, found: Found, on_serving: Callable[[], None]) -> Outcome:
        planning = PlanningProcess(solve_s=self._opened.config.planner.solve_time)
        loop = Loop(
            settings=_settings(self._opened, found.label),
            store=store,
            planning=planning,
            problem=self._problem(found),
            facts=self._facts(found),
        )
        self._loop, self._desk = loop, Desk(loop, self._wake.set)
        loop.begin(
            epoch=self._opened.epoch,
            pid=os.getpid(),
            adopted=self._opened.adopted,
            devices=found.cluster.devices,
            now_s=time.time(),
        )
        try:
            await self._first_plan()
            if self._leave == "leave" and self._living:
                return self._left()
            if self._living or (self._leave is None and not loop.state.ending):
                return await self._serving(found, on_serving)  # what lives is joined, also to end it
            return await self._finish()
        finally:
            planning.cancel()

    async def _serving(self, found: Found, on_serving: Callable[[], None]) -> Outcome:
        socket_path = self._opened.paths.api_socket
        self._api = asyncio.create_task(serve(self._desk, socket_path, self._stop_api, on_ready=on_serving), name="api")
        try:
            return await self._live(found)
        finally:
            if self._loop.backend is not None:
                await asyncio.to_thread(self._loop.backend.close)
            self._stop_api.set()
            await asyncio.gather(self._api, return_exceptions=True)

    def _facts(self, found: Found) -> Facts:
        config, info = self._opened.config, self._info
        label: FleetLabel = found.label  # type: ignore[assignment]  # one of the labels, checked when it goes over the wire
        run = RunView(
            id=info.id,
            name=info.name,
            folder=info.folder,
            state="starting",
            label=label,
            started_at_s=info.created_at_s,
            consent=config.consent.mode,
            hexctl_version=info.hexctl_version,
            daemon_pid=os.getpid(),
            config_path=info.config_path,
            simulation_speed=config.simulation.speed if label == "simulated" else None,
        )
        return Facts(run=run, kinds=found.cluster.kinds, groups_per_batch=config.algorithm.prompts_per_step)

    def _problem(self, found: Found) -> Callable[[tuple[Device, ...], tuple[Override, ...], Plan | None], Problem]:
        config = self._opened.config
        model = load_model_spec(config.model.path)
        path = self._opened.paths.calibration
        calibration = load_calibration(path) if path.exists() else None

        def problem(devices: tuple[Device, ...], overrides: tuple[Override, ...], in_force: Plan | None) -> Problem:
            from runtime.config.problem import problem_from_config

            cluster = replace(found.cluster, devices=devices)
            return problem_from_config(
                config, cluster, model, overrides=overrides, in_force=in_force, calibration=calibration
            )

        return problem

    async def _live(self, found: Found) -> Outcome:
        await self._open_backend(found)
        while self._leave is None and not self._ends():
            await self._turn()
        return self._left() if self._leave == "leave" else await self._finish()

    def _left(self) -> Outcome:
        logger.info("the daemon ends, the run goes on: hexctl daemon --run %s takes it over", self._info.id)
        return Outcome(exit_code=0)

    async def _first_plan(self) -> None:
        """Plan before anything is started: an impossible run ends here."""
        loop, solve_s = self._loop, self._opened.config.planner.solve_time
        if loop.state.plan is None:
            logger.info("making the first plan")
        deadline_s = time.monotonic() + solve_s + FIRST_PLAN_EXTRA_S
        while self._leave is None and not loop.state.ending and loop.state.plan is None:
            await self._turn()
            state = loop.state
            if state.infeasible:
                raise InfeasibleError("no plan exists for this fleet and model", got=state.infeasible)
            if state.planning_failed_at_s is not None and state.need is None:
                last = loop.snapshot(time.time()).events[-1].message
                raise RunError("the first plan could not be made", got=last)
            if time.monotonic() > deadline_s:
                raise DeadlineError("no first plan", got=f"{solve_s:g} s and more")

    async def _open_backend(self, found: Found) -> None:
        """Start or join what carries the run, turning the loop meanwhile."""
        self._say("joining the run's actors" if self._opened.adopted else "starting Ray and the run's flow")
        steps = self._options.steps or self._opened.config.run.steps
        opening = asyncio.create_task(
            asyncio.to_thread(
                self._world.open,
                self._opened.config,
                self._opened.paths,
                self._info,
                cluster=found.cluster,
                epoch=self._opened.epoch,
                limits=run_limits(steps, self._info.label, weight_bytes(self._opened.config)),
            )
        )
        while not opening.done():
            await self._turn(opening)
        backend: Backend = opening.result()
        self._info = update_run(self._opened.paths.folder)  # the backend added Ray's address
        self._loop.backend = backend
        if isinstance(backend, Attentive):
            self._attentive = backend
            backend.on_news(self._news(asyncio.get_running_loop()))
        if isinstance(backend, Gathering):
            self._say("starting trainer and replicas beside the run's flow")
            built = asyncio.create_task(asyncio.to_thread(backend.wait_built))
            while not built.done():
                await self._turn(built)
            built.result()
        self._living = True
        if IN_SERVICE not in self._loop.state.milestones:
            self._say("starting trainer and replicas, publishing version 0")

    def _news(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        """Wakes the control loop from another thread."""

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the daemon has ended meanwhile
                loop.call_soon_threadsafe(self._wake.set)

        return tell

    def _rhythm_s(self) -> float:
        """Seconds until the next turn, unless something wakes the loop before."""
        if self._attentive is None:
            return TICK_S
        calm = self._loop.calm
        self._attentive.rest(calm)
        return CALM_TICK_S if calm else TICK_S

    def _say(self, progress: str) -> None:
        logger.info("%s", progress)
        self._loop.progress = (progress,)

    async def _turn(self, also: "asyncio.Task[Backend] | asyncio.Task[None] | None" = None) -> None:
        """One tick, then wait for the next or for something to do."""
        if self._api is not None and self._api.done():
            self._api.result()  # the socket could not be had: that is fatal
            raise RunError("the API server ended by itself")
        self._wake.clear()
        try:
            self._loop.tick(time.time())
            self._unexpected = 0
        except HexError:
            raise
        except Exception:
            self._unexpected += 1
            logger.exception("a turn of the control loop failed (%d in a row)", self._unexpected)
            if self._unexpected >= UNEXPECTED:
                raise
        if IN_SERVICE in self._loop.state.milestones:
            self._loop.progress = ()
        self._desk.announce()
        waits = {asyncio.create_task(self._wake.wait()), *([also] if also is not None else [])}
        await asyncio.wait(
            {*waits, *([self._api] if self._api else [])}, timeout=self._rhythm_s(), return_when=asyncio.FIRST_COMPLETED
        )
        for task in waits:
            if task is not also:
                task.cancel()

    def _ends(self) -> bool:
        """Whether the run is to end now; a limit that is reached asks for it."""
        loop = self._loop
        if loop.state.ending:
            return True
        flow = None if loop.observation is None else loop.observation.flow
        reason = ""
        if flow is not None and flow.finished:
            reason = f"step limit reached ({flow.steps_done} steps)"
        elif self._options.for_s is not None and self._lived_s() >= self._options.for_s:
            reason = f"time limit reached ({self._options.for_s:g} s)"
        if reason:
            loop.record([RunEndRequested(reason=reason)], time.time())
        return bool(reason)

    def _lived_s(self) -> float:
        """Seconds that count for the time limit: from the first service on, but a start-up may not take for ever."""
        now_s = time.monotonic()
        if self._served_s is None and IN_SERVICE in self._loop.state.milestones:
            self._served_s = now_s
        return now_s - (self._started_s + START_UP_S if self._served_s is None else self._served_s)

    async def _finish(self) -> Outcome:
        """Suspend, stop, write down. An interrupt is 130, everything else 0."""
        loop = self._loop
        if not loop.state.ending:
            loop.record([RunEndRequested(reason="interrupted (Ctrl-C)")], time.time())
        reason = loop.state.ending
        self._say("suspending samples to the ledger, stopping actors")
        self._desk.announce()
        failure = ""
        if loop.backend is not None:
            failure = await self._finish_backend(loop.backend)
        loop.record([RunEnded(reason=failure or reason, failed=bool(failure))], time.time())
        loop.failed, loop.progress = bool(failure), ()
        update_run(self._opened.paths.folder, state="ended", ending=failure or reason)
        self._desk.announce()
        await asyncio.sleep(LAST_LOOK_S)
        if failure:
            raise RunError(
                "the run did not end cleanly", got=failure, hint=f"hexctl down --force --run {self._info.id}"
            )
        return Outcome(exit_code=130 if self._leave == "interrupted" else 0)

    async def _finish_backend(self, backend: Backend) -> str:
        try:
            await asyncio.wait_for(asyncio.to_thread(backend.finish, FINISH_S), FINISH_S * 2)
        except TimeoutError:
            return f"the actors did not stop within {FINISH_S * 2:.0f} s"
        except HexError as e:
            return str(e)
        return ""

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_leave)

    def _on_interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            logger.error(
                "interrupted again: leaving at once; hexctl down --force --run %s clears what is left", self._info.id
            )
            os._exit(130)
        self._leave = "interrupted"
        self._wake.set()

    def _on_leave(self) -> None:
        self._leave = self._leave or "leave"
        self._wake.set()


def weight_bytes(config: Config) -> float:
    """Of one generation of the run's weights."""
    dtype = config.model.rollout_dtype or config.model.dtype
    return load_model_spec(config.model.path).params * {"float64": 8.0, "float32": 4.0}.get(dtype, 2.0)


def run_limits(steps: int | None, label: str, weights: float) -> RunLimits:
    """Flow's limits; a replica keeps its leases while it loads `weights` bytes from disk."""
    lease_s = CPU_LEASE_S if _is_slow(label) else RunLimits().lease_s
    return RunLimits(steps=steps, lease_s=max(lease_s, loading_s(weights)))


def _is_slow(label: str) -> bool:
    """Whether a CPU works unpaced in the fleet."""
    return label in ("cpu", "mixed")


def _settings(opened: OpenRun, label: str) -> LoopSettings:
    config = opened.config
    rule = ConsentRule(mode=config.consent.mode, expires_s=config.consent.proposal_expires)
    limits = limits_of(config, label, weight_bytes(config))
    return LoopSettings(scheduler=config.planner.scheduler, consent=rule, limits=limits, drift=drift_rule(config))


def limits_of(config: Config, label: str, weights: float) -> Limits:
    """Time limits of the belief: those of the fleet, none below a deadline that the configuration gives the units, nor below what
    `weights` bytes take from disk."""
    engine_s = config.rollout.start_deadline if config.rollout.engine == "vllm" else 0.0
    return allowing(
        CPU_LIMITS if _is_slow(label) else Limits(),
        start_s=max(engine_s, config.trainer.meet_deadline),
        token_s=config.rollout.token_deadline if config.rollout.engine == "vllm" else 0.0,
        collective_s=config.trainer.collective_deadline,
        weight_bytes=weights,
    )
