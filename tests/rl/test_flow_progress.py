"""Which samples stall: what is kept in order says what a walk over all of them would say."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.rl.flow.progress import Progress
from runtime.rl.types import SampleId

LIMIT_S = 60
_SAMPLES = [SampleId(group, member) for group in range(4) for member in range(2)]
_steps = st.tuples(st.sampled_from(["mark", "forget", "pause", "look"]), st.sampled_from(_SAMPLES), st.integers(0, 40))


@given(st.lists(_steps, max_size=60))
def test_what_stalls_is_what_a_walk_over_all_finds(steps: list[tuple[str, SampleId, int]]) -> None:
    """Whole seconds, so that the limit itself is met often: exactly `LIMIT_S` is not yet too long."""
    now_s = 1000
    progress = Progress(_SAMPLES[:3], now_s)
    walked = dict.fromkeys(_SAMPLES[:3], now_s)  # when each last got a token, pauses given back one by one
    for what, sample, seconds in steps:
        now_s += seconds
        if what == "mark":
            progress.mark(sample, now_s)
            walked[sample] = now_s
        elif what == "forget":
            progress.forget(sample)
            walked.pop(sample, None)
        elif what == "pause":
            progress.give_back(seconds)  # flow stood still for the whole time since the last step
            walked = {s: since_s + seconds for s, since_s in walked.items()}
        expected = {s for s, since_s in walked.items() if now_s - since_s > LIMIT_S}
        found = progress.stalled(now_s, LIMIT_S)
        assert set(found) == expected
        assert [walked[s] for s in found] == sorted(walked[s] for s in found), "the longest first"
        assert len(progress) == len(walked)
