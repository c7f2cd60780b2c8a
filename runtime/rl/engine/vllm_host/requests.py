"""How requests get into vLLM and sampled tokens out of it: past its output processor where a release allows, else through it.

Nothing of what the output processor makes is used here (text, stop strings, dictionaries of logprobs), and it costs the host
tens of microseconds a token: with hundreds of samples as long as the forward pass of a small model.
"""

import inspect
from collections.abc import Iterable
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from runtime.rl.engine.vllm_host.pattern import Pattern
from runtime.rl.engine.vllm_host.rows import Row


class Requests(Protocol):
    """Requests by our number."""

    name: str

    def add(self, key: int, tokens: list[int], max_tokens: int, salt: str) -> None: ...
    def abort(self, keys: Iterable[int]) -> None: ...
    def step(self) -> list[Row]:
        """One step of the scheduler: what each request sampled."""
        ...


def requests_of(llm: Any, spec: dict[str, Any]) -> Requests:
    """The direct way when it is wished and this release has what it rests on."""
    core, inputs = llm.engine_core, getattr(llm, "input_processor", None)
    direct = hasattr(inputs, "process_inputs") and hasattr(core, "get_output") and hasattr(core, "add_request")
    return DirectRequests(llm, spec) if direct and spec["direct"] else PublicRequests(llm, spec)


class DirectRequests:
    """To the engine core and back."""

    name = "direct"

    def __init__(self, llm: Any, spec: dict[str, Any]) -> None:
        self._core, self._inputs = llm.engine_core, llm.input_processor
        self._tasks = llm.get_supported_tasks()
        self._fields = _fields(spec)
        self._pattern = Pattern(self._make)

    def add(self, key: int, tokens: list[int], max_tokens: int, salt: str) -> None:
        self._core.add_request(self._pattern.request(key, tokens, max_tokens, salt))

    def abort(self, keys: Iterable[int]) -> None:
        self._core.abort_requests([str(k) for k in keys])

    def step(self) -> list[Row]:
        rows: list[Row] = []
        for output in self._core.get_output().outputs:
            tokens = output.new_token_ids
            finished = output.finish_reason is not None
            if not tokens:
                if finished:
                    rows.append((int(output.request_id), [], [], True))
                continue
            if output.new_logprobs is None:
                raise RuntimeError("the engine told tokens without logprobs")
            told = output.new_logprobs.logprobs  # one row a token, the sampled token's logprob first
            if len(told) < len(tokens):
                raise RuntimeError(f"the engine told {len(tokens)} tokens with {len(told)} logprobs")
            logprobs = [told.item(0)] if len(tokens) == 1 else told[: len(tokens), 0].tolist()
            rows.append((int(output.request_id), tokens, logprobs, finished))
        return rows

    def _make(self, key: int, tokens: list[int], max_tokens: int, salt: str) -> Any:
        params = SamplingParams(**self._fields, max_tokens=max_tokens)
        prompt = {"prompt_token_ids": tokens, "cache_salt": salt}
        return self._inputs.process_inputs(str(key), prompt, params, supported_tasks=self._tasks)


class PublicRequests:
    """By `LLMEngine`'s own calls."""

    name = "public"

    def __init__(self, llm: Any, spec: dict[str, Any]) -> None:
        self._llm = llm
        self._fields = _fields(spec)

    def add(self, key: int, tokens: list[int], max_tokens: int, salt: str) -> None:
        params = SamplingParams(**self._fields, max_tokens=max_tokens)
        self._llm.add_request(str(key), {"prompt_token_ids": tokens, "cache_salt": salt}, params)

    def abort(self, keys: Iterable[int]) -> None:
        self._llm.abort_request([str(k) for k in keys])

    def step(self) -> list[Row]:
        rows: list[Row] = []
        for output in self._llm.step():
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            if tokens or output.finished:
                logprobs = _sampled(tokens, completion.logprobs)
                rows.append((_key(output.request_id), tokens, logprobs, bool(output.finished)))
        return rows


def _fields(spec: dict[str, Any]) -> dict[str, Any]:
    """What every request asks for."""
    fields: dict[str, Any] = {
        "temperature": spec["temperature"],
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
        "ignore_eos": True,  # only our own marks end a response
        "stop_token_ids": list(spec["eos_ids"]),
        "output_kind": RequestOutputKind.DELTA,
    }
    if "flat_logprobs" in inspect.signature(SamplingParams).parameters:
        fields["flat_logprobs"] = True
    return fields


def _key(request_id: str) -> int:
    """Our number of a request; some releases append a suffix of their own to the id they tell."""
    return int(request_id.split("-", 1)[0])


def _sampled(tokens: list[int], logprobs: Any) -> list[float]:
    """The logprob of each sampled token, from either form vLLM tells them in."""
    if not tokens:
        return []
    if logprobs is None:
        raise RuntimeError("the engine told tokens without logprobs")
    if hasattr(logprobs, "start_indices"):  # flat: the sampled token stands first at each position
        return [float(logprobs.logprobs[i]) for i in list(logprobs.start_indices)[-len(tokens) :]]
    return [float(at[token].logprob) for token, at in zip(tokens, list(logprobs)[-len(tokens) :], strict=True)]
