"""What hexctl adds to each of vLLM's workers: weights of a generation, verified first, then laid into the running model.
They come from disk, or straight from the trainer into a second buffer while the engine generates.

vLLM mixes `GenerationReader` into its worker class (`worker_extension_cls`), so its methods run where the model is, one a
tensor parallel rank. Two calls, so that no rank changes a weight before every rank has verified all of them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from runtime.errors import WeightsError
from runtime.rl.engine.fit import check_fit
from runtime.rl.engine.vllm_host.in_place import InPlace
from runtime.rl.engine.vllm_host.warden import dies_with_parent
from runtime.rl.types import ChannelMember, ChannelOffer, WeightsRef
from runtime.rl.weights import ChainReader
from runtime.rl.weights.receiver import WeightsReceiver

if "HEXCTL_ENGINE_PID" in os.environ and os.environ["HEXCTL_ENGINE_PID"] != str(os.getpid()):
    dies_with_parent(os.getppid())  # a worker process of its own: vLLM imports this module in each


class GenerationReader:
    """Mixed into vLLM's worker; `model_runner` and `vllm_config` are the worker's."""

    model_runner: Any
    vllm_config: Any
    _hexctl_tensors: dict[str, Tensor] | None = None
    _hexctl_reader: ChainReader | None = None
    _hexctl_receiver: WeightsReceiver | None = None
    _hexctl_in_place: InPlace | None = None

    def hexctl_read(self, ref: Mapping[str, Any], shapes: Sequence[tuple[str, Sequence[int]]]) -> str:
        """Read and verify generation `ref` into host memory. Returns why it must not be served, "" when it may."""
        self._hexctl_tensors = None
        generation = WeightsRef(**ref)
        try:
            if self._hexctl_reader is None:
                self._hexctl_reader = ChainReader()
            tensors = self._hexctl_reader(generation)
            check_fit({n: torch.empty(tuple(s), device="meta") for n, s in shapes}, tensors, generation)
        except WeightsError as e:
            return str(e)
        self._hexctl_tensors = tensors
        return ""

    def hexctl_load(self) -> str:
        """Lay the verified tensors into the model, where they are (graphs that were captured stay valid).
        Returns what was not loaded, "" when all was."""
        tensors, self._hexctl_tensors = self._hexctl_tensors, None
        return "nothing was read" if tensors is None else self._hexctl_lay_in(tensors)

    def hexctl_join(self, offer: Mapping[str, Any], member: Mapping[str, Any]) -> str:
        """Receive generations directly from now on, in a thread of this worker. Returns ""."""
        if self._hexctl_receiver is not None:
            self._hexctl_receiver.stop()
            self._hexctl_receiver = None
        if self._hexctl_in_place is not None:
            self._hexctl_in_place.forget()
        if not offer["host"].startswith("127."):  # the trainer is on another host: NCCL must not stay on loopback
            os.environ.pop("NCCL_SOCKET_IFNAME", None)
        device = next(self._hexctl_model().parameters()).device
        me = ChannelMember(**{**member, "rank": int(getattr(self, "rank", 0)), "device": device.type})
        self._hexctl_receiver = WeightsReceiver(ChannelOffer(**offer), me, device=device)
        return ""

    def hexctl_claim(self, ref: Mapping[str, Any]) -> str:
        """ "" when generation `ref` was received whole and is not taken yet, else that it was not. It stays for the swap, though
        the trainer may have the next one ready."""
        receiver = self._hexctl_receiver
        return "" if receiver is not None and receiver.claim(WeightsRef(**ref)) else "it is not here"

    def hexctl_let_go(self) -> str:
        """No swap follows: another worker does not have it. Returns ""."""
        if self._hexctl_receiver is not None:
            self._hexctl_receiver.let_go()
        return ""

    def hexctl_swap(
        self, ref: Mapping[str, Any], shapes: Sequence[tuple[str, Sequence[int]]]
    ) -> tuple[str, float, int]:
        """Lay generation `ref` into the model from the second buffer. Returns what was wrong ("" when nothing), the seconds
        it took to receive and its bytes."""
        assert self._hexctl_receiver is not None
        generation = WeightsRef(**ref)
        with self._hexctl_receiver.taken(generation) as got:
            if got is None:
                return "the generation is gone from the second buffer", 0.0, 0
            try:
                check_fit({n: torch.empty(tuple(s), device="meta") for n, s in shapes}, got.tensors, generation)
            except WeightsError as e:
                return str(e), 0.0, 0
            wrong = self._hexctl_lay_in(got.tensors)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the second buffer may be overwritten when this returns
            return wrong, got.received.receive_s, got.received.bytes

    def _hexctl_model(self) -> Any:
        return self.model_runner.get_model() if hasattr(self.model_runner, "get_model") else self.model_runner.model

    def _hexctl_lay_in(self, tensors: Mapping[str, Tensor]) -> str:
        model = self._hexctl_model()
        wanted = {name for name, _ in model.named_parameters()}

        def reload() -> set[str] | None:
            return _reload(model, self.model_runner, self.vllm_config, iter(tensors.items()))

        if self._hexctl_in_place is None:
            self._hexctl_in_place = InPlace()
            if getattr(self.vllm_config, "quant_config", None) is not None:
                self._hexctl_in_place.way = "reload"
        loaded = self._hexctl_in_place.lay_in(model, tensors, reload)
        missing = sorted(wanted - loaded) if loaded is not None else []
        return f"{len(missing)} parameters got no weights, first {missing[0]}" if missing else ""


def _reload(model: Any, runner: Any, vllm_config: Any, tensors: Iterator[tuple[str, Tensor]]) -> set[str] | None:
    """Names of the parameters that were loaded; None where this release does not say.

    Plain `load_weights` on a model that was processed after loading fails (a CPU packs its weights) or is undone by it.
    """
    from vllm.config import set_current_vllm_config

    try:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    except ImportError as e:
        raise RuntimeError("this release of vllm cannot reload weights layer by layer") from e
    with set_current_vllm_config(vllm_config), torch.inference_mode(False), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(tensors)
        finalize_layerwise_reload(model, runner.model_config)
        _pack_heads(model)
    return set(loaded) if loaded is not None else None


def _pack_heads(model: Any) -> None:
    """On a CPU, pack output heads again: one that is tied to the embeddings is not loaded itself, so the reload leaves the
    packed copy of the old weights in it (seen with vllm 0.32 in float32: logprobs 0.18 off on average)."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and type(module).__name__ == "ParallelLMHead" and method is not None:
            method.process_weights_after_loading(module)
