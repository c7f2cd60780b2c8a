"""How the threads of replica and trainer reach flow through Ray."""

import logging
from concurrent.futures import Future
from typing import Any

from runtime.backends.ray import names
from runtime.backends.ray.calls import call, unwrap, why_dead
from runtime.errors import UnreachableError
from runtime.rl.types import ExchangeReply, ExchangeRequest

logger = logging.getLogger(__name__)


def flow_handle(run_id: str) -> Any:
    """The run's flow actor. UnreachableError when Ray knows none."""
    import ray

    try:
        return ray.get_actor(names.FLOW, namespace=names.namespace(run_id))
    except ValueError as e:
        raise UnreachableError("flow is not there", got=str(e)) from e


class RayPendingReply:
    """An exchange under way. Any error means that nothing was acknowledged: the replica keeps the flush and repeats it."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def done(self) -> bool:
        """Whether an answer or an error has come."""
        return self._future.done()

    def result(self, timeout_s: float) -> ExchangeReply:
        """TimeoutError when there is no answer yet, UnreachableError when there will be none."""
        try:
            reply: ExchangeReply = self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():
                raise UnreachableError("flow timed out") from None
            raise
        except Exception as e:
            cause = unwrap(e)
            logger.warning("exchange: %s", why_dead(cause))
            raise UnreachableError("flow did not take the exchange", got=why_dead(cause)) from e
        return reply


class RayFlowClient:
    """`runtime.rl.rollout.FlowClient` over the flow actor."""

    def __init__(self, run_id: str) -> None:
        self._flow = flow_handle(run_id)

    def send(self, request: ExchangeRequest) -> RayPendingReply:
        """Returns at once."""
        return RayPendingReply(self._flow.exchange.remote(request).future())


class RayTrainerPort:
    """The trainer's calls, one at a time. UnreachableError when flow does not answer within `deadline_s` seconds."""

    def __init__(self, run_id: str, deadline_s: float = 30.0) -> None:
        import ray

        self._ray, self._deadline_s = ray, deadline_s
        self._flow = flow_handle(run_id)

    def ask(self, method: str, *args: Any) -> Any:
        """One call. RefusedError and LedgerError come as flow raised them."""
        return call(
            self._ray, getattr(self._flow, method).remote(*args), what=f"flow.{method}", deadline_s=self._deadline_s
        )
