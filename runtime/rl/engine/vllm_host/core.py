"""vLLM as the engine's loop sees it: requests by number in, sampled tokens with their logprobs out, weights in between.

All that differs between releases is here and in `worker`: 0.26 and 0.32 are tried; names are looked up, not assumed.
"""

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from runtime.errors import ConfigError, WeightsError
from runtime.rl.engine.vllm_host.admission import Admission, Waiting
from runtime.rl.engine.vllm_host.figures import PlainSteps, scheduler_level
from runtime.rl.engine.vllm_host.memory import card_memory
from runtime.rl.engine.vllm_host.model_folder import expected_shapes, write_folder
from runtime.rl.engine.vllm_host.requests import requests_of
from runtime.rl.engine.vllm_host.rows import Row
from runtime.rl.engine.vllm_host.wire import Message
from runtime.scratch import scratch

WORKER = "runtime.rl.engine.vllm_host.worker.GenerationReader"
NEEDED = ("logprobs_mode", "worker_extension_cls", "load_format", "skip_tokenizer_init")
logger = logging.getLogger(__name__)
DRAIN_STEPS = 64  # more than any pipeline holds


class VllmCore:
    """`main.Core` over an `LLMEngine` whose engine core runs in this process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        with scratch() as folder:  # read once: nothing is left by a kill -9
            write_folder(str(folder), spec["model"], dtype=spec["dtype"])
            self._llm = LLMEngine.from_engine_args(EngineArgs(**_engine_args(spec, str(folder))))
        inner: Any = getattr(self._llm.engine_core, "engine_core", None)
        if inner is None:
            raise ConfigError("vllm runs its engine core in another process", got=vllm.__version__)
        self._inner = inner
        if spec["kv_on_update"] == "keep" and not hasattr(self._inner, "pause_scheduler"):
            raise ConfigError("this release of vllm cannot pause", got=vllm.__version__, hint="recompute on update")
        self._shapes = expected_shapes(spec["model"])
        self._requests = requests_of(self._llm, spec)
        self._salt = "none"
        self._open: set[int] = set()  # those that wait for admission too
        self._admission = Admission(slots=spec["slots"], batched_tokens=spec["batched_tokens"], hold=spec["hold"])
        self._prefilled = 0
        self._plain = PlainSteps()
        self._warm_up()

    @property
    def facts(self) -> Message:
        """What this release turned out to have."""
        config = self._llm.vllm_config
        blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        return {
            "release": vllm.__version__,
            "requests": self._requests.name,
            "kv_tokens": int(blocks or 0) * int(size or 0),
            "async_scheduling": bool(getattr(config.scheduler_config, "async_scheduling", False)),
            "pause": hasattr(self._inner, "pause_scheduler"),
            "weight_version": hasattr(self._llm, "get_weight_version"),
            "weight_transfer": hasattr(config, "weight_transfer_config"),
        }

    def limit(self, slots: int) -> None:
        """Let in no more than so many at once; at most those that the scheduler was made for."""
        self._admission.limit(slots)

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        """Queue a request that continues `tokens`; `admission` says when the scheduler gets it."""
        self._admission.add(Waiting(key, tokens, max_tokens))
        self._open.add(key)

    def abort(self, keys: Iterable[int]) -> None:
        """Forget requests; what they had sampled was told before, or is lost (a step's worth under async scheduling)."""
        gone = [k for k in keys if k in self._open]
        self._open.difference_update(gone)
        if given := [k for k in gone if not self._admission.drop(k)]:
            self._requests.abort(given)

    def busy(self) -> bool:
        return bool(self._open)

    def step(self) -> list[Row]:
        """One step of the scheduler, with those let in whose time has come; under async scheduling it may tell nothing yet."""
        for request in self._admission.take(self._given()):
            self._requests.add(request.key, request.tokens, request.max_tokens, self._salt)
            self._prefilled += len(request.tokens) - 1
        running, began, host_began = self._given(), time.perf_counter(), time.thread_time()
        rows = self._step()
        seconds = time.perf_counter() - began
        if self._admission.stepped(seconds, running):
            self._plain.add(seconds, time.thread_time() - host_began)
        return rows

    def _given(self) -> int:
        """Requests that the scheduler has."""
        return len(self._open) - len(self._admission)

    def _step(self) -> list[Row]:
        rows = [row for row in self._requests.step() if row[0] in self._open]
        self._open.difference_update(key for key, _, _, finished in rows if finished)
        return rows

    def join(self, offer: Message, member: Message) -> None:
        """Receive generations straight from the trainer from now on, in each worker, beside the engine's steps."""
        self._all("hexctl_join", offer, member)

    def swap(self, ref: Message, *, keep: bool) -> tuple[list[Row], Message] | None:
        """As `load`, from the workers' second buffers: rows and the update's figures; None, and nothing touched, unless
        every worker has the whole generation."""
        if any(self._llm.collective_rpc("hexctl_claim", args=(ref,))):
            self._all("hexctl_let_go")
            return None
        began = time.monotonic()
        figures: Message = {}

        def lay_in() -> None:
            answers = self._llm.collective_rpc("hexctl_swap", args=(ref, self._shapes))
            figures.update(receive_s=max(a[1] for a in answers), bytes=answers[0][2])
            for why, _, _ in answers:
                if why:
                    raise WeightsError(str(why))

        rows = self._change(ref, lay_in, keep=keep)
        return rows, {**figures, "pause_s": time.monotonic() - began}

    def load(self, ref: Message, *, keep: bool) -> list[Row]:
        """Verify, then swap the weights between two steps. Returns what the steps under way still sampled from the old ones.

        Without `keep` every request is forgotten: the caller adds again what it holds, and its KV is computed anew.
        With it they go on where they are, over the KV they have. Raises WeightsError; nothing may run then.
        """

        def lay_in() -> None:
            self._all("hexctl_read", ref, self._shapes)
            self._all("hexctl_load")

        return self._change(ref, lay_in, keep=keep)

    def _change(self, ref: Message, lay_in: Callable[[], None], *, keep: bool) -> list[Row]:
        self._admission.forget_cycle()
        rows = self._drain()
        if not keep:
            self.abort(tuple(self._open))
            self._settle()
        try:
            lay_in()
        except WeightsError:
            self.abort(tuple(self._open))
            raise
        self._salt = f"{ref['lineage']}.{ref['version']}.{ref['digest'][:16]}"
        # The salt is the promise: no request of this generation finds blocks of another. The reset gives them back, or not:
        # blocks in use stay (`keep`), and a step that has just ended may hold some a moment longer.
        if self._llm.reset_prefix_cache() is False and not keep:
            logger.warning("vllm kept blocks in its prefix cache; they are salted with the old generation")
        self._resume()
        return rows

    def sleep(self) -> bool:
        """Give weights and KV memory back; whether anything was given back. Requests must be gone, weights come anew."""
        if self._spec["device"] == "cpu" or not self._spec["sleep"]:
            return False
        self.abort(tuple(self._open))
        self._settle()
        self._llm.sleep(level=2)
        return True

    def wake(self) -> None:
        """Take the memory again; its content is undefined until weights are loaded."""
        if self._spec["device"] != "cpu" and self._spec["sleep"]:
            self._llm.wake_up()

    def level(self) -> Message:
        """Queue and KV cache now, prompt tokens and plain steps since the start."""
        return {**scheduler_level(self._inner.scheduler), "prefilled": self._prefilled, **self._plain.told()}

    def _warm_up(self) -> None:
        """A token with its logprob: what compiles at the first request is paid here, and an engine that cannot generate
        never reports ready."""
        self.add(0, [1, 1], 2)
        tokens = 0
        while self._open:
            tokens += sum(len(t) for _, t, _, _ in self.step())
        if tokens != 2:
            raise RuntimeError(f"the engine sampled {tokens} tokens, expected 2")
        self._prefilled, self._plain = 0, PlainSteps()

    def _drain(self) -> list[Row]:
        """Stop scheduling and take what is under way. Where a release cannot pause, nothing is taken: requests that are
        forgotten lose a step, and `keep` is refused at the start."""
        if not hasattr(self._inner, "pause_scheduler"):
            return []
        _call(self._inner.pause_scheduler, mode="keep", clear_cache=False)
        return self._settle()

    def _settle(self) -> list[Row]:
        """Step until nothing is under way; with nothing to schedule no new forward begins."""
        rows: list[Row] = []
        for _ in range(DRAIN_STEPS):
            queue = getattr(self._inner, "batch_queue", None)
            if not queue and not self._open_in_scheduler():
                return rows
            if not queue and self._paused():
                return rows
            rows += self._step()
        raise RuntimeError(f"steps are still under way after {DRAIN_STEPS} more")

    def _open_in_scheduler(self) -> bool:
        return bool(self._inner.scheduler.has_requests())

    def _paused(self) -> bool:
        return bool(hasattr(self._inner, "is_scheduler_paused") and self._inner.is_scheduler_paused())

    def _resume(self) -> None:
        if hasattr(self._inner, "resume_scheduler"):
            self._inner.resume_scheduler()

    def _all(self, method: str, *args: Any) -> None:
        """Call every worker; WeightsError with the first complaint."""
        for answer in self._llm.collective_rpc(method, args=args):
            if answer:
                raise WeightsError(str(answer))


def _engine_args(spec: dict[str, Any], folder: str) -> dict[str, Any]:
    """Arguments by this release's names; one that it does not know is left out, or refused where we rest on it."""
    cpu = spec["device"] == "cpu"
    wanted = {
        "model": folder,
        "load_format": "dummy",  # the first generation brings the weights
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # nothing but what we ask for
        "dtype": spec["dtype"],
        "max_model_len": spec["max_length"],
        "max_num_seqs": spec["slots"],
        "max_num_batched_tokens": spec["batched_tokens"],
        "seed": spec["seed"],
        "tensor_parallel_size": spec["tp"],
        "distributed_executor_backend": "uni" if spec["tp"] == 1 else "mp",
        "enable_prefix_caching": True,
        "block_size": 32 if cpu else None,  # a CPU's default of 128 shares too few prefixes
        **card_memory(spec, _card_bytes),
        "enforce_eager": spec["eager"],
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: temperature applied
        "worker_extension_cls": WORKER,
        "enable_sleep_mode": spec["sleep"] and not cpu,
        "disable_log_stats": True,
    }
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    if lacking := [name for name in NEEDED if name not in known]:
        raise ConfigError("this release of vllm is too old", got=vllm.__version__, expected=f"one with {lacking[0]}")
    return {k: v for k, v in wanted.items() if k in known and v is not None}


def _card_bytes() -> int:
    """Memory of the engine's card."""
    from vllm.platforms import current_platform

    try:
        return int(current_platform.get_device_total_memory())  # by NVML: CUDA must not be up before workers are forked
    except (ValueError, RuntimeError):  # a visible device named by its UUID, in a release that wants a number
        import torch

        return int(torch.cuda.mem_get_info()[1])


def _call(method: Any, **named: Any) -> Any:
    """Call with those named arguments that this release knows."""
    known = inspect.signature(method).parameters
    return method(**{k: v for k, v in named.items() if k in known})
