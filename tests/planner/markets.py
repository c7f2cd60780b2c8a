"""Small markets for tests."""

from hypothesis import strategies as st

from planner.market import Egress, Instance, Market
from planner.problem import Problem
from planner.record import replace

CARDS = Market(
    name="cards",
    instances=(
        Instance(name="fast", kind="compute", gpus=2, region="east", usd_per_h=10.0, spot_usd_per_h=4.0, available=2),
        Instance(name="wide", kind="bandwidth", gpus=2, region="east", usd_per_h=4.0, available=2),
    ),
)


def one_region(problem: Problem) -> Problem:
    """The problem without its devices."""
    return replace(problem, cluster=replace(problem.cluster, devices=()))


@st.composite
def markets(draw: st.DrawFn, kinds: tuple[str, ...], *, most_devices: int) -> Market:
    """Two or three types of instance of one or two devices, in one or two regions; all of it is at most `most_devices`."""
    instances: list[Instance] = []
    left = most_devices
    for i in range(draw(st.integers(2, 3))):
        gpus = draw(st.integers(1, min(2, max(1, left))))
        available = draw(st.integers(0 if i else 1, max(1, left // gpus)))
        if available * gpus > left:
            continue
        left -= available * gpus
        instances.append(
            Instance(
                name=f"i{i}",
                kind=draw(st.sampled_from(kinds)),
                gpus=gpus,
                region=draw(st.sampled_from(["east", "east", "west"])),
                usd_per_h=draw(st.sampled_from([0.5, 1.0, 2.0, 3.7, 10.0])),
                spot_usd_per_h=draw(st.sampled_from([None, 0.25, 0.5])),
                available=available,
            )
        )
    prices = st.sampled_from([0.0, 0.02, 5.0])
    egress = tuple(Egress(origin=a, to=b, usd_per_gb=draw(prices)) for a, b in (("east", "west"), ("west", "east")))
    return Market(name="drawn", instances=tuple(instances), egress=egress)
