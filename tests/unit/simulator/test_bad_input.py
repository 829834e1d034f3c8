"""An error in a file is one line with file, line and remedy; exit code 2; nothing is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

Run = Callable[..., Result]
Write = Callable[[Any], Path]


def complaint(result: Result) -> str:
    """The only line that was said, without what is before it."""
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("gpufaas: ")


def set_at(content: Any, path: tuple[Any, ...], value: Any) -> None:
    for step in path[:-1]:
        content = content[step]
    content[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("devices",), [], "devices is []: write a list of 1 or more"),
        (("devices", 1, "id"), "g0", "device g0 is there twice: give each an id of its own"),
        (("devices", 1, "memory_mb"), -1, "devices[1].memory_mb is -1: write a number, more than 0, 1e+12 at most"),
        (("devices", 1, "memory_mb"), "8 GB", 'devices[1].memory_mb is "8 GB": write a number'),
        (("devices", 0, "memory"), 8, "unknown key 'memory' in devices[0]: did you mean 'memory_mb'?"),
        (("functions", "g", "load_s"), "long", 'functions.g.load_s is "long": write a number'),
        (("functions", "g", "infer_s"), -0.5, "infer_s is -0.5: write a number, 0 or more"),
        (("functions", "g", "slots"), 0, "slots is 0: write a whole number, 1 or more"),
        (("functions", "g", "occupation_mb"), 9000, "needs 9000 MB but the largest device (g0) has 7800 MB"),
        (("functions", "g"), {"load_s": 3}, "function g: occupation_mb is missing: give occupation_mb, load_s"),
        (("functions", "g"), {}, "function g has no costs: give occupation_mb, load_s and infer_s"),
        (("functions", "g", "kinds"), {"gpu": {"load_s": 1, "infer_s": 1}}, "function g, kind gpu: occupation_mb is"),
        (("functions", "g", "kinds"), {"gpu": {}}, "function g, kind gpu: it has no costs: give occupation_mb, load_s"),
        (("functions", "g", "v100"), {"load_s": 1}, "unknown key 'v100' in functions.g: there are occupation_mb,"),
        (("functions", "g", "sharing"), "half", "sharing is 'half': write one of exclusive, time, spatial"),
        (("functions", "g", "sharing"), "share", "sharing share needs compute: write a whole number from 1 to 100"),
        (("functions", "g", "compute"), 0, "compute is 0: write a whole number, 1 or more, 100 at most"),
        (("functions", "g", "compute"), 101, "compute is 101: write a whole number, 1 or more, 100 at most"),
        (("functions", "g", "compute"), 50, "compute is 50, but a call has the whole device: remove it"),
        (("functions", "g", "uses"), 101, "uses is 101: write a whole number, 0 or more, 100 at most"),
        (("functions", "g", "share"), {"0": 2}, "a key of functions.g.share is wrong: write a whole number, 1"),
        (("functions", "g", "share"), {"101": 2}, "a key of functions.g.share is wrong: write a whole number, 1"),
        (("functions", "g", "share"), {"50": 0}, "functions.g.share.50 is 0: write a number, more than 0"),
        (("functions", "g", "beside"), {"ff": 2}, "there is no function 'ff': did you mean 'f'?"),
        (("functions", "g", "batch"), {"1": 2}, "a key of functions.g.batch is wrong: write a whole number, 2 or more"),
        (("functions", "g", "batch_max"), 0, "batch_max is 0: write a whole number, 1 or more"),
        (("functions", "g", "weight"), 0, "weight is 0: write a number, more than 0"),
        (("functions", "g", "planned"), {"kinds": {"h100": {"load_s": 1}}}, "costs are planned for kind h100, but"),
        (("functions", "g", "planned"), {"load_s": -1}, "planned.load_s is -1: write a number, 0 or more"),
        (("functions", "g", "planned"), {"near": 1}, "unknown key 'near'"),
        (("functions", "g", "planned"), {"beside": {"ff": 2}}, "there is no function 'ff': did you mean 'f'"),
        (("functions", "g", "uses"), {}, "g.uses is {}: write a whole number, 0 or more, 100 at most or an object"),
        (("functions", "g", "uses"), {"4": 101}, "uses.4 is 101: write a whole number, 0 or more, 100 at most"),
        (("functions", "g", "uses"), {"x": 1}, "a key of functions.g.uses is wrong: write a whole number, 1 or more"),
        (("functions", "g", "power"), 0.5, "power is 0.5: write a number, 1 or more"),
        (("devices", 0, "compute"), 60, "function g needs 100 % of a device's compute but no device that it fits"),
        (("devices", 0, "compute"), 0, "compute is 0: write a whole number, 1 or more, 100 at most"),
        (("offers",), [{"kind": "h100"}], "memory_mb is missing in offers[0]: write a number"),
        (("offers",), [{"memory_mb": 10}], "kind is missing in offers[0]: write text"),
        (("offers",), [{"kind": "a", "memory_mb": 1}] * 2, "kind a is offered twice: make it one offer"),
        (("offers",), [{"kind": "a", "memory_mb": 1, "devices": 0}], "devices is 0: write a whole number, 1 or more"),
        (("offers",), [{"kind": "a", "memory_mb": 1, "delay_s": -1}], "delay_s is -1: write a number, 0 or more"),
        (("offers",), [{"kind": "a", "memory_mb": 1, "price_per_h": -1}], "price_per_h is -1: write a number"),
        (("nodes",), {"a": {"price_per_h": -1}}, "price_per_h is -1: write a number, 0 or more"),
        (("arrivals", 3), [10, "ff"], "there is no function 'ff': did you mean 'f'?"),
        (("arrivals", 3), [0.2, "f"], "arrival 3 at 0.2 s is before the one above it (0.5 s): sort them by time"),
        (("arrivals", 0), [-1, "f"], "arrivals[0][0] is -1: write a number, 0 or more"),
        (("arrivals", 3), ["f", 10], 'arrivals[3][0] is "f": write a number'),
        (("arrivals", 3), [10], "arrivals[3] is [10]: write a list of 2 or more"),
        (("arrivals", 3), [10, "f", -1], "arrivals[3][2] is -1: write a number, 0 or more"),
        (("arrivals", 3), [10, "f", None], "arrivals[3][2] is null: write a number"),
        (("arrivals", 3), [10, "f", 1, 2], "arrival 3 is too long: write time, function and at most infer_s"),
        (("changes",), [{"t": 1, "event": "device_leaves", "device": "g7"}], "there is no device 'g7' at that time"),
        (("changes",), [{"t": 1, "event": "node_leaves", "node": "h-1"}], "there is no node 'h-1' at that time"),
        (("changes",), [{"t": 1, "event": "kind_leaves", "kind": "h"}], "no device or offer is of kind 'h': name * or"),
        (("changes",), [{"t": 1, "event": "offer_changes", "kind": "h"}], "kind 'h' is not offered: add it to offers"),
        (("changes",), [{"t": 1, "event": "host_load", "node": "", "compute": 100}], "compute is 100: write a whole"),
        (("changes",), [{"t": 1, "event": "explodes"}], 'changes[0].event is "explodes": write one of device_joins,'),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_line(
    path: tuple[Any, ...], value: Any, said: str, small: dict[str, Any], written: Write, run: Run, tmp_path: Path
) -> None:
    set_at(small, path, value)
    file = written(small)

    result = run("simulate", "--workload", file, "--decisions", tmp_path / "d.jsonl", "--json")

    message = complaint(result)
    assert said in message
    where, line, _ = message.split(":", 2)
    assert where == str(file)
    # The line is that of the value, or within what it is part of.
    lines = file.read_text().splitlines()
    step = path[0]
    assert next(i for i, text in enumerate(lines, 1) if f'"{step}"' in text) <= int(line) <= len(lines)
    assert [each.name for each in tmp_path.iterdir()] == ["w.json"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_true_time_is_a_finite_number(number: str, small: dict[str, Any], written: Write, run: Run) -> None:
    small["arrivals"] = [[0, "f"], [1, "f", "here"]]

    message = complaint(run("simulate", "--workload", written(json.dumps(small).replace('"here"', number))))

    assert "w.json:1: " in message


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--noise", "-1"), "not in the range"),
        (("--noise", "inf"), "not in the range"),
        (("--noise", "1", "--noise-law", "pareto"), "is the index of the Pareto law: give a number above 1"),
        (("--noise", "1", "--noise-law", "bimodal"), "has no parameter: leave --noise out"),
        (("--noise-law", "lognormal"), "needs --noise: give a coefficient of variation"),
        (("--drift", "0"), "not in the range"),
    ],
)
def test_what_noise_cannot_be(args: tuple[str, ...], said: str, run: Run) -> None:
    done = run("simulate", *args)

    assert done.exit_code == 2
    assert said in done.stderr


def test_the_line_is_exact(small: dict[str, Any], written: Write, run: Run) -> None:
    small["arrivals"] = [[0, "f"], [1, "f"], [2, "nobody"], [3, "f"]]
    text = json.dumps(small).replace("[1,", "\n[1,").replace("[2,", "\n\n[2,")

    assert ":4: there is no function 'nobody'" in complaint(run("simulate", "--workload", written(text)))


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "the file is empty"),
        ('{"devices": [],\n "functions": {},\n "arrivals": [}', 3, "this is not JSON"),
        ('{"devices": [],\n "functions": {}', 2, "this is not JSON"),
        ("[]", 1, "the whole is []: write an object"),
        (
            '{"devices": [{"id": "g", "memory_mb": 9}],\n "functions": {"\udce9": {}}, "arrivals": []}',
            2,
            "this is not JSON: it is not UTF-8",
        ),
        (f'{{"devices": [], "functions": {{"f": {"[" * 9999}{"]" * 9999}}}, "arrivals": []}}', 1, "nested too deeply"),
        ('{"devices": [{"id": "g", "memory_mb": 9}]}', 1, "functions is missing: write an object"),
    ],
)
def test_a_file_that_is_no_workload(text: str, line: int, said: str, written: Write, run: Run) -> None:
    message = complaint(run("simulate", "--workload", written(text)))

    assert f"w.json:{line}: " in message
    assert said in message


def test_the_first_of_several_mistakes_is_named(small: dict[str, Any], written: Write, run: Run) -> None:
    small["nodes"] = {"a": {}, "b": {"price_per_h": -1}, "c": {"price_per_h": -2}}
    small["changes"] = [{"t": "soon", "event": "device_leaves", "device": "g0"}]

    assert "nodes.b.price_per_h is -1: " in complaint(run("simulate", "--workload", written(small)))


def test_a_file_that_is_not_there(run: Run, tmp_path: Path) -> None:
    assert "No such file" in complaint(run("simulate", "--workload", tmp_path / "w.json"))
    assert "No such file" in complaint(run("simulate", "--trace", tmp_path / "t.csv"))


HEADER = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\n"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "the file is empty"),
        ("HashOwner,HashApp,Trigger,1,2\n", 1, "column HashFunction is missing"),
        ("HashOwner,HashApp,HashFunction,Trigger\n", 1, "there are no minutes"),
        ("HashOwner,HashApp,HashFunction,Trigger,1,3\n", 1, "minutes must be consecutive numbers, here 2"),
        (HEADER + "o,a,f,http,1,2,3\no,a,g,http,1,-2,3\n", 3, "minute 2 is '-2': write the number of calls, 0 or more"),
        (HEADER + "o,a,f,http,1,many,3\n", 2, "minute 2 is 'many'"),
        (HEADER + "o,a,f,http,1,,3\n", 2, "minute 2 is ''"),
        (HEADER + "o,a,f,http,1,2.5,3\n", 2, "minute 2 is '2.5'"),
        (HEADER + "o,a,f,http,1,2\n", 2, "6 cells where line 1 has 7"),
        (HEADER + "o,a,f,http,0,0,0\n", 1, "no function is called in minutes 1 to 2"),
        (HEADER, 1, "no function is called"),
        (HEADER + "o,a,f,http,1,2,3\n", 1, "only 1 functions are called"),
    ],
)
def test_a_wrong_trace(text: str, line: int, said: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)

    message = complaint(
        run("simulate", "--trace", path, "--minutes", 2, "--working-set", 2, "--decisions", tmp_path / "d")
    )

    assert said in message
    assert message.startswith(f"{path}:{line}: ")
    assert [each.name for each in tmp_path.iterdir()] == ["trace.csv"]


def test_minutes_that_a_trace_does_not_have(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "o,a,f,http,1,2,3\n")

    assert "minutes 1 to 6 are not all there: it has 1 to 3" in complaint(run("simulate", "--trace", path))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--policy", "lalb-o4"), "no policy is called 'lalb-o4': choose one of lb, lalb, lalb-o3"),
        (("--policy", "lb+replacement=fifo"), "no replacement is called 'fifo': choose one of lru, cost-aware"),
        (("--policy", "lb:o3_limit=3"), "lb has no option 'o3_limit': it has none"),
        (("--policy", "lb", "--policy", "lalb", "--decisions", "d.jsonl"), "--decisions is of one run"),
        (("--decisions", "nowhere/d.jsonl"), "there is no directory nowhere: make it first"),
        (("--shape", "poisson", "--trace", "t.csv"), "--trace and --shape both name a workload"),
        (("--as-recorded",), "--as-recorded is about --trace"),
        (("--rpm", "0"), "'--rpm'"),
        (("--working-set", "many"), "'many' is not a valid integer"),
        (("--memory-mb", "1000"), "function f0 needs"),
    ],
)
def test_wrong_options(args: tuple[str, ...], said: str, run: Run) -> None:
    assert said in complaint(run("simulate", "--minutes", 1, *args))
