"""Shorter ways to lay weights into a model: taken when they give the same bits, never otherwise. Toy models, no vllm."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from runtime.rl.engine.vllm_host.in_place import InPlace
from runtime.rl.weights.layout import lay_out, pieces, spec_of

NAMES = {"q": (8, 4), "k": (4, 4), "norm": (4,), "head": (6, 4)}


def as_if_on_a_gpu() -> InPlace:
    return InPlace(suits=lambda model: True)


class Fused(nn.Module):
    """Loads as vLLM's models do: q and k into one parameter."""

    def __init__(self, *, loads: str = "rightly", rows: int = 6) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(12, 4, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.head = nn.Parameter(torch.full((rows, 4), 5.0, dtype=torch.bfloat16))
        self.untouched = nn.Parameter(torch.full((3,), 7.0, dtype=torch.bfloat16))
        self._loads, self.calls = loads, 0

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        self.calls += 1
        loaded = set()
        for name, tensor in weights:
            match name:
                case "q":
                    self.qk.data[:8].copy_(tensor)
                case "k":
                    self.qk.data.narrow(0, 8, 4).copy_(tensor)
                case "norm" if self._loads == "with arithmetic":
                    self.norm.data.copy_(tensor + 1)
                    self.norm.data.sub_(1)
                case "head" if self._loads == "padded":  # as vLLM loads what has a row a token of the vocabulary
                    self.head[: tensor.shape[0]].data.copy_(tensor)
                    self.head[tensor.shape[0] :].data.fill_(0)
                case "norm" if self._loads == "filled":
                    self.norm.data.copy_(tensor)
                    self.head.data[:1].fill_(1)
                case "norm" if self._loads == "half" and self.calls > 1:
                    continue
                case "norm" if self._loads == "raising" and self.calls > 1:
                    raise ValueError("this was processed")
                case _:
                    getattr(self, name).data.copy_(tensor)
            loaded.add("qk" if name in ("q", "k") else name)
        return loaded


def tensors(version: int, flat: Tensor | None = None) -> dict[str, Tensor]:
    """Of a version, each by itself or all in `flat`."""
    generator = torch.Generator().manual_seed(version)
    made = {n: torch.randn(s, generator=generator).bfloat16() for n, s in NAMES.items()}
    if flat is None:
        return made
    layout = lay_out((spec_of(n, t) for n, t in made.items()), 1024)
    flat[: layout.total] = torch.cat([d for _, d in pieces(layout, made.items())])
    return dict(layout.views(flat))


def holds(model: Fused, version: int) -> bool:
    wanted = tensors(version)
    return (
        torch.equal(model.qk, torch.cat((wanted["q"], wanted["k"])))
        and torch.equal(model.norm, wanted["norm"])
        and torch.equal(model.head, wanted["head"])
        and torch.equal(model.untouched, torch.full((3,), 7.0, dtype=torch.bfloat16))
    )


def reloading(model: Fused, given: dict[str, Tensor], seen: list[int]) -> Callable[[], set[str]]:
    """A reload that always does right."""

    def reload() -> set[str]:
        seen.append(1)
        calls, loads, model._loads = model.calls, model._loads, "rightly"
        names = model.load_weights(iter(given.items()))
        model.calls, model._loads = max(1, calls), loads
        return names

    return reload


def test_a_model_that_only_copies_is_loaded_by_the_copies_alone() -> None:
    model, way, flat, reloads = Fused(), as_if_on_a_gpu(), torch.zeros(4096, dtype=torch.uint8), []
    first = tensors(0)  # from disk
    way.lay_in(model, first, reloading(model, first, reloads))
    assert (way.way, len(reloads), holds(model, 0)) == ("load", 1, True)
    second = tensors(1, flat)
    way.lay_in(model, second, reloading(model, second, reloads))
    assert (way.way, holds(model, 1)) == ("copies", True)
    calls = model.calls
    for version in (2, 3):
        given = tensors(version, flat)
        assert way.lay_in(model, given, reloading(model, given, reloads)) == {"qk", "norm", "head"}
        assert holds(model, version)
    assert (len(reloads), model.calls) == (1, calls), "neither a reload nor a load"
    disk = tensors(4)  # by disk again: other places in memory
    way.lay_in(model, disk, reloading(model, disk, reloads))
    assert holds(model, 4)
    other = torch.zeros(4096, dtype=torch.uint8)
    way.forget()
    given = tensors(5, other)
    way.lay_in(model, given, reloading(model, given, reloads))
    flat.zero_()
    assert holds(model, 5)
    given = tensors(6, other)
    way.lay_in(model, given, reloading(model, given, reloads))
    assert holds(model, 6)
    assert len(reloads) == 1


@pytest.mark.parametrize("rows", [6, 8])
def test_zeros_beyond_a_vocabulary_are_no_reason_to_load(rows: int) -> None:
    """With 6 rows nothing is filled, with 8 two are."""
    model, way = Fused(loads="padded", rows=rows), as_if_on_a_gpu()
    flat, reloads = torch.zeros(4096, dtype=torch.uint8), []

    def reload() -> set[str]:
        reloads.append(1)
        return model.load_weights(iter(given.items()))

    for version in range(4):
        given = tensors(version, flat)
        way.lay_in(model, given, reload)
        assert torch.equal(model.head[:6], tensors(version)["head"])
        assert torch.equal(model.head[6:], torch.zeros(rows - 6, 4, dtype=torch.bfloat16))
    assert (way.way, len(reloads), model.calls) == ("copies", 1, 3), "one load by the reload, one tried, one seen"


def test_a_model_that_writes_other_values_is_loaded_but_not_by_copies() -> None:
    model, way, flat, reloads = Fused(loads="filled"), as_if_on_a_gpu(), torch.zeros(4096, dtype=torch.uint8), []

    def reload() -> set[str]:
        reloads.append(1)
        return model.load_weights(iter(given.items()))

    for version in range(3):
        given = tensors(version, flat)
        way.lay_in(model, given, reload)
    assert (way.way, len(reloads)) == ("load", 1)


@pytest.mark.parametrize("loads", ["half", "raising"])
def test_a_model_that_must_be_reloaded_always_is(loads: str) -> None:
    model, way, flat, reloads = Fused(loads=loads), as_if_on_a_gpu(), torch.zeros(4096, dtype=torch.uint8), []
    for version in range(4):
        given = tensors(version, flat)
        way.lay_in(model, given, reloading(model, given, reloads))
        assert holds(model, version)
    assert way.way == "reload"
    assert len(reloads) == 5  # the first one twice: a try spoilt what it gave


def test_a_model_that_computes_while_it_loads_is_loaded_but_not_by_copies() -> None:
    model, way, flat, reloads = (
        Fused(loads="with arithmetic"),
        as_if_on_a_gpu(),
        torch.zeros(4096, dtype=torch.uint8),
        [],
    )
    exact = {n: torch.round(t * 4) / 4 for n, t in tensors(1).items()}  # plus and minus one are exact here
    layout = lay_out((spec_of(n, t) for n, t in exact.items()), 1024)
    flat[: layout.total] = torch.cat([d for _, d in pieces(layout, exact.items())])
    given = dict(layout.views(flat))
    for _ in range(3):
        way.lay_in(model, given, reloading(model, given, reloads))
        assert torch.equal(model.norm, exact["norm"])
    assert way.way == "load"
    assert len(reloads) == 1
