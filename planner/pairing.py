"""The shortest period of cells (`planner.cells`): what the devices they leave can do in a period, over all sizes of replicas."""

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from planner.cells import Asked, Away, Cells, Flags, Floats, Ints, Left, Room
from planner.cluster import Link
from planner.cost.arrivals import widest
from planner.cost.model import CostModel
from planner.cost.network import best_of
from planner.cost.update import update_s
from planner.cost.waves import Curve, envelope
from planner.pools import Pools
from planner.record import record
from planner.space import replica_shapes

_STRIDE = 1.5  # a period is sought in steps of this factor, so that cells far from the optimum cost little
_ROUNDING = 1 + 1e-12


@record
class _Offers:
    """Everything replicas of some kinds may offer, kind by kind and size by size. Axis o: offers, z: sizes."""

    kind: Ints  # [o]
    rate: Floats
    tau_s: Floats
    stop_s: Floats  # the part of the pause that the link has no say in: recomputation, and an overlapped update's swap
    swap_s: Floats  # that swap; 0 where there is none
    starts: Ints  # [z] first offer of each size
    sizes: tuple[tuple[int, ...], ...]  # by kind; empty where nothing fits
    first: tuple[int, ...]  # by kind, its first size in `starts`
    curves: tuple[tuple[int, Floats, Floats, float], ...] = ()  # sync, by size: kind, seconds, tokens, tokens/s beyond

    def of(self, kind: int) -> "_Offers":
        """Those of one kind."""
        rows = self.kind == kind
        at = slice(self.first[kind], self.first[kind] + len(self.sizes[kind]))
        return _Offers(
            kind=self.kind[rows] * 0,
            rate=self.rate[rows],
            tau_s=self.tau_s[rows],
            stop_s=self.stop_s[rows],
            swap_s=self.swap_s[rows],
            starts=self.starts[at] - self.starts[self.first[kind]],
            sizes=(self.sizes[kind],),
            first=(0,),
            curves=tuple((0, *c[1:]) for c in self.curves if c[0] == kind),
        )


class Pairing:
    """The shortest period beside each trainer, where devices lie relaxed but for the sites they are in."""

    def __init__(
        self, cost: CostModel, pools: Pools, combinations: Sequence[tuple[int, ...]], *, free: bool = False
    ) -> None:
        """`free`: in sync modes, every device may generate whatever else it does; cells then use none."""
        self.pools, self.rules = pools, cost.rules
        self.combinations = tuple(combinations)
        self.overlapped = cost.rules.overlapped
        self.offers = self._offers(cost)
        self.smallest = np.array([min(s, default=np.iinfo(np.int64).max) for s in self.offers.sizes], dtype=np.int64)
        self.must_train = pools.must_train.sum(axis=1) * (not free)
        self._free = free
        # Where all devices are free, by set of sites and combination: a window in which they are known not to do a step's
        # work, and one in which they are known to.
        self._short_s = np.full(len(pools.member) * len(combinations), -np.inf)
        self._enough_s = np.full(len(self._short_s), np.inf)
        kinds = range(len(pools.kinds))

        def home(combination: tuple[int, ...], several: bool) -> list[float]:
            links = zip(pools.kinds, self._home_links(combination, several=several), strict=True)
            return [update_s(cost.context, kind, link) for kind, link in links]

        # [several sites?, combination, k]: the transfer to a replica in the trainer's own sites.
        self.home_s = np.array([[home(c, s) for c in combinations] for s in (False, True)])
        self.away_s = [self._away(cost, k) for k in kinds]  # [k][s, r]: to one in another site
        self.away_offers = [self.offers.of(k) if self.offers.sizes[k] else None for k in kinds]
        alike: dict[tuple[int, ...], list[int]] = {}
        for k in kinds:
            if self.offers.sizes[k]:
                alike.setdefault(self.offers.sizes[k], []).append(k)
        # Kinds with the same sizes fill together: (sizes, kinds, their columns among all sizes).
        self.alike = [
            (sizes, ks, np.array([self.offers.first[k] + np.arange(len(sizes)) for k in ks]))
            for sizes, ks in alike.items()
        ]

    def home_link(self, combination: tuple[int, ...], kind: int, *, several: bool) -> Link:
        """A link as good as any path from a trainer on those kinds to replicas of a kind in its own sites: replicas of other kinds
        may pass weights on."""
        return self._home_links(combination, several=several)[kind]

    def _home_links(self, combination: tuple[int, ...], *, several: bool) -> list[Link]:
        """`home_link` to every kind."""
        latency_s, bytes_per_s = self._home_paths[several]
        trains = list(combination)
        least, most = latency_s[trains].min(axis=0).tolist(), bytes_per_s[trains].max(axis=0).tolist()
        return [Link(latency_s=a, bytes_per_s=b) for a, b in zip(least, most, strict=True)]

    @functools.cached_property
    def _home_paths(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """[k, k] latency and rate of the best path from kind to kind inside a trainer's sites: in one of them, in several."""
        pools, kinds = self.pools, range(len(self.pools.kinds))
        # A site that stands for several regions may have the path from one of them to another lead through other sites.
        every = [any(len(g) > 1 for g in pools.sites), True]
        out = []
        for several in every:
            links = [[best_of(pools.home_links(a, b, several=several)) for b in kinds] for a in kinds]
            latency = np.array([[x.latency_s for x in row] for row in links])
            out.append(widest(latency, np.array([[x.bytes_per_s for x in row] for row in links])))
        return out[0], out[1]

    @functools.cached_property
    def _site_paths(self) -> tuple[Floats, Floats]:
        """[r, r] latency and rate of the best path from site to site, over any others."""
        sites = len(self.pools.sites)
        latency, rate = np.full((sites, sites), np.inf), np.zeros((sites, sites))
        for (a, b), link in self.pools.links.items():
            latency[a, b] = latency[b, a] = link.latency_s
            rate[a, b] = rate[b, a] = link.bytes_per_s
        return widest(latency, rate)

    def _away(self, cost: CostModel, kind: int) -> Floats:
        sites, name = range(len(self.pools.sites)), self.pools.kinds[kind]
        latency, rate = self._site_paths
        # The lowest latency and the highest rate each for itself, and a transfer is the sum of the two.
        rest = np.full_like(latency, np.inf)
        for a, b in itertools.permutations(sites, 2):
            rest[a, b] = update_s(cost.context, name, Link(latency_s=0.0, bytes_per_s=float(rate[a, b])))
        least = [np.where(self.pools.member[:, :, None], x[None, :, :], np.inf).min(axis=1) for x in (latency, rest)]
        found: Floats = least[0] + least[1]
        return found

    def _offers(self, cost: CostModel) -> _Offers:
        rows: list[tuple[float, ...]] = []
        starts: list[int] = []
        sizes: list[tuple[int, ...]] = []
        first: list[int] = []
        curves: list[tuple[int, Floats, Floats, float]] = []
        for k, kind in enumerate(self.pools.kinds):
            by_size: dict[int, list[tuple[float, ...]]] = {}
            made: dict[int, list[tuple[Curve, float]]] = {}
            for shape in replica_shapes(cost, self.pools.classes, kind):
                for o in cost.offers(shape, self.pools.cluster.same_kind.bulk()):
                    if o.done:
                        made.setdefault(shape.devices, []).append((o.done, o.level.rate_tokens_per_s))
                    stop = o.pause_s - (0.0 if self.overlapped else o.transfer_s)
                    row = (k, o.level.rate_tokens_per_s, o.level.tau_s, stop, o.swap_s)
                    by_size.setdefault(shape.devices, []).append(row)
            first.append(len(starts))
            sizes.append(tuple(sorted(by_size)))
            curves += [(k, *envelope(*zip(*made[size], strict=True))) for size in sizes[-1] if made]
            for size in sizes[-1]:
                starts.append(len(rows))
                rows += by_size[size]
        kinds, rate, tau, stop_s, swap_s = np.array(rows, dtype=float).reshape(-1, 5).T
        return _Offers(
            kind=kinds.astype(np.int64),
            rate=rate,
            tau_s=tau,
            stop_s=stop_s,
            swap_s=swap_s,
            starts=np.array(starts, dtype=np.int64),
            sizes=tuple(sizes),
            first=tuple(first),
            curves=tuple(curves),
        )

    def _left(self, cells: Cells, most_s: Floats) -> Left:
        """What cells leave, for periods of no more than `most_s`."""
        pools = self.pools
        several = (pools.size[cells.sites] > 1).astype(np.int64)
        room = np.maximum(pools.inside[cells.sites] - np.maximum(cells.used, self.must_train), 0)
        return Left(
            cells=cells,
            room=tuple(Room.of(sizes, room[:, kinds]) for sizes, kinds, _ in self.alike),
            asked=self._asked(self.offers, self.home_s[several, cells.trained], cells.train_s),
            away=tuple(
                self._left_away(k, offers, cells, most_s)
                for k, offers in enumerate(self.away_offers)
                if offers is not None and len(pools.sites) > 1
            ),
        )

    def _left_away(self, k: int, offers: _Offers, cells: Cells, most_s: Floats) -> Away:
        count = self.pools.count[k]
        transfer = self.away_s[k][cells.sites]
        live = ~self.pools.member[cells.sites] & (count >= self.smallest[k])
        if not self.overlapped:
            live &= transfer + offers.stop_s.min() < self._window_s(most_s, cells.train_s)[:, None]
        c, r = np.nonzero(live)
        asked = self._asked(offers, transfer[c, r][:, None], cells.train_s[c])
        return Away(kind=k, cell=c, room=Room.of(offers.sizes[0], count[r][:, None]), asked=asked)

    def _asked(self, offers: _Offers, transfer_s: Floats, train_s: Floats) -> Asked:
        """By `Rules.required_s`; `transfer_s` [c, k]. In sync modes nothing is recomputed, and a size's best is one curve."""
        rules, train = self.rules, train_s[:, None]
        if rules.sync:
            return Asked(pause_s=transfer_s * (not self.overlapped), need_s=transfer_s)
        transfer_s = transfer_s[:, offers.kind]
        pause = offers.stop_s[None, :] + (0.0 if self.overlapped else transfer_s)
        wait, tail = transfer_s - offers.swap_s if self.overlapped else 0.0, rules.tail_group * offers.tau_s
        last, early = wait + np.maximum(wait, tail + train), wait + np.maximum(wait, tail)
        need = pause + np.minimum(last / (rules.eta + 1), early / rules.eta)  # `Rules.stale_s`
        if rules.pause_all:
            need = np.maximum(need, train + transfer_s)
        return Asked(pause_s=np.broadcast_to(pause, need.shape), need_s=need)

    def _work(self, left: Left, period_s: Floats) -> Floats:
        """[c] the most tokens that what each cell leaves can give in its period."""
        total = np.zeros(len(period_s))
        if not len(self.offers.rate) or not len(period_s):
            return total
        window = self._window_s(period_s, left.cells.train_s)
        values = self._values(self.offers, left.asked, window, period_s)
        for (_, _, columns), room in zip(self.alike, left.room, strict=True):
            total += room.tokens(values[:, columns])
        for away in left.away:
            offers = self.away_offers[away.kind]
            if offers is not None and len(away.cell):
                values = self._values(offers, away.asked, window[away.cell], period_s[away.cell])
                np.add.at(total, away.cell, away.room.tokens(values[:, None]))
        return total

    def _window_s(self, period_s: Floats, train_s: Floats) -> Floats:
        found: Floats = period_s - self.rules.reward_s - (train_s if self.rules.sync else 0.0)
        return found

    def _values(self, offers: _Offers, asked: Asked, window_s: Floats, period_s: Floats) -> Floats:
        """[c, z] tokens of the best replica of each size, by `Rules.best` and `Rules.given_tokens`."""
        if self.rules.sync:
            return self._sync_values(offers, asked, window_s)
        given = window_s[:, None] - asked.pause_s
        np.maximum(0.0, given, out=given)
        given *= offers.rate
        given *= asked.need_s <= (period_s * _ROUNDING)[:, None]
        values: Floats = np.maximum.reduceat(given, offers.starts, axis=1)
        return values

    def _sync_values(self, offers: _Offers, asked: Asked, window_s: Floats) -> Floats:
        out = np.zeros((len(window_s), len(offers.curves)))
        for z, (kind, seconds, tokens, rate) in enumerate(offers.curves):
            left = window_s * (1 + 1e-12) - asked.pause_s[:, kind]
            given = np.interp(left, seconds, tokens, left=0.0)
            out[:, z] = given + rate * np.maximum(0.0, left - seconds[-1])
        return out

    def closer_s(self, cells: Cells, low_s: Floats, halvings: int) -> tuple[Floats, Flags]:
        """Better lower bounds of periods that are at least `low_s`, and whether each is the cell's own period to
        2 ** -halvings (else it is known to be larger still)."""
        left = self._left(cells, _STRIDE * low_s)
        found, settled = low_s.copy(), self._enough(left, low_s)
        rest = np.flatnonzero(~settled)
        low, high = low_s[rest], _STRIDE * low_s[rest]
        enough = self._enough(left.at(rest), high)
        found[rest[~enough]] = high[~enough]
        rest, low, high = rest[enough], low[enough], high[enough]
        settled[rest] = True
        some = left.at(rest)
        for _ in range(halvings if len(rest) else 0):
            middle = (low + high) / 2
            enough = self._enough(some, middle)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        found[rest] = low  # the lower end, to stay on the safe side
        return found, settled

    def _enough(self, left: Left, period_s: Floats) -> Flags:
        """[c] whether what each cell leaves does a step's work in its period."""
        need, cells = self.rules.work_tokens, left.cells
        if not self._free:
            found: Flags = self._work(left, period_s) >= need
            return found
        # Only the window counts, and what is enough in one is enough in any longer one: little is left to be asked.
        window, where = self._window_s(period_s, cells.train_s), cells.sites * len(self.combinations) + cells.trained
        enough: Flags = window >= self._enough_s[where]
        asked = np.flatnonzero(~enough & (window > self._short_s[where]))
        if len(asked):
            done = self._work(left.at(asked), period_s[asked]) >= need
            enough[asked] = done
            for known_s, extreme, at in (
                (self._enough_s, np.minimum, asked[done]),
                (self._short_s, np.maximum, asked[~done]),
            ):
                extreme.at(known_s, where[at], window[at])
        return enough

    def hopeless(self, cells: Cells) -> Flags:
        """[c] whether nothing that a cell leaves can roll out at all."""
        inside = self.pools.inside[cells.sites] - np.maximum(cells.used, self.must_train)
        enough = np.sum(self.pools.count >= self.smallest[:, None], axis=0) > 0  # [r]
        away = (enough & ~self.pools.member).any(axis=1)
        left: Flags = (inside >= self.smallest).any(axis=1) | away[cells.sites]
        return ~left
