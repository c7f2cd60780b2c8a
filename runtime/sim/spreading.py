"""New weights on their way to the replicas: over links that they share, one version after the other."""

from runtime.sim.decoding import Decoding
from runtime.sim.figures import Books
from runtime.sim.links import Links, Stream
from runtime.sim.rules import FlowRules, WeightsPath
from runtime.sim.timeline import Timeline


class Spreading:
    """What each replica is being sent. `links` may be asked when the next transfer ends."""

    def __init__(self, rules: FlowRules, decoding: Decoding, books: Books, timeline: Timeline | None) -> None:
        self.links = Links()
        self._rules, self._decoding, self._books, self._timeline = rules, decoding, books, timeline
        self._paths: dict[str, WeightsPath] = {}
        self._loading: dict[str, int] = {}  # replica -> version on its way

    @property
    def under_way(self) -> bool:
        """Whether any replica waits for weights."""
        return bool(self._loading)

    def join(self, name: str, path: WeightsPath) -> None:
        """A replica comes, with the newest weights."""
        self._paths[name] = path

    def leave(self, name: str) -> None:
        """A replica goes; nothing is sent to it any more."""
        self.links.forget(name)
        self._loading.pop(name, None)

    def send(self, name: str, i: int, version: int, now_s: float) -> None:
        """New weights are published: replica `i` of that name gets them, unless older ones are still on their way to it."""
        if name in self._loading:
            return
        path = self._paths[name]
        self._loading[name] = version
        if path.size_bytes <= 0 and path.fixed_s <= 0:
            self._arrive(name, i, version, now_s)
            return
        if not self._rules.overlapped:
            self._decoding.pause(i)
        self.links.send(
            now_s,
            link=path.link,
            rate_bytes_per_s=path.bytes_per_s,
            size_bytes=path.size_bytes,
            fixed_s=path.fixed_s,
            tag=version,
            to=name,
        )

    def arrived(self, now_s: float) -> list[Stream]:
        """Transfers that are over by now; the replicas that waited for them are to `switch`."""
        return self.links.done(now_s)

    def switch(self, arrived: list[Stream], numbers: dict[str, int], newest: int, now_s: float) -> None:
        """The replicas that these transfers were for go on with what they brought."""
        for stream in arrived:
            if self._timeline is not None:
                self._timeline.span("links", stream.link, f"weights {stream.tag}", stream.began_s, now_s)
            for name in stream.waiting:
                self._arrive(name, numbers[name], newest, now_s)

    def _arrive(self, name: str, i: int, newest: int, now_s: float) -> None:
        d, version = self._decoding, self._loading.pop(name)
        d.switch(i, version)
        d.resume(i)
        seconds = self._paths[name].swap_s
        if self._rules.recompute:
            seconds += d.recompute_s(i)
            self._books.recomputed_tokens += int(d.context[i] - d.spared(i).sum())
        d.stall[i] += seconds
        d.updating[i] += seconds
        if version < newest:
            self.send(name, i, newest, now_s)
