"""How the threads of replica and trainer reach flow through Ray."""

import logging
from concurrent.futures import Future
from typing import Any

from runtime.backends.ray import names
from runtime.backends.ray.actors.host import in_words
from runtime.backends.ray.calls import call, unwrap, why_dead
from runtime.errors import LedgerError, RunError, UnreachableError
from runtime.rl.types import (
    Applied,
    ExchangeReply,
    ExchangeRequest,
    NextBatch,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    WeightsRef,
)

logger = logging.getLogger(__name__)


def flow_handle(run_id: str) -> Any:
    """The run's flow actor. UnreachableError when Ray knows none."""
    import ray

    try:
        return ray.get_actor(names.FLOW, namespace=names.namespace(run_id))
    except ValueError as e:
        raise UnreachableError("flow is not there", got=str(e)) from e


class FlowPort:
    """The run's flow by its name. When the actor is lost it is looked up again: it may have been made anew."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._handle: Any = flow_handle(run_id)

    @property
    def handle(self) -> Any:
        """The actor. UnreachableError when Ray knows none."""
        if self._handle is None:
            self._handle = flow_handle(self._run_id)
        return self._handle

    def failed(self, error: BaseException | None) -> None:
        """A call ended with that error."""
        import ray

        if isinstance(error, ray.exceptions.RayActorError):
            self._handle = None


class RayPendingReply:
    """An exchange under way. Any error means that nothing was acknowledged: the replica keeps the flush and repeats it."""

    def __init__(self, future: "Future[Any]", port: FlowPort) -> None:
        self._future, self._port = future, port

    def done(self) -> bool:
        """Whether an answer or an error has come."""
        return self._future.done()

    def result(self, timeout_s: float) -> ExchangeReply:
        """TimeoutError when there is no answer yet, UnreachableError when there will be none, LedgerError when flow cannot
        write now, another RunError when it failed on the request."""
        from ray.exceptions import RayTaskError

        try:
            reply: ExchangeReply = self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():
                raise UnreachableError("flow timed out") from None
            raise
        except RayTaskError as e:
            cause = unwrap(e)
            if isinstance(cause, LedgerError):
                raise cause from None
            logger.error("flow failed on an exchange: %s", e)  # with the traceback in flow
            raise RunError("flow failed on an exchange", got=in_words(cause)) from e
        except Exception as e:
            cause = unwrap(e)
            self._port.failed(cause)
            logger.warning("exchange: %s", why_dead(cause))
            raise UnreachableError("flow did not take the exchange", got=why_dead(cause)) from e
        return reply


class RayFlowClient:
    """`runtime.rl.rollout.FlowClient` over the flow actor."""

    def __init__(self, run_id: str) -> None:
        self._port = FlowPort(run_id)

    def send(self, request: ExchangeRequest) -> RayPendingReply:
        """Returns at once. UnreachableError when flow is not there."""
        return RayPendingReply(self._port.handle.exchange.remote(request).future(), self._port)


class RayPendingBatch:
    """A batch asked for ahead."""

    def __init__(self, future: "Future[Any] | None") -> None:
        self._future = future

    def taken(self) -> TrainBatch | None:
        """The batch if it has come. What went wrong is met by the question that follows."""
        if self._future is None or not self._future.done() or self._future.exception() is not None:
            return None
        answer: NextBatch = self._future.result()
        return answer.batch if answer.order == "train" else None


class RayTrainerFlow:
    """`runtime.rl.train.client.TrainerFlow` over the flow actor, one call at a time.

    DeadlineError or RunError when flow does not answer; RefusedError and LedgerError as flow raised them.
    """

    def __init__(self, run_id: str, deadline_s: float = 30.0) -> None:
        import ray

        self._ray, self._deadline_s = ray, deadline_s
        self._port = FlowPort(run_id)

    def _ask(self, method: str, *args: Any) -> Any:
        ref = getattr(self._port.handle, method).remote(*args)
        try:
            return call(self._ray, ref, what=f"flow.{method}", deadline_s=self._deadline_s)
        except RunError as e:
            self._port.failed(e.__cause__)
            raise

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        """The first call."""
        welcome: TrainerWelcome = self._ask("hello", hello)
        return welcome

    def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        """Waits about a second in flow."""
        batch: NextBatch = self._ask("next_batch", trainer, epoch)
        return batch

    def ask_ahead(self, trainer: str, epoch: int) -> RayPendingBatch:
        """Ask for the next batch without waiting."""
        try:
            return RayPendingBatch(self._port.handle.batch_ahead.remote(trainer, epoch).future())
        except (UnreachableError, self._ray.exceptions.RayError):
            return RayPendingBatch(None)

    def applied(self, applied: Applied) -> None:
        """The step is made; `applied` says whether it is in a complete checkpoint."""
        self._ask("applied", applied)

    def published(self, ref: WeightsRef, epoch: int, stored: bool = True) -> None:
        """A generation is on disk, or at the engines alone."""
        self._ask("published", ref, epoch, stored)
