"""The parts by themselves: decoding against stepping token by token, links, lengths, churn tables, the timeline."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidInput
from runtime.policy.staleness import StalenessPolicy
from runtime.sim.churn import Change, read_changes
from runtime.sim.flow import SimulatedFlow
from runtime.sim.lengths import LengthModel, listed
from runtime.sim.links import Links
from runtime.sim.rules import FlowRules, WeightsPath
from runtime.sim.speed import ReplicaSpeed, TrainerSpeed
from runtime.sim.timeline import Timeline


def stepped(speed: ReplicaSpeed, lengths: list[int], prompt: int) -> list[float]:
    """When each of these samples ends, all begun together, one decode step after the other."""
    left, ends, now, done = dict(enumerate(lengths)), [0.0] * len(lengths), 0.0, 0
    while left:
        n = len(left)
        now += float(speed.base_s[n] + speed.kv_s[n] * n * (prompt + done))
        done += 1
        for i in [i for i, x in left.items() if x == done]:
            ends[i] = now
            del left[i]
    return ends


@settings(max_examples=20)
@given(st.lists(st.integers(50, 600), min_size=2, max_size=12), st.integers(1, 400), st.floats(0, 2e-6))
def test_decoding_is_as_stepping_token_by_token(lengths: list[int], prompt: int, kv: float) -> None:
    n = len(lengths)
    speed = ReplicaSpeed(slots=n, base_s=0.002 + 0.0005 * np.arange(n + 1), kv_s=np.full(n + 1, kv), kv_tokens=math.inf)
    rules = FlowRules(
        policy=StalenessPolicy(eta=0, prompts_per_step=1),
        responses_per_prompt=n,
        prompt=LengthModel(family="constant", mean_tokens=prompt, max_tokens=prompt),
        response=listed(lengths),
    )
    flow = SimulatedFlow(rules, 3)
    flow.add_replica("r", speed, WeightsPath())
    flow.granting._ramps["r"] = flow.decoding.allowed[0] = n  # no warm-up: all begin together
    flow.granting.fill(0.0)
    drawn = np.rint(flow.decoding.ends).astype(int).tolist()
    expected = stepped(speed, drawn, prompt)
    assert flow.advance(math.inf) == "waits"
    # The integral over a token's growth differs from the sum by half a token of context.
    assert flow.groups.complete_s.max() == pytest.approx(max(expected), rel=5e-3)
    assert flow.books.sample_seconds == pytest.approx(sum(expected), rel=5e-3)
    assert flow.books.generated_tokens == sum(drawn)


def test_a_weight_update_splits_a_sample_into_spans_at_the_token() -> None:
    """One slot, 10 ms a token, samples of 1,000 tokens, T = 25 s with B = 1: step 0 ends at 35 s, in the middle of the
    fourth sample, half of whose tokens are of version 0 and half of version 1."""
    rules = FlowRules(
        policy=StalenessPolicy(eta=5, prompts_per_step=1),
        responses_per_prompt=1,
        prompt=LengthModel(family="constant", mean_tokens=1, max_tokens=1),
        response=LengthModel(family="constant", mean_tokens=1000, max_tokens=1000),
        recompute=False,
    )
    flow = SimulatedFlow(rules, 0)
    flow.add_replica(
        "r", ReplicaSpeed(slots=1, base_s=np.array([0, 0.01]), kv_s=np.zeros(2), kv_tokens=math.inf), WeightsPath()
    )
    flow.set_trainer(TrainerSpeed(train_s=25.0))
    flow.advance(200.0)
    ages = [dict(s.ages) for s in flow.books.steps[:4]]
    # Steps end at 35, 60, 85, 110 s. Sample k runs from 10 k to 10 k + 10 s and is trained in step k.
    assert [s.ended_s for s in flow.books.steps[:4]] == pytest.approx([35, 60, 85, 110], abs=1e-6)
    assert ages == [{0: 1000}, {1: 1000}, {2: 1000}, {3: 500, 2: 500}]


def test_a_trainer_does_not_wait_for_the_update_of_a_replica_that_is_gone() -> None:
    """Updates that pause everything take 5 s to `slow` and nothing to `quick`; `slow` goes in the middle of its first one."""
    length = LengthModel(family="constant", mean_tokens=100, max_tokens=100)
    rules = FlowRules(
        policy=StalenessPolicy(eta=1, prompts_per_step=2),
        responses_per_prompt=1,
        prompt=LengthModel(family="constant", mean_tokens=1, max_tokens=1),
        response=length,
        pause_all=True,
        steps=10,
    )
    flow = SimulatedFlow(rules, 0)
    speed = ReplicaSpeed(slots=1, base_s=np.array([0, 0.01]), kv_s=np.zeros(2), kv_tokens=math.inf)
    flow.add_replica("quick", speed, WeightsPath())
    flow.add_replica("slow", speed, WeightsPath(link="a", bytes_per_s=1.0, size_bytes=5.0))
    flow.set_trainer(TrainerSpeed(train_s=1.0))
    while flow.training.state != "updating":
        flow.advance(flow.now_s + 0.1)
    flow.remove_replica("slow", lost=True)
    assert flow.training.state == "waiting"
    assert flow.advance(1000.0) == "steps"


def test_streams_on_one_link_share_it_and_others_do_not() -> None:
    """Two streams of 100 bytes on a link of 10 bytes/s, the second from 5 s on: 50 bytes alone, then 5 bytes/s each."""
    links = Links()
    links.send(0.0, link="a", rate_bytes_per_s=10, size_bytes=100, fixed_s=1.0, tag=1, to="x")
    links.send(5.0, link="a", rate_bytes_per_s=10, size_bytes=100, fixed_s=0.0, tag=2, to="y")
    links.send(5.0, link="b", rate_bytes_per_s=10, size_bytes=100, fixed_s=0.0, tag=2, to="z")
    seen: dict[str, float] = {}
    while (at_s := links.next_s()) < math.inf:
        for stream in links.done(at_s):
            seen |= dict.fromkeys(stream.waiting, at_s)
    assert seen == pytest.approx({"x": 16.0, "y": 20.0, "z": 15.0})


def test_one_broadcast_is_one_stream_however_many_wait_for_it() -> None:
    links = Links()
    for name in "xyz":
        links.send(0.0, link="a", rate_bytes_per_s=10, size_bytes=100, fixed_s=0.5, tag=1, to=name)
    links.forget("y")
    assert links.next_s() == pytest.approx(10.0)
    links.advance(10.0)
    assert [s.waiting for s in links.done(10.5)] == [["x", "z"]]


@given(
    st.sampled_from(["lognormal", "exponential", "constant"]), st.floats(2, 3000), st.floats(0, 1.5), st.integers(0, 50)
)
def test_lengths_keep_their_mean_and_their_limits(family: str, mean: float, cv: float, step: int) -> None:
    model = LengthModel(family=family, mean_tokens=mean, cv=cv, max_tokens=5000, growth_per_step=0.01)  # type: ignore[arg-type]
    drawn = model.draw(np.random.default_rng(0), 40_000, step)
    assert drawn.min() >= 1
    assert drawn.max() <= 5000
    if family != "exponential":  # which the limit cuts without putting the mean back
        wanted = min(mean * (1 + 0.01 * step), 5000)
        assert drawn.mean() == pytest.approx(max(wanted, 1), rel=0.05, abs=0.3)


def test_a_list_of_lengths_is_drawn_from() -> None:
    assert set(listed([3, 9, 9]).draw(np.random.default_rng(0), 1000).tolist()) == {3, 9}
    with pytest.raises(InvalidInput, match="empty"):
        listed([])


NODES = ("a", "b", "c")


def test_a_capacity_is_a_number_of_machines_from_the_front() -> None:
    assert read_changes("t_s,capacity\n0,2\n60,3\n90,0\n", NODES) == (
        Change(at_s=0, event="remove", nodes=("c",)),
        Change(at_s=60, event="add", nodes=("c",)),
        Change(at_s=90, event="remove", nodes=("a", "b", "c")),
    )


def test_machines_nobody_named_take_free_places_and_give_them_back() -> None:
    text = "t_s,event,node\n0,add,x\n10,add,y\n20,remove,x\n20,add,z\n"
    assert read_changes(text, NODES) == (
        Change(at_s=0, event="remove", nodes=NODES),
        Change(at_s=0, event="add", nodes=("a",)),
        Change(at_s=10, event="add", nodes=("b",)),
        Change(at_s=20, event="remove", nodes=("a",)),
        Change(at_s=20, event="add", nodes=("a",)),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("when,what\n1,2\n", "not a churn trace"),
        ("t_s,capacity\n0,4\n", "more machines"),
        ("t_s,capacity\n-1,2\n", "0 or more"),
        ("t_s,capacity\n0,2.7\n", "whole number of machines"),
        ("t_s,event,node\n0,remove\n", "without a machine"),
        ("t_s,event,node,factor\n0,slow,a,0\n", "no time at all"),
        (
            "t_s,event,node\n0,remove,x\n",
            "goes that this fleet does not have .* got 'x', expected one of a, b, c\nhint: .*another fleet",
        ),
        ("t_s,event,node,factor\n0,slow,x,2\n", "slows down that this fleet does not have"),
        ("t_s,event,node\n0,explode,a\n", "unknown event"),
        ("t_s,event,node,factor\n0,slow,a,quick\n", "0 or more"),
        ("t_s,event,node\n0,add,w\n0,add,x\n0,add,y\n0,add,z\n", "more machines"),
        ("", "not a churn trace"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_changes(text, NODES)


def test_of_a_large_fleet_the_first_machines_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"one of m0, m1, .*, m11 and 88 more\nhint:"):
        read_changes("t_s,event,node\n0,remove,x\n", [f"m{i}" for i in range(100)])


def test_the_timeline_is_a_chrome_trace() -> None:
    t = Timeline("run")
    t.span("replicas", "r0", "decode", 0.0, 1.0)
    t.span("replicas", "r0", "decode", 1.0, 2.5)
    t.span("replicas", "r0", "update", 2.5, 3.0)
    t.counter("queue", 1.0, 4)
    t.counter("queue", 2.0, 4)
    t.mark("plan: start", 0.0)
    document = json.loads(json.dumps(t.document()))
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [("decode", 0, 2.5e6), ("update", 2.5e6, 0.5e6)]
    assert len({(e["pid"], e["tid"]) for e in spans}) == 1
    assert [e["args"]["value"] for e in document["traceEvents"] if e["ph"] == "C"] == [4]
    assert document["otherData"]["simulated"] is True
