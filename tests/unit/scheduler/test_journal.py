"""A journal replays to the same commands, so that an operator can examine what happened."""

import random
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from tests.unit.scheduler.world import limited

from gpufaas_core import messages as m
from gpufaas_core.errors import InvalidSpec
from gpufaas_core.model import CallId, Device, DeviceId, Function, FunctionId, Need, Profile
from gpufaas_core.snapshot import CallDoc, DeviceSnapshot, EngineDoc, ResidentSnapshot
from gpufaas_scheduler.journal import Header, Journal, replay
from gpufaas_scheduler.policies import policy_spec


@pytest.mark.parametrize("policy", ["lb", "lalb", "lalb-o3"])
def test_a_recorded_run_replays_to_identical_commands(tmp_path: Path, policy: str) -> None:
    header = Header(policy=policy_spec(f"{limited(policy, 3)}+replacement=cost-aware"), epoch=7, max_queue=50)
    path = tmp_path / "journal"
    with closing(Journal(path, header)) as journal:
        recorded = record(header, journal, random.Random(5))

    replayed = [commands for _, commands in replay(path)]

    assert replayed == recorded
    assert sum(map(len, recorded)) > 500


def test_a_line_that_a_crash_tore_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with closing(Journal(path, Header())) as journal:
        journal.append(m.Woken(), 1.0)
        journal.append(m.Woken(), 2.0)
    path.write_bytes(path.read_bytes()[:-3])

    assert len(list(replay(path))) == 1


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("what is this\n")

    with pytest.raises(InvalidSpec, match="no journal"):
        list(replay(path))


@pytest.mark.parametrize("header", [
    '{"policy": "lb", "version": 1}', '{"policy": "lalb-o3", "o3_limit": 3, "version": 3}', '{"version": 99}',
])  # fmt: skip
def test_a_journal_of_another_version_is_refused(tmp_path: Path, header: str) -> None:
    """Their events would give other commands than they gave."""
    path = tmp_path / "journal"
    path.write_text(f"{header}\n")
    version = msgspec.json.decode(header)["version"]

    with pytest.raises(InvalidSpec, match=f"version {version}, this program reads version 5: replay it with the rel"):
        list(replay(path))


def test_a_takeover_is_replayed_too(tmp_path: Path) -> None:
    """What an engine was restored from are events as all others."""
    device = Device(DeviceId("n/d"), "cpu", 10)
    f = FunctionId("f")
    path = tmp_path / "journal"
    with closing(Journal(path, Header())) as journal:
        journal.append(m.FunctionDeployed(Function(f, "", profiles={"*": Profile(1.0, 1.0, 1)})), 0.0)
        waiting = (CallDoc(CallId("c"), f, 3, 1.0),)
        journal.append(m.Restored(EngineDoc("least-wait", 7, 4, waiting=waiting), queued=True), 0.0)
        journal.append(m.DeviceJoined(device, DeviceSnapshot(device, (ResidentSnapshot(f, "", 1),))), 0.5)
        journal.append(m.Serving(), 1.0)
        journal.append(m.DeviceJoined(Device(DeviceId("n/e"), "cpu", 10)), 2.0)

    commands = [each for _, given in replay(path) for each in given]

    assert [each.grant.number for each in commands if isinstance(each, m.StartCall)] == [8]


def test_a_journal_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path, Header()).close()

    with pytest.raises(FileExistsError):
        Journal(path, Header())


def record(header: Header, journal: Journal, rng: random.Random) -> list[list[m.Command]]:
    """A run with learning, times that are no round numbers, refusals and failures."""
    engine = header.engine()
    recorded: list[list[m.Command]] = []
    running: list[m.Grant] = []
    now = 0.0

    def tell(event: m.Event) -> None:
        journal.append(event, now)
        commands = engine.handle(event, now)
        recorded.append(commands)
        running.extend(command.grant for command in commands if isinstance(command, m.StartCall))

    for number in range(3):
        tell(m.DeviceJoined(Device(DeviceId(f"d{number}"), "gpu", 8 << 30)))
    for number in range(10):
        profile = Profile(rng.uniform(1, 4), rng.uniform(0.5, 2), rng.randint(1, 4) << 30)
        queued = number % 3 > 0
        tell(
            m.FunctionDeployed(
                Function(
                    FunctionId(f"f{number}"), "", Need() if queued else Need(0, slots=2), {"*": profile}, number % 2
                )
            )
        )
    tell(m.Scaled(FunctionId("f3"), 5))
    for number in range(600):
        now += rng.expovariate(1.0)
        tell(m.Arrived(CallId(f"c{number}"), FunctionId(f"f{rng.randrange(10)}"), now + rng.uniform(5, 50)))
        if running and rng.random() < 0.9:
            grant = running.pop(rng.randrange(len(running)))
            kind = rng.random()
            if kind < 0.05:
                tell(m.NodeRefused(grant.call, grant.device, "no"))
            elif grant.cold and kind < 0.1:
                tell(m.CopyFailed(grant.function, grant.device, "broken", True, grant.copy))
            else:
                if grant.cold:
                    tell(m.Loaded(grant.function, grant.device, rng.uniform(1, 4), 1 << 30, grant.copy))
                    tell(m.Measured(grant.function, grant.device, rng.randint(1 << 29, 4 << 30), grant.copy))
                tell(m.Finished(grant.call, grant.device, rng.uniform(0.5, 2)))
        if (wake_at := engine.wake_at) is not None and wake_at <= now:
            tell(m.Woken())
    return recorded
