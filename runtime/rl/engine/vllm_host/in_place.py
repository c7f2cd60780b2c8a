"""Laying new weights into a model where they are, without vLLM's layer by layer reload, once that is known to give the same.

A reload moves every parameter to "meta", makes it anew, loads, processes and copies it back. On a GPU without quantisation
nothing is processed: the model's own `load_weights` copies to the right places of its fused parameters, and those copies, once
seen, can be made again in one go. Both shorter ways are tried once, against the bits that a reload gave, and dropped for good
if they differ. Imports no vllm.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)
Loaded = set[str] | None
"""Parameters that were loaded; None where a release of vllm does not say."""


def on_gpu(model: Any) -> bool:
    """Whether the shorter ways may be tried: on a CPU weights are packed after loading, out of sight."""
    return bool(next(model.parameters()).device.type == "cuda")


class InPlace:
    """What is known of one model. `suits`: whether the shorter ways may be tried on it."""

    def __init__(self, suits: Callable[[Any], bool] = on_gpu) -> None:
        self._suits = suits
        self.way: Literal["untried", "reload", "load", "copies"] = "untried"
        self._names: Loaded = None
        self._copies: _Copies | None = None
        self._replayable = True

    def lay_in(self, model: Any, tensors: Mapping[str, Tensor], reload: Callable[[], Loaded]) -> Loaded:
        """Give `model` the tensors, by the shortest way known to do what `reload` does. What was loaded."""
        if self.way == "untried":
            self._names = reload()
            self.way = "load" if self._try(lambda: load(model, tensors), model, reload) else "reload"
            return self._names
        if self.way == "reload":
            return reload()
        if self._copies is not None and self._copies.source == source_of(tensors):
            self._copies.make()
            return self._names
        if self._replayable and source_of(tensors) is not None:
            return self._record(model, tensors, reload)
        return load(model, tensors)

    def forget(self) -> None:
        """The buffer that copies came from is going: let go of it."""
        self._copies = None

    def _record(self, model: Any, tensors: Mapping[str, Tensor], reload: Callable[[], Loaded]) -> Loaded:
        """Load, and see whether the copies it made can be made again."""
        seen = _Seen()
        with seen:
            names = load(model, tensors)
        copies = seen.copies(source_of(tensors))
        if copies is not None and self._try(copies.make, model, lambda: load(model, tensors)):
            self._copies, self.way = copies, "copies"
        else:
            self._replayable = False
        return names

    def _try(self, short: Callable[[], object], model: Any, mend: Callable[[], object]) -> bool:
        """Whether `short` gives the loaded parameters the bits they have now. They are zeroed before; if not, `mend`."""
        if self._names is None or not self._suits(model):
            return False
        parameters = {n: p for n, p in model.named_parameters() if n in (self._names or ())}
        before = {n: _sums(p) for n, p in parameters.items()}
        try:
            with torch.inference_mode(False), torch.no_grad():
                for parameter in parameters.values():
                    parameter.zero_()
            short()
            if before == {n: _sums(p) for n, p in parameters.items()}:
                return True
        except Exception as e:  # noqa: BLE001 - whatever a release says to it: then not
            logger.warning("a shorter way to lay weights in fails: %s", e)
        mend()
        return False


def load(model: Any, tensors: Mapping[str, Tensor]) -> Loaded:
    """The model's own loading, over what it has."""
    with torch.inference_mode(False), torch.no_grad():
        loaded = model.load_weights(iter(tensors.items()))
    return set(loaded) if loaded is not None else None


def source_of(tensors: Mapping[str, Tensor]) -> int | None:
    """Address of the one buffer that all tensors lie in; None when there is no such."""
    addresses = {t.untyped_storage().data_ptr() for t in tensors.values()}
    return addresses.pop() if len(addresses) == 1 else None


class _Copies:
    """Copies from places of one buffer to places of a model's parameters."""

    def __init__(self, source: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.source = source
        self._to, self._from = [d for d, _ in pairs], [s for _, s in pairs]

    def make(self) -> None:
        """All of them."""
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_copy_(self._to, self._from, non_blocking=True)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every copy while it is on, and whether anything else was written.

    Zeros are not noted: vLLM fills with them what pads a vocabulary, often nothing at all. They are there since the first load, no
    copy writes to them, and a try begins with every loaded parameter zeroed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._other: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._pairs.append((args[0].detach(), args[1].detach()))
        elif func._schema.is_mutable and not _zeros(func, args):
            self._other.append(str(func))
        return func(*args, **(kwargs or {}))

    def copies(self, source: int | None) -> _Copies | None:
        """What can be made again: nothing but copies, all out of the buffer at `source`, none in parts that change shape."""
        if self._other or source is None or not self._pairs:
            logger.info("new weights are laid in by the model's own loading, which also does %s", self._other[:3])
            return None
        for to, given in self._pairs:
            if given.untyped_storage().data_ptr() != source or given.shape != to.shape:
                logger.info("new weights are laid in by the model's own loading, which copies from elsewhere too")
                return None
        return _Copies(source, self._pairs)


def _zeros(func: Any, args: Any) -> bool:
    """Whether this operation writes nothing but zeros, or nothing."""
    if func is torch.ops.aten.zero_.default:
        return True
    return func is torch.ops.aten.fill_.Scalar and (args[1] == 0 or args[0].numel() == 0)


def _sums(parameter: Tensor) -> tuple[int, int]:
    """Of its 16-bit words: all, and weighted by row."""
    words = parameter.detach().contiguous().view(torch.int16)
    rows = words.reshape(parameter.shape[0] if parameter.ndim else 1, -1).sum(-1, dtype=torch.int64)
    return int(rows.sum()), int((rows * torch.arange(1, rows.numel() + 1, device=rows.device)).sum())
