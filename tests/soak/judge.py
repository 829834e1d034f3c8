"""What came of each call, held against what it asked and against what was broken meanwhile."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tests.soak.load import CUT, Call, Load

LOADS_S: Final = 3.0
"""A worker that is killed while it loads takes a call with it that came later; so does a fork server."""
_TOLD_S: Final = 0.5
"""The clocks of who kills and who calls are read in different threads, on a busy machine."""
PER_FAULT: Final = 40
"""Calls that one fault may cost: all that run and load, of all functions."""


class Fault(NamedTuple):
    at: float
    what: str
    excuses: bool
    """Calls may fail because of it. A fork server that is only stopped makes no call fail."""


@dataclass(slots=True)
class Verdict:
    answered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """Of each function: honestly, by a fault or of themselves (`hog`), or else `wrong` has them."""
    excused: int = 0
    """Calls that failed by a fault."""
    given_up: int = 0
    again: int = 0
    """Asynchronous calls that were executed more than once, as is documented."""
    wrong: list[str] = field(default_factory=list)
    """What must not be; empty: all is well."""


def judge(load: Load, executed: Counter[str], faults: Sequence[Fault]) -> Verdict:
    """:param executed: how often the call of each id was"""
    verdict = Verdict(wrong=[f"a callback of no call: {each}" for each in load.strange[:5]])
    killed = [each for each in faults if each.excuses]
    for call in load.calls:
        what = _fault_of(call, executed, killed, verdict)
        if what:
            verdict.wrong.append(
                f"{call.function} {call.id} ({call.service_s:.2f} s, took {call.ended - call.began:.2f} s): {what}"
            )
    if verdict.excused > PER_FAULT * len(killed):
        verdict.wrong.append(f"{verdict.excused} calls failed of {len(killed)} faults")
    return verdict


def _fault_of(call: Call, executed: Counter[str], killed: Iterable[Fault], verdict: Verdict) -> str:
    """Return what is wrong with *call*; empty: nothing. Counts it in *verdict*."""
    count = executed[call.id]
    over = max(call.ended, call.called_back)
    hurt = any(call.began - LOADS_S <= each.at <= over + _TOLD_S for each in killed)
    if call.gave_up:
        verdict.given_up += 1
        return f"given up, and executed {count} times" if count > 1 else ""
    if call.status == -1:
        return f"nothing came of it; executed {count} times"
    if call.status in (200, 202):
        verdict.answered[call.function] += 1
        if call.kind == "async":
            verdict.again += count > 1
            return _fault_of_async(call, count, hurt)
        if call.what == "hog":
            return "it took 4 GB and was answered"
        return _fault_of_answer(call, call.text) if count == 1 else f"answered, and executed {count} times"
    verdict.failed[call.function] += 1
    if count > 1:
        return f"failed with {call.status}, and executed {count} times"
    if call.what == "hog" and call.status in (500, 502, 507) and "memory" in call.text:
        return ""
    allowed = {502, CUT} | ({500} if call.kind == "nested" else set())
    if call.status in allowed and hurt and call.text.strip():
        verdict.excused += 1
        return ""
    return f"failed with {call.status}: {call.text[:300]}"


def _fault_of_async(call: Call, count: int, hurt: bool) -> str:
    if not call.callbacks:
        return f"accepted as {call.call_id}, but never called back; executed {count} times"
    if not count:
        return f"called back {call.callbacks}, but never executed"
    if {(status, id_) for status, id_, _ in call.callbacks} != {("200", call.call_id)}:
        return f"its callbacks are {call.callbacks}"
    if count > 1 and not hurt:
        return f"executed {count} times"
    return _fault_of_answer(call, call.callbacks[0][2])


def _fault_of_answer(call: Call, text: str) -> str:
    head, _, rest = text.partition("\n")
    version, id_, *inner = head.split()
    if id_ != call.id:
        return f"it got the answer of another call: {text[:200]!r}"
    if call.kind != "async" and not call.oldest <= int(version) <= call.newest:
        return f"version {version} answered, of {call.oldest} to {call.newest}"
    if inner != ([f"{id_}.cpu", f"{id_}.model-a"] if call.kind == "nested" else []):
        return f"its inner calls answered {inner}"
    if call.kind == "large" and rest != f"{id_} " * (65536 // (len(id_) + 1)) * int(call.what):
        return f"{len(rest)} bytes of a large answer, and not its own"
    return ""
