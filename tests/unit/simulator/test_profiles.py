"""Workload files as the profiles of emulated devices."""

from pathlib import Path

import pytest

from gpufaas_core.cost import Cost
from gpufaas_simulator.explicit import read_costs
from gpufaas_simulator.workload import BadWorkload

FUNCTIONS = """{"functions": {
  "resnet": {"occupation_mb": 1000, "load_s": 2, "infer_s": 0.1, "beside": {"vgg": 1.2}, "sharing": "spatial",
             "compute": 50, "kinds": {"t4": {"occupation_mb": 900, "load_s": 3, "infer_s": 0.3}}},
  "vgg": {"occupation_mb": 500, "load_s": 1, "infer_s": %s}
}}"""


def test_the_functions_of_a_workload_file_are_a_profile_also_without_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(FUNCTIONS % "0.2")

    assert read_costs(file) == {
        "resnet": {"*": Cost(1_000_000_000, 2.0, 0.1, beside={"vgg": 1.2}), "t4": Cost(900_000_000, 3.0, 0.3)},
        "vgg": {"*": Cost(500_000_000, 1.0, 0.2)},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (FUNCTIONS % "-1", r"costs.json:4: functions.vgg.infer_s is -1: write a number, 0 or more"),
        (
            FUNCTIONS.replace('"vgg": 1.2', '"vg": 1.2') % "1",
            r"costs.json:2: function resnet: there is no function 'vg': did you mean 'vgg'",
        ),
        ('{"functions": {}}', r"costs.json:1: functions is {}: write an object that is not empty"),
        ("{}", r"costs.json:1: functions is missing"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)

    with pytest.raises(BadWorkload, match=says):
        read_costs(file)
