"""
The distribution of a function's service times (docs/adr/0027).

A mean alone says of a call that runs for longer that it ends now, however long it runs. So the *shape* is kept beside
the mean, which is in the profile: a histogram of the ratios of actual to estimated time, in logarithmic buckets, by
function and kind of device. Old calls lose weight, and a prior is mixed in while there are few calls. Ratios keep their
shape when the estimate follows a mean that drifts, or the size of the request; seconds do not.

Nothing here raises: impossible times (NaN, infinite, negative) are ignored.
"""

from __future__ import annotations

from itertools import pairwise
from math import erf, inf, log, sqrt
from typing import Final

from gpufaas_core.model import Seconds, SizesDoc, TimesDoc

RATIO: Final = 1.25
"""The ratio of a bucket's ends: times are known to 12 %. One bucket has 1 in its middle."""

HALF_LIFE: Final = 200
"""Half of the weight is on this many last calls."""

PRIOR_CALLS: Final = 5.0
"""The weight of the prior, a log-normal distribution with cv 1: half a call less for each call seen."""

SHARE: Final = 0.5
"""A call that has run for longer than any other takes this share of its time longer. That is the average for times
whose tail falls with the cube of the time, and is more than a bucket."""

_TAIL_CALLS: Final = 0.5
"""The weight of `SHARE`, in calls, for a call that has run for as long as few others."""

_POINT_CV: Final = 0.03
"""Below this cv, times count as equal: the time left is the estimate less the time run, not that of a bucket."""

_STEADY: Final = 0.15
"""With a rate of this over cv^2, the learnt mean varies with a cv of about 0.3, whatever cv is."""

MIN_R2: Final = 0.3
"""The least share of the variance of times that sizes must explain to be used."""
MIN_SIZED: Final = 8
"""The least number of calls with a size."""
_MAX_SIZE: Final = 1e100
_MAX_S: Final = 1e9

ON_GRID: Final = 1.5 * 2.0**22
"""Floats near this are 2**-30 apart; see `on_grid`."""

_SIDE: Final = 40
"""The number of buckets below and above the middle: ratios from 1/7,500 to 7,500. The end buckets hold the rest."""

_COUNT: Final = 2 * _SIDE + 1
_LOG: Final = log(RATIO)
_LOWS: Final[list[float]] = [RATIO ** (index - _SIDE - 0.5) for index in range(_COUNT + 1)]
_LOWEST: Final = _LOWS[0] * RATIO
_HIGHEST: Final = _LOWS[-1] / RATIO
"""Between these, the logarithm gives the bucket in spite of rounding."""
_MIDDLE: Final = _SIDE + 0.5
_BELOW_ONE: Final = 0.9
_ABOVE_ONE: Final = 1.0 / _BELOW_ONE
"""Both are in the middle bucket."""
_MEANS: Final = [low * (RATIO - 1.0) / _LOG for low in _LOWS]
"""The mean of each bucket, with times spread evenly over their logarithms."""

_GROWTH: Final = 2.0 ** (1.0 / HALF_LIFE)
"""The growth of the weight from call to call, instead of shrinking all old weights."""
_MAX_UNIT: Final = 2.0**40


def _prior() -> list[float]:
    """Return the shares of a log-normal distribution with mean 1 and cv 1 in the buckets, leaving out less than 1 %."""
    sigma = sqrt(log(2.0))
    below = [0.5 * (1.0 + erf((log(low) + sigma * sigma / 2.0) / (sigma * sqrt(2.0)))) for low in _LOWS]
    shares = [high - low for low, high in pairwise(below)]
    kept = [share if share > 5e-4 else 0.0 for share in shares]
    return [share / sum(kept) for share in kept]


_PRIOR: Final = _prior()
_PRIOR_FIRST: Final = next(index for index, share in enumerate(_PRIOR) if share)
_PRIOR_LAST: Final = max(index for index, share in enumerate(_PRIOR) if share)


class ServiceTimes:
    """
    The times of one function on devices of one kind, in units of the estimate. `add` is O(1); the first question after
    it is O(buckets), others are O(1).
    """

    __slots__ = (
        "_above", "_count", "_cv", "_first", "_high", "_last", "_low", "_mean", "_mixed", "_scale", "_seen", "_sum",
        "_sum2", "_unit", "_weights", "calls", "centred",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls = 0
        """The number of calls seen, whatever their weight now."""
        self.centred = False
        """The estimates follow the times. Then their mean is right, but the mean of the ratios is above 1, the more so
        the fewer calls an estimate is made from; so ratios count in units of their mean. False: the estimates are
        given, and the ratios may correct them."""
        self._weights = [0.0] * _COUNT
        """By bucket; the newest call has weight `_unit`."""
        self._low, self._high = _COUNT, -1
        """The first and the last bucket that have weight."""
        self._unit = 1.0
        """Weight of the newest call."""
        self._count = self._sum = self._sum2 = 0.0
        """Sums of the weights, of the weighted ratios, and of their weighted squares."""
        # The following are computed on demand, from the above and the prior.
        self._seen = -1
        """They are as of this number of calls."""
        self._mean = self._cv = 0.0
        self._scale = 1.0
        """The ratio that answers count as 1."""
        self._first = self._last = 0
        """The first and the last bucket of `_mixed`."""
        self._mixed: list[float] = []
        """The number of calls in each bucket."""
        self._above: list[tuple[float, float]] = []
        """From `_first` to one behind `_last`: the number of calls in this bucket and those above, and the sum of their
        ratios."""

    def add(self, ratio: float, rate: float = 0.0) -> float:
        """
        A call took *ratio* times its estimate. Return the weight of its time in the mean: *rate*, or less (see
        `steady`).

        Each call of any function passes here, so this is written for speed.
        """
        if _BELOW_ONE < ratio < _ABOVE_ONE:
            index = _SIDE  # nearly always so where times vary little, and a logarithm is slow
        elif _LOWEST < ratio < _HIGHEST:
            index = int(log(ratio) / _LOG + _MIDDLE)
        elif 0.0 <= ratio < inf:
            ratio = min(ratio, _HIGHEST)
            index = _bucket(ratio)
        else:
            return rate
        weights = self._weights
        if not weights[index]:  # the first one in its bucket
            self._low = min(index, self._low)
            self._high = max(index, self._high)
        unit = self._unit = self._unit * _GROWTH
        weighted = unit * ratio
        weights[index] += unit
        self._count = count = self._count + unit
        self._sum = total = self._sum + weighted
        self._sum2 = squares = self._sum2 + weighted * ratio
        self.calls += 1
        if unit > _MAX_UNIT:
            self._weights = [each / unit for each in weights]
            self._count = count = count / unit
            self._sum = total = total / unit
            self._sum2 = squares = squares / unit
            self._unit = unit = 1.0
        if rate * (squares * count - total * total) <= _STEADY * total * total:
            return rate  # the answer of `steady`, nearly always
        return steady(rate, count / unit, total / count, squares / count)

    @property
    def weight(self) -> float:
        """The weight of all that is known, in calls, the prior included; at most about `HALF_LIFE` / ln 2."""
        return self._count / self._unit + self._prior_calls

    @property
    def mean(self) -> float:
        self._refresh()
        return self._mean / self._scale

    @property
    def cv(self) -> float:
        """Coefficient of variation: standard deviation over mean."""
        self._refresh()
        return self._cv

    def doc(self, sizes: SizesDoc | None) -> TimesDoc | None:
        """Return what is known, with *sizes*; None: nothing is known."""
        if not self.calls and sizes is None:
            return None
        weights = tuple(self._weights[self._low : self._high + 1])
        sums = (self._count, self._sum, self._sum2)
        return TimesDoc(self.calls, self._unit, sums, self._low if weights else 0, weights, sizes, self.centred)

    @classmethod
    def restored(cls, doc: TimesDoc | None) -> ServiceTimes:
        """Return the times of *doc*; a missing or impossible one gives the initial state."""
        made = cls()
        if doc is None or not doc.weights or doc.calls < 1 or not 1.0 <= doc.unit < inf:
            return made
        last = doc.first + len(doc.weights) - 1
        total = sum(doc.weights)
        if (
            not 0 <= doc.first <= last < _COUNT
            or not all(0.0 <= each < inf for each in (*doc.weights, *doc.sums))
            or not 0.999 * total <= doc.sums[0] <= 1.001 * total
            or not doc.sums[0] > 0.0
        ):
            return made
        made.calls, made._unit, made._low, made._high = doc.calls, doc.unit, doc.first, last
        made._count, made._sum, made._sum2 = doc.sums
        made.centred = doc.centred
        made._weights[doc.first : last + 1] = doc.weights
        return made

    def left(self, ran: float) -> float:
        """
        Return how much longer a call takes on average that has run for *ran*: E[X - ran | X > ran]. Never negative; if
        it has run for longer than all others, `SHARE` of *ran*.
        """
        if self._seen != self.calls:
            self._refresh()
        scale = self._scale
        ran *= scale
        if not ran > 0.0:
            return self._mean / scale
        if ran == inf:
            return inf
        if self._cv < _POINT_CV:
            over = ran - self._mean
            # Once it is late, it grows to `SHARE` over about one bucket.
            return (-over if over <= 0.0 else min(SHARE * ran, over / (RATIO - 1.0))) / scale
        calls, total = self._beyond(ran)
        left = (total - calls * ran + _TAIL_CALLS * SHARE * ran) / (calls + _TAIL_CALLS)
        return left / scale if left > 0.0 else 0.0

    def quantile(self, share: float) -> float:
        """Return the ratio that *share* (0 to 1) of the calls do not exceed."""
        self._refresh()
        return self._quantile(share) / self._scale

    def _quantile(self, share: float) -> float:
        if self._cv < _POINT_CV:
            return self._mean
        missing = share * self._above[0][0]
        for index, calls in enumerate(self._mixed, self._first):
            if calls >= missing and calls > 0.0:
                return _LOWS[index] * float(RATIO ** (missing / calls))
            missing -= calls
        return _LOWS[self._last + 1]

    @property
    def _prior_calls(self) -> float:
        return max(0.0, PRIOR_CALLS - 0.5 * self.calls)

    def _beyond(self, ran: float) -> tuple[float, float]:
        """Return the number of calls that took longer than *ran*, and the sum of their ratios."""
        index, first = _bucket(ran), self._first
        if index < first:
            return self._above[0]
        high = _LOWS[index + 1]
        if index > self._last or ran >= high:
            return 0.0, 0.0
        at = index - first
        calls, total = self._above[at + 1]
        low = _LOWS[index]
        if ran > low:
            low = ran
        per_log = self._mixed[at] / _LOG
        return calls + per_log * log(high / low), total + per_log * (high - low)

    def _refresh(self) -> None:
        if self._seen == self.calls:
            return
        self._seen = self.calls
        prior, unit = self._prior_calls, self._unit
        weight = self.weight
        self._mean = mean = (self._sum / unit + prior) / weight
        self._scale = mean if self.centred and mean > 0.0 else 1.0
        second = (self._sum2 / unit + 2.0 * prior) / weight
        self._cv = sqrt(max(0.0, second / (mean * mean) - 1.0)) if mean > 0.0 else 0.0
        first, last = self._low, self._high
        if prior:
            first, last = min(first, _PRIOR_FIRST), max(last, _PRIOR_LAST)
        mixed = [each / unit for each in self._weights[first : last + 1]]
        if prior:
            for index in range(_PRIOR_FIRST, _PRIOR_LAST + 1):
                mixed[index - first] += prior * _PRIOR[index]
        calls = total = 0.0
        above = [(0.0, 0.0)]
        for index in range(last, first - 1, -1):
            calls += mixed[index - first]
            total += mixed[index - first] * _MEANS[index]
            above.append((calls, total))
        above.reverse()
        self._first, self._last, self._mixed, self._above = first, last, mixed, above


class BySize:
    """
    Service times as a linear function of the request's size, by least squares over the calls with a known size. Old
    calls weigh less, as in `ServiceTimes`. The line is used if it explains enough of the variance.
    """

    __slots__ = ("_least_s", "_line", "_most_s", "_only", "_stale", "_sums", "_unit")

    def __init__(self) -> None:
        self._unit = 1.0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Sums of the weights, and of the weighted sizes x, times y, xx, xy and yy."""
        self._least_s, self._most_s = inf, 0.0
        self._line: tuple[float, float] | None = None
        """Intercept and slope; None: sizes explain too little of the variance."""
        self._stale = False
        self._only = 0.0
        """The size of all calls so far, which explains nothing; -1.0: several, or not known; 0.0: there was no call."""

    def add(self, size: float, service_s: Seconds) -> None:
        if not (0.0 < size < _MAX_SIZE and 0.0 <= service_s < _MAX_S):
            return
        unit = self._unit = self._unit * _GROWTH
        weight, x, y, xx, xy, yy = self._sums
        weighted = unit * size
        self._sums = (
            weight + unit, x + weighted, y + unit * service_s, xx + weighted * size, xy + weighted * service_s,
            yy + unit * service_s * service_s,
        )  # fmt: skip
        if unit > _MAX_UNIT:
            weight, x, y, xx, xy, yy = self._sums
            self._sums = (weight / unit, x / unit, y / unit, xx / unit, xy / unit, yy / unit)
            self._unit = 1.0
        if service_s < self._least_s:
            self._least_s = service_s
        if service_s > self._most_s:
            self._most_s = service_s
        if size != self._only:
            self._only = -1.0 if self._only else size
            self._stale = True

    def predict_s(self, size: float) -> Seconds | None:
        """
        Return the expected time of a call of that size, within a factor of two of the times seen; None: there are too
        few calls, or sizes explain too little of the variance.
        """
        if self._stale:
            self._stale = False
            self._line = self._fit()
        if self._line is None or not 0.0 < size < inf:
            return None
        intercept, slope = self._line
        return on_grid(min(max(intercept + slope * size, self._least_s / 2.0, 1e-6), 2.0 * self._most_s))

    def rate(self, rate: float) -> float:
        """Return *rate* or less; see `steady`."""
        weight, _, y, _, _, yy = self._sums
        return steady(rate, weight / self._unit, y / weight, yy / weight) if weight else rate

    def _fit(self) -> tuple[float, float] | None:
        weight, x, y, xx, xy, yy = self._sums
        if weight < (MIN_SIZED - 0.5) * self._unit:  # half a call for the weight that the first ones lost
            return None
        x = x / weight
        var_x = xx / weight - x * x
        if var_x <= 1e-6 * x * x:
            return None  # sizes that differ by less than a thousandth count as equal: the difference may be rounding
        y = y / weight
        var_y, cov = yy / weight - y * y, xy / weight - x * y
        if var_y <= 1e-9 * y * y or cov * cov < MIN_R2 * var_x * var_y:
            return None
        slope = cov / var_x
        return y - slope * x, slope

    def doc(self) -> SizesDoc | None:
        return SizesDoc(self._unit, *self._sums, self._least_s, self._most_s) if self._sums[0] else None

    @classmethod
    def restored(cls, doc: SizesDoc | None) -> BySize:
        """Return the sums of *doc*; a missing or impossible one gives the initial state."""
        made = cls()
        if doc is not None:
            sums = (doc.weight, doc.x, doc.y, doc.xx, doc.xy, doc.yy)
            if all(0.0 <= each < inf for each in (*sums, doc.least_s, doc.most_s)) and 1.0 <= doc.unit < inf:
                made._unit, made._sums, made._stale, made._only = doc.unit, sums, True, -1.0
                made._least_s, made._most_s = doc.least_s, doc.most_s
        return made


def steady(rate: float, calls: float, mean: float, mean2: float) -> float:
    """
    Return the weight of the newest time in a mean: *rate*, or less if times vary so much that the mean would follow
    each of them; but at least the weight of one call among *calls*.

    :param mean: of *calls* calls; *mean2*: of their squares
    """
    variance = mean2 - mean * mean
    if rate * variance <= _STEADY * mean * mean:
        return rate
    return min(rate, max(1.0 / (calls + 1.0), _STEADY * mean * mean / variance))


def on_grid(seconds: Seconds) -> Seconds:
    """Return *seconds* rounded to 2**-30, about 1 ns: then sums with times of a clock are exact."""
    return seconds + ON_GRID - ON_GRID  # rounds at a third of the cost of `round`; coarser beyond 24 days


def _bucket(ratio: float) -> int:
    if ratio <= _LOWEST:
        return 0
    return min(_COUNT - 1, int(log(ratio) / _LOG + _MIDDLE))
