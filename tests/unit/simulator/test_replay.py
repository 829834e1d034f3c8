"""The changes that a replay makes to a workload before it sends it."""

from gpufaas_simulator.replay import at_rate, named
from gpufaas_simulator.synthetic import make_workload


def test_functions_take_the_names_in_turn() -> None:
    workload = make_workload(working_set=5, rpm=50, minutes=1)

    renamed = named(workload, ["red", "blue"])

    assert [each.name for each in renamed.functions] == ["red", "blue"]
    assert list(renamed.calls) == [call % 2 for call in workload.calls]
    assert renamed.functions[1].costs == workload.functions[1].costs


def test_one_name_may_stand_for_several_functions() -> None:
    workload = make_workload(working_set=3, rpm=50, minutes=1)

    renamed = named(workload, ["red", "blue", "red"])

    assert [each.name for each in renamed.functions] == ["red", "blue"]
    assert list(renamed.calls) == [(0, 1, 0)[call] for call in workload.calls]


def test_names_beyond_the_working_set_are_not_used() -> None:
    renamed = named(make_workload(working_set=1, rpm=50, minutes=1), ["red", "blue"])

    assert [each.name for each in renamed.functions] == ["red"]


def test_twice_the_rate_is_half_the_time() -> None:
    workload = make_workload(working_set=3, rpm=50, minutes=1)

    assert list(at_rate(workload, 2.0).times) == [time / 2 for time in workload.times]
    assert at_rate(workload, 1.0) is workload
