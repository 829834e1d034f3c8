"""The decision what a node keeps in its host memory."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpufaas_cache_manager.host_tier import HALF_LIFE_S, HostTier


def tier(budget: int = 100) -> HostTier[str, int]:
    return HostTier[str, int](budget)


def ask(host: HostTier[str, int], key: str, now: float, size: int = 50, saves_s: float = 1.0) -> list[str] | None:
    host.asked(key, now)
    return host.keep(key, size, saves_s)


def test_what_was_asked_for_more_often_stays() -> None:
    host = tier()
    for now in (0.0, 1.0, 2.0):
        ask(host, "often", now)
    ask(host, "once", 3.0)
    assert ask(host, "new", 4.0) == ["once"]
    assert list(host) == ["often", "new"]


def test_what_saves_little_per_byte_does_not_replace_what_saves_much() -> None:
    host = tier()
    ask(host, "slow disk", 0.0, size=100, saves_s=10.0)
    assert ask(host, "quick disk", 1.0, size=100, saves_s=1.0) is None
    assert list(host) == ["slow disk"]
    assert host.used == 100


def test_what_was_often_wanted_long_ago_gives_way() -> None:
    host = tier(50)
    for _ in range(8):
        ask(host, "old", 0.0)
    assert ask(host, "new", 2 * HALF_LIFE_S) is None
    assert ask(host, "newer", 4 * HALF_LIFE_S) == ["old"]


def test_what_is_mapped_is_no_victim_and_stays_charged_after_it_was_dropped() -> None:
    host = tier(50)
    ask(host, "mapped", 0.0)
    host.map("mapped")
    for now in range(10):
        assert ask(host, "other", float(now)) is None
    assert not host.drop("mapped")
    assert "mapped" not in host
    assert host.used == 50
    assert host.keep("other", 50, 1.0) is None
    assert host.unmap("mapped")
    assert host.used == 0
    assert host.keep("other", 50, 1.0) == []


def test_what_is_set_aside_is_half_of_the_budget_at_most_and_others_give_way_to_it() -> None:
    host = tier(100)
    ask(host, "model", 0.0, size=60)
    assert host.park(7, 40)

    assert not host.set_aside(51)
    assert host.set_aside(50)
    assert host.crowding(0) == [7]
    host.unpark(7)
    assert ask(host, "other", 9.0, size=40, saves_s=9.0) == ["model"]

    assert host.set_aside(-50)
    assert host.used == 40


def test_no_more_files_are_kept_than_a_node_may_have_open() -> None:
    host = HostTier[str, int](100, 2)
    for now, key in enumerate(("once", "twice", "twice")):
        ask(host, key, float(now), size=10)
    assert ask(host, "new", 3.0, size=10) == ["once"]
    assert list(host) == ["twice", "new"]
    host.map("new")
    assert ask(host, "last", 4.0, size=10) is None
    assert host.used == 20


def test_what_was_dropped_and_is_still_mapped_is_taken_back() -> None:
    host = tier(50)
    ask(host, "f", 0.0)
    host.map("f")
    host.drop("f")
    assert ask(host, "f", 1.0) == []
    assert not host.unmap("f")
    assert "f" in host


def test_it_keeps_nothing_larger_than_itself() -> None:
    host = tier()
    ask(host, "f", 0.0)
    assert ask(host, "huge", 1.0, size=101) is None
    assert list(host) == ["f"]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(0, 1e6)), max_size=30), st.floats(0, 1e9))
def test_the_order_does_not_change_with_time(asked: list[tuple[str, float]], later: float) -> None:
    """Weights age alike: all asked for so much later are in the same order."""
    early, late = tier(), tier()
    for key, at in asked:
        early.asked(key, at)
        late.asked(key, at + later)
    worths = [(early.worth(each), late.worth(each) - later / HALF_LIFE_S) for each in "abcd"]
    assert all(abs(first - second) < 1e-3 or first == second for first, second in worths)


class Machine(RuleBasedStateMachine):
    """Against a plain account of what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.host = tier(1000)
        self.sizes: dict[str, int] = {}
        self.mapped: dict[str, int] = {}
        self.dropped: set[str] = set()
        self.now = 0.0

    keys = st.sampled_from("abcdefgh")

    @rule(key=keys, size=st.integers(1, 1200), saves=st.floats(0, 100), later=st.floats(0, 1000))
    def keep(self, key: str, size: int, saves: float, later: float) -> None:
        self.now += later
        self.host.asked(key, self.now)
        before = dict(self.sizes)
        victims = self.host.keep(key, size, saves)
        if victims is None:
            assert key not in before
            assert self.host.used == sum(before.values())
            return
        worth = self.host.worth(key)
        for each in victims:
            assert not self.mapped.get(each)
            assert self.host.worth(each) < worth
            del self.sizes[each]
        self.dropped.discard(key)
        self.sizes.setdefault(key, size)

    @rule(key=keys)
    def map(self, key: str) -> None:
        if key in self.host:
            self.host.map(key)
            self.mapped[key] = self.mapped.get(key, 0) + 1

    @rule(key=keys)
    def unmap(self, key: str) -> None:
        if self.mapped.get(key):
            self.mapped[key] -= 1
            gone = self.host.unmap(key)
            assert gone == (key in self.dropped and not self.mapped[key])
            self._gone(key, gone)

    @rule(key=keys)
    def drop(self, key: str) -> None:
        gone = self.host.drop(key)
        assert gone == (key in self.sizes and not self.mapped.get(key))
        if key in self.sizes:
            self.dropped.add(key)
        self._gone(key, gone)

    def _gone(self, key: str, gone: bool) -> None:
        if gone:
            del self.sizes[key]
            self.dropped.discard(key)

    @invariant()
    def account(self) -> None:
        assert self.host.used == sum(self.sizes.values()) <= self.host.budget
        assert set(self.host) == self.sizes.keys() - self.dropped
        assert all(key in self.sizes for key, count in self.mapped.items() if count)


TestMachine = Machine.TestCase
