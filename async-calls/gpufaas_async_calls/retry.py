"""
When an asynchronous call is tried again: decisions as values, without clock or IO.

The rules are those of OpenFaaS's queue worker. An answer of the platform is tried again, an answer of
the function only if its status is among the policy's codes. Waits double, with full jitter; ``Retry-After`` replaces
the wait, but not below the minimum.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, TypeAlias

from gpufaas_core.errors import InvalidSpec
from gpufaas_core.units import Seconds, parse_duration

PREFIX: Final = "com.openfaas.retry."
_MAX_ATTEMPTS: Final = 1000
_MAX_WAIT_S: Final[Seconds] = 86_400.0
_MAX_RETRY_AFTER_S: Final[Seconds] = 3600.0
"""A function that asks for a longer wait is tried again after this one."""
_HOPELESS: Final = frozenset((400, 405, 413, 422))
"""Answers of the platform after which a repetition is in vain: it would refuse the same request again."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    attempts: int = 10
    """Executions in all; the first one counts."""
    codes: frozenset[int] = frozenset((408, 429, 500, 502, 504))
    """Statuses of the function that are tried again."""
    min_wait_s: Seconds = 10.0
    max_wait_s: Seconds = 120.0


WHILE_MISSING: Final = RetryPolicy(min_wait_s=1.0)
"""For calls of a function that is not deployed: one that is being replaced (DELETE, then POST) is back in seconds."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    wait_s: Seconds
    attempts: int
    """Executions that count, so far."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


Decision: TypeAlias = TryAgain | GiveUp | None
"""None: the answer counts."""


def read_policy(annotations: Mapping[str, str] | None) -> RetryPolicy:
    """Return what the annotations ask for. As with OpenFaaS, a malformed value falls back to the default."""
    default = RetryPolicy()
    given = {name[len(PREFIX) :]: text for name, text in (annotations or {}).items() if name.startswith(PREFIX)}
    attempts = _whole(given.get("attempts", ""))
    codes = [_whole(code) for code in given.get("codes", "").split(",")]
    min_wait_s = _duration(given.get("min_wait", ""), default.min_wait_s)
    return RetryPolicy(
        attempts=default.attempts if attempts is None else min(max(1, attempts), _MAX_ATTEMPTS),
        codes=frozenset(code for code in codes if code is not None)
        if all(code is not None and 100 <= code <= 599 for code in codes)
        else default.codes,
        min_wait_s=min_wait_s,
        max_wait_s=max(min_wait_s, _duration(given.get("max_wait", ""), default.max_wait_s)),
    )


def backoff_s(attempt: int, min_wait_s: Seconds, max_wait_s: Seconds, rng: random.Random) -> Seconds:
    """
    Return how long to wait after *attempt* (1 is the first) failed: up to *min_wait_s* doubled each time, at most
    *max_wait_s*, uniformly from 0. Full jitter: calls that failed together do not come back together.
    """
    # Beyond 64 doublings every wait is the longest one, and a float would overflow.
    return rng.uniform(0.0, min(max_wait_s, min_wait_s * 2.0 ** min(attempt - 1, 64)))


def decide(
    policy: RetryPolicy, status: int, internal: bool, retry_after_s: Seconds | None, attempts: int, rng: random.Random
) -> Decision:
    """
    Return what follows an execution that was answered *status*.

    :param internal: the platform answered, not the function
    :param attempts: executions that counted before this one
    """
    if internal and status in _HOPELESS:
        return GiveUp("the platform refuses the request, and would again")
    if not internal and status not in policy.codes:
        return None
    if not (internal and status == 429):  # its queue was full: nothing was tried
        attempts += 1
        if attempts >= policy.attempts:
            return GiveUp(f"the last of {policy.attempts} attempts failed")
    if retry_after_s is not None and status in (429, 503):
        wait_s = max(policy.min_wait_s, min(retry_after_s, _MAX_RETRY_AFTER_S))
    else:
        wait_s = backoff_s(max(1, attempts), policy.min_wait_s, policy.max_wait_s, rng)
    return TryAgain(wait_s, attempts)


def parse_retry_after(text: str, now: float) -> Seconds | None:
    """Return the seconds that a ``Retry-After`` means, as a number or an HTTP date; None if it means nothing."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.fromtimestamp(now, UTC)).total_seconds())


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _duration(text: str, otherwise: Seconds) -> Seconds:
    try:
        return min(parse_duration(text), _MAX_WAIT_S)
    except InvalidSpec:
        return otherwise
