"""Requests made by copying one: only where that gives what the engine's own way gives."""

from dataclasses import dataclass, field

import pytest

from runtime.rl.engine.vllm_host.pattern import Pattern


@dataclass
class Params:
    max_tokens: int
    stop: set[int] = field(default_factory=lambda: {2})


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int]
    cache_salt: str
    sampling_params: Params
    arrival_time: float
    prompt_length: int = 0  # what another release may derive


class Maker:
    def __init__(self, *, derives: bool) -> None:
        self.derives, self.calls = derives, 0

    def __call__(self, key: int, tokens: list[int], max_tokens: int, salt: str) -> Request:
        self.calls += 1
        length = len(tokens) if self.derives else 0
        return Request(str(key), tokens, salt, Params(max_tokens), arrival_time=float(self.calls), prompt_length=length)


WANTED = [(0, [1, 1], 2, "none"), (1, [5, 6, 7], 9, "0.1"), (2, [8], 4, "0.2"), (3, [9, 9, 9, 9], 7, "0.2")]


@pytest.mark.parametrize(("derives", "calls"), [(False, 2), (True, 4)])
def test_copies_only_where_they_are_as_good(derives: bool, calls: int) -> None:
    """Two are made to find out. A field that follows from the tokens makes a copy wrong: then all four are made."""
    maker = Maker(derives=derives)
    pattern = Pattern(maker)
    requests = [pattern.request(*wanted) for wanted in WANTED]
    assert maker.calls == calls
    for (key, tokens, most, salt), request in zip(WANTED, requests, strict=True):
        length = len(tokens) if derives else 0
        wanted = Request(str(key), tokens, salt, Params(most), request.arrival_time, prompt_length=length)
        assert request == wanted


def test_copies_share_nothing_that_changes() -> None:
    """vLLM keeps what it is given: a later request must not change an earlier one, nor one that was changed a later one."""
    pattern = Pattern(Maker(derives=False))
    first, second, third = (pattern.request(*wanted) for wanted in WANTED[:3])
    first.sampling_params.max_tokens = 77
    first.prompt_token_ids.append(3)
    fourth = pattern.request(*WANTED[3])
    assert [r.sampling_params.max_tokens for r in (second, third, fourth)] == [9, 4, 7]
    assert [r.prompt_token_ids for r in (second, third, fourth)] == [[5, 6, 7], [8], [9, 9, 9, 9]]


def test_a_release_whose_requests_cannot_be_copied_goes_its_own_way() -> None:
    class Sealed(Request):
        def __copy__(self) -> "Sealed":
            raise TypeError("not to be copied")

    calls = []

    def make(key: int, tokens: list[int], max_tokens: int, salt: str) -> Request:
        calls.append(key)
        return Sealed(str(key), tokens, salt, Params(max_tokens), arrival_time=0.0)

    pattern = Pattern(make)
    assert [pattern.request(*wanted).request_id for wanted in WANTED] == ["0", "1", "2", "3"]
    assert calls == [0, 1, 2, 3]
