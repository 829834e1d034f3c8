"""Plans come and go, and policies load, limit and evict, in any order: what holds whatever happens."""

import random

from hypothesis import example, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.scheduler import test_takeover as takeover
from tests.unit.scheduler.world import limited, state_of

from gpufaas_cache_manager.replacement import Lru
from gpufaas_core import messages as m
from gpufaas_core.model import CopyId, DeviceId, FunctionId, Need, Part, PlacementPlan, Replica
from gpufaas_core.owners import OWNERS
from gpufaas_scheduler import policies as c
from gpufaas_scheduler.engine import Engine
from gpufaas_scheduler.policies import make_policy
from gpufaas_scheduler.policies.composite import Composite

NEEDS = (
    Need(100, "auto"), Need(100, "auto", slots=3), Need(100, "auto", slots=2, batch_max=3), Need(40, "auto", slots=2),
    Need(50, "spatial"), Need(30, "spatial", slots=2), Need(100, "time"), Need(), Need(30, "share", slots=2),
)  # fmt: skip


class Acting:
    """A scaling that does what the test tells it, with the copies of any function."""

    name = "acting"
    watches = c.ARRIVAL | c.FINISH | c.LOADED | c.FLEET | c.WAKE | c.PLAN
    owners = OWNERS

    def __init__(self) -> None:
        self.script: tuple[c.Action, ...] = ()

    def plan(self, _view: c.View) -> c.Plan:
        script, self.script = self.script, ()
        for action in script:  # noqa: UP028 - the engine sends it refusals
            yield action


class Site(takeover.Site):
    def __init__(self, policy: str, rng: random.Random) -> None:
        self.acting: list[Acting] = []
        self.quiet = False
        super().__init__(policy, "lru", False, rng, NEEDS)

    def new_engine(self, epoch: int) -> Engine:
        policy, acting = make_policy(limited(self.how[0], 3)), Acting()
        assert isinstance(policy, Composite)
        policy._scaling, policy._owners, policy.plan = acting, set(OWNERS), policy._run
        policy.take = lambda _plan: None  # type: ignore[method-assign]  # nobody carries plans out
        self.acting.append(acting)
        return Engine(policy=policy, replacement=Lru(), epoch=epoch, max_queue=30, learn=False)

    def tell(self, event: m.Event) -> list[m.Command]:
        kept = {copy.id for _, copy in state_of(self.engine).copies.values() if copy.kept is not None}
        script = tuple([self.action() for _ in range(0 if self.quiet else self.rng.choice([0, 0, 1, 3]))])
        for each in self.acting:
            each.script = script
        out = super().tell(event)
        for device in state_of(self.engine).devices.values():
            assert device.reserved >= 0
            assert device.reserved + device.residency.shares <= device.compute, f"{device.id} after {event}"
        victims = {each for command in out for each in _victims(command)}
        if not isinstance(event, m.Planned):
            assert not kept & victims, f"a plan keeps {kept & victims}, evicted at {event}"
        return out

    def action(self) -> c.Action:
        rng, copies = self.rng, sorted(state_of(self.engine).copies) or [CopyId("nobody#0")]
        copy, device = rng.choice(copies), DeviceId(f"n/d{rng.randrange(4)}")
        kind, share = rng.randrange(6), rng.choice([0, 0, 10, 30, 40, 60, 100])
        if kind < 2:
            return c.Load(FunctionId(f"f{rng.randrange(8)}"), (Part(device, 0, share),), beside=rng.random() < 0.2)
        if kind < 4:
            reserve = 0 if share else rng.choice([0, 20, 50, 60, 100])
            return c.Limit(copy, share, rng.randint(1, 3), rng.randint(1, 3), reserve)
        return c.Evict(copy, drain=kind == 5)

    def take_over(self, *, queued: bool) -> None:
        self.quiet = True
        self.tell(m.Woken())  # what follows from the actions of the last run has been done
        self.quiet = False
        super().take_over(queued=queued)

    def step(self, choice: int) -> None:
        if self.rng.random() < 0.1:
            self.number += 1
            replicas = tuple([self.replica() for _ in range(self.rng.randrange(6))])
            self.tell(m.Planned(PlacementPlan(self.number, replicas)))
        super().step(choice)

    def replica(self) -> Replica:
        rng = self.rng
        name = f"f{rng.randrange(9)}"
        need = self.models.get(FunctionId(name), Need())
        share = rng.choice([0, 20, 40, 60]) if need.sharing == "auto" else 0
        reserve = rng.choice([0, 30, 50]) if need.sharing in ("auto", "spatial") and not share else 0
        return Replica(
            name, DeviceId(f"n/d{rng.randrange(5)}"), share, reserve,
            rng.randint(0, need.slots), rng.randint(0, need.batch_max), rng.choice([None, 0.0, 0.5]),
        )  # fmt: skip


def _victims(command: m.Command) -> tuple[CopyId, ...]:
    """Return the copies that are evicted for what *command* begins."""
    if isinstance(command, m.StartCall):
        return command.grant.victims
    return command.victims if isinstance(command, m.LoadCopy) else ()


@examples(60)
@example("lalb", False, 1993, 11, 104)  # a device that is cleared was offered, as its call did not start there yet
@given(takeover.POLICY, st.booleans(), takeover.SEED, takeover.STEPS, takeover.STEPS)
def test_compute_and_memory_are_promised_once_and_a_successor_goes_on_with_the_plan(
    policy: str, queued: bool, seed: int, before: int, after: int
) -> None:
    rng = random.Random(seed)
    site = Site(policy, rng)
    site.populate(rng.randint(1, 4))
    site.steps(before, writes=0.3)

    site.take_over(queued=queued)

    site.steps(after)
