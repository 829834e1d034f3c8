"""
How long calls of a function take, as a distribution (docs/adr/0027).

A number says of a call that runs longer that it ends now, for as long as it runs. So beside the mean, which is the
profile's, the *shape* is kept: a histogram of the ratios of what calls took to what was estimated for them, in
logarithmic buckets, by function and kind of device. It decays, and it is mixed with a prior while it has few calls.
Ratios and not seconds: the estimate may follow a mean that drifts, or the size of the request, and the shape stays.

Nothing here raises: a time that no call can have taken (NaN, infinite, negative) is ignored.
"""

from __future__ import annotations

from itertools import pairwise
from math import erf, inf, log, sqrt
from typing import Final

from gpufaas_core.model import Seconds, SizesDoc, TimesDoc

RATIO: Final = 1.25
"""Of a bucket's ends: times are told apart to 12 %. One bucket has 1 in its middle."""

HALF_LIFE: Final = 200
"""Calls: half of the weight is on so many last ones."""

PRIOR_CALLS: Final = 5.0
"""What the prior, a log-normal distribution with cv 1, is worth; half a call less with each that was seen."""

SHARE: Final = 0.5
"""Of the time already run: what is left of a call that has run for longer than any. So it is, on average, with times
whose tail falls with the cube of the time; and it is more than a bucket."""

_TAIL_CALLS: Final = 0.5
"""Of a call that has run for as long as few did, `SHARE` counts as much as so many calls that were seen."""

_POINT_CV: Final = 0.03
"""Below, times are as good as equal: what is left is exactly what is missing, and not that of a bucket."""

_STEADY: Final = 0.15
"""A mean that is followed with a rate of so much over cv^2 varies with a cv of about 0.3 itself, whatever cv is."""

MIN_R2: Final = 0.3
"""Of how times vary, sizes must explain so much, or they are not looked at."""
MIN_SIZED: Final = 8
"""Calls."""
_MAX_SIZE: Final = 1e100
_MAX_S: Final = 1e9

_ON_GRID: Final = 1.5 * 2.0**22
"""Floats of this size are 2**-30 apart."""

_SIDE: Final = 40
"""Buckets below the middle, and above: ratios from 1/7,500 to 7,500. What is beyond is in the last one."""

_COUNT: Final = 2 * _SIDE + 1
_LOG: Final = log(RATIO)
_LOWS: Final[list[float]] = [RATIO ** (index - _SIDE - 0.5) for index in range(_COUNT + 1)]
_LOWEST: Final = _LOWS[0] * RATIO
_HIGHEST: Final = _LOWS[-1] / RATIO
"""Between these, the bucket is what the logarithm says, whatever is rounded."""
_MIDDLE: Final = _SIDE + 0.5
_ABOUT_ONE: Final = 0.9
"""It and its inverse are in the middle bucket."""
_MEANS: Final = [low * (RATIO - 1.0) / _LOG for low in _LOWS]
"""Of times in a bucket, spread evenly over their logarithms."""

_GROWTH: Final = 2.0 ** (1.0 / HALF_LIFE)
"""Of the weight from call to call: in place of all old weights, which would shrink, the new one grows."""
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
    Of one function on devices of one kind. `add` is O(1); after it, the first question is O(buckets), others O(1).
    All that is asked is in units of the estimate: 1 is what was estimated.
    """

    __slots__ = (
        "_above",
        "_count",
        "_cv",
        "_first",
        "_high",
        "_last",
        "_low",
        "_mean",
        "_mixed",
        "_scale",
        "_stale",
        "_sum",
        "_sum2",
        "_unit",
        "_weights",
        "calls",
        "centred",
    )  # fmt: skip

    def __init__(self) -> None:
        self.calls = 0
        """How many were seen, whatever they weigh by now."""
        self.centred = False
        """The estimates follow what is seen. Their mean is the calls', but that of the ratios is larger, the more so
        the fewer calls an estimate came from: so the ratios are taken in units of their mean. Otherwise, where a mean
        is given, what the ratios say of it counts."""
        self._weights = [0.0] * _COUNT
        """By bucket, in units of `_unit`."""
        self._low, self._high = _COUNT, -1
        """The first and the last bucket that have weight."""
        self._unit = 1.0
        """Weight of the newest call."""
        self._count = self._sum = self._sum2 = 0.0
        """Of all weights; of weights times ratios; of weights times squares of ratios."""
        # What follows is found when it is asked for, from what is above and the prior:
        self._stale = True
        self._mean = self._cv = 0.0
        self._scale = 1.0
        """The unit that answers are in, in that of the ratios."""
        self._first = self._last = 0
        """The first and the last bucket of `_mixed`."""
        self._mixed: list[float] = []
        """How many calls are in a bucket."""
        self._above: list[tuple[float, float]] = []
        """From `_first` to behind `_last`: how many calls are in this bucket and those above, and the sum of their
        ratios."""

    def add(self, ratio: float, rate: float = 0.0) -> float:
        """
        A call took *ratio* times what was estimated.

        Return with which weight its time is to go into the mean: *rate*, or less (see `steady`). Each call of any
        function passes here.
        """
        if _ABOUT_ONE < ratio < 1.0 / _ABOUT_ONE:
            index = _SIDE  # so it is nearly always where times vary little, and a logarithm is dear
        elif _LOWEST < ratio < _HIGHEST:
            index = int(log(ratio) / _LOG + _MIDDLE)
        elif 0.0 <= ratio < inf:
            ratio = min(ratio, _HIGHEST)
            index = _bucket(ratio)
        else:
            return rate
        if index < self._low:
            self._low = index
        if index > self._high:
            self._high = index
        unit = self._unit = self._unit * _GROWTH
        weighted = unit * ratio
        self._weights[index] += unit
        self._count = count = self._count + unit
        self._sum = total = self._sum + weighted
        self._sum2 = squares = self._sum2 + weighted * ratio
        self.calls += 1
        self._stale = True
        if unit > _MAX_UNIT:
            self._weights = [each / unit for each in self._weights]
            self._count = count = count / unit
            self._sum = total = total / unit
            self._sum2 = squares = squares / unit
            self._unit = unit = 1.0
        if rate * (squares * count - total * total) <= _STEADY * total * total:
            return rate  # what `steady` would say, and nearly always the answer
        return steady(rate, count / unit, total / count, squares / count)

    @property
    def weight(self) -> float:
        """How many calls what is known is worth, the prior included; at most `HALF_LIFE` / ln 2, nearly."""
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
        """What is known, with what *sizes* say; None: nothing."""
        if not self.calls and sizes is None:
            return None
        weights = tuple(self._weights[self._low : self._high + 1])
        sums = (self._count, self._sum, self._sum2)
        return TimesDoc(self.calls, self._unit, sums, self._low if weights else 0, weights, sizes, self.centred)

    @classmethod
    def restored(cls, doc: TimesDoc | None) -> ServiceTimes:
        """What no calls can have left is as if there were none."""
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
        Return how much longer a call takes on average that has run for *ran*: E[X - ran | X > ran]. Never negative;
        once it has run for longer than any, `SHARE` of *ran*.
        """
        self._refresh()
        return self._left(ran * self._scale) / self._scale

    def _left(self, ran: float) -> float:
        if not ran > 0.0:
            return self._mean
        if ran == inf:
            return inf
        if self._cv < _POINT_CV:
            over = ran - self._mean
            # From the moment on at which it should have ended, by and by, until it is late by a bucket or so.
            return -over if over <= 0.0 else min(SHARE * ran, over / (RATIO - 1.0))
        calls, total = self._beyond(ran)
        return max(0.0, (total - calls * ran + _TAIL_CALLS * SHARE * ran) / (calls + _TAIL_CALLS))

    def quantile(self, share: float) -> float:
        """Return what *share* (0 to 1) of the calls do not exceed."""
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
        """How many calls took longer than *ran*, and the sum of their ratios."""
        index = _bucket(ran)
        if index < self._first:
            return self._above[0]
        if index > self._last or ran >= _LOWS[index + 1]:
            return 0.0, 0.0
        at = index - self._first
        calls, total = self._above[at + 1]
        high, low = _LOWS[index + 1], max(ran, _LOWS[index])
        per_log = self._mixed[at] / _LOG
        return calls + per_log * log(high / low), total + per_log * (high - low)

    def _refresh(self) -> None:
        if not self._stale:
            return
        self._stale = False
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
    Service times as a linear function of the size of a request, by least squares over the calls whose size is known;
    old calls weigh less, as in `ServiceTimes`. The prediction holds where it explains enough of how times vary.
    """

    __slots__ = ("_least_s", "_line", "_most_s", "_stale", "_sums", "_unit")

    def __init__(self) -> None:
        self._unit = 1.0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Weights, and weighted sizes x, times y, xx, xy, yy."""
        self._least_s, self._most_s = inf, 0.0
        self._line: tuple[float, float] | None = None
        """Intercept and slope; None: sizes explain too little."""
        self._stale = False

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
        self._least_s, self._most_s = min(self._least_s, service_s), max(self._most_s, service_s)
        self._stale = True

    def predict_s(self, size: float) -> Seconds | None:
        """
        Return the expected time of a call of that size, within a factor of two of all that were seen; None: too few
        calls, or their sizes say too little.
        """
        if self._stale:
            self._stale = False
            self._line = self._fit()
        if self._line is None or not 0.0 < size < inf:
            return None
        intercept, slope = self._line
        return on_grid(min(max(intercept + slope * size, self._least_s / 2.0, 1e-6), 2.0 * self._most_s))

    def rate(self, rate: float) -> float:
        """See `steady`."""
        weight, _, y, _, _, yy = self._sums
        return steady(rate, weight / self._unit, y / weight, yy / weight) if weight else rate

    def _fit(self) -> tuple[float, float] | None:
        weight, x, y, xx, xy, yy = self._sums
        if weight < (MIN_SIZED - 0.5) * self._unit:  # half a call for what the first ones have lost
            return None
        x, y = x / weight, y / weight
        var_x, var_y, cov = xx / weight - x * x, yy / weight - y * y, xy / weight - x * y
        # Below one in a thousand, sizes are as good as equal, and what they differ by may be rounding.
        if var_x <= 1e-6 * x * x or var_y <= 1e-9 * y * y or cov * cov < MIN_R2 * var_x * var_y:
            return None
        slope = cov / var_x
        return y - slope * x, slope

    def doc(self) -> SizesDoc | None:
        return SizesDoc(self._unit, *self._sums, self._least_s, self._most_s) if self._sums[0] else None

    @classmethod
    def restored(cls, doc: SizesDoc | None) -> BySize:
        """What no calls can have left is as if there were none."""
        made = cls()
        if doc is not None:
            sums = (doc.weight, doc.x, doc.y, doc.xx, doc.xy, doc.yy)
            if all(0.0 <= each < inf for each in (*sums, doc.least_s, doc.most_s)) and 1.0 <= doc.unit < inf:
                made._unit, made._sums, made._stale = doc.unit, sums, True
                made._least_s, made._most_s = doc.least_s, doc.most_s
        return made


def steady(rate: float, calls: float, mean: float, mean2: float) -> float:
    """
    Return with which weight the newest time is to go into a mean: *rate*, or less where times vary so much that the
    mean would follow each of them; but never less than that of one call among those that were seen.

    :param mean: of so many calls; *mean2*, of their squares
    """
    variance = mean2 - mean * mean
    if rate * variance <= _STEADY * mean * mean:
        return rate
    return min(rate, max(1.0 / (calls + 1.0), _STEADY * mean * mean / variance))


def on_grid(seconds: Seconds) -> Seconds:
    """To 1 ns, in a power of two: so sums with times of a clock are exact, whatever the clock shows."""
    return seconds + _ON_GRID - _ON_GRID  # rounds as `round` would, at a third of the cost; beyond 24 days coarser


def _bucket(ratio: float) -> int:
    if ratio <= _LOWEST:
        return 0
    return min(_COUNT - 1, int(log(ratio) / _LOG + _MIDDLE))
