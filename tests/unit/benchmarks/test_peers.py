"""What benchmarks/peers.py makes of its rounds: ratios, bars, tables; and what a peer that cannot be had is."""

from pathlib import Path
from typing import Any

import pytest


def row(rps: float, *, p50: float = 1.0, p99: float = 1.1, cpu: float = 50.0, first: float = 30.0) -> dict[str, float]:
    return {
        "requests": rps, "rps": rps, "p50_ms": p50, "p99_ms": p99, "errors": 0, "cpu_us": cpu, "first_us": first,
        "foreign": 0.1,
    }  # fmt: skip


def report() -> Any:
    from _peer_report import Cell, Report

    made = Report(rounds=3, seconds=1, machine="a machine")
    for mine, other in ((300, 100), (200, 100), (160, 100)):
        made.add(Cell("mosec", "echo", 16), row(mine), row(other))
    made.not_run["ray"] = "no such package"
    return made


def test_the_ratio_is_the_median_of_the_rounds_and_not_that_of_the_medians() -> None:
    from _peer_report import Cell

    made = report()
    made.add(Cell("mosec", "echo", 16), row(1000), row(900))  # a quick moment for both

    assert made.times(Cell("mosec", "echo", 16)) == pytest.approx(1.8)


def test_a_bar_is_met_missed_or_not_judged() -> None:
    from _peer_report import Cell, bars

    made = report()
    made.add(Cell("mosec", "echo", 64), row(140), row(100))

    verdicts = {each.text: each.verdict for each in bars(made)}

    assert verdicts["echo at 16 connections: times mosec 0.9.8: 2.00 (at least 1.5)"] == "met"
    assert verdicts["echo at 64 connections: times mosec 0.9.8: 1.40 (at least 1.5)"] == "MISSED"
    assert verdicts["echo at 1 connections: times mosec 0.9.8 (at least 1.15)"] == "not judged"
    assert verdicts["echo at 16 connections: µs of CPU a call: 50 (at most 55)"] == "met"


def test_a_convnet_is_judged_by_what_two_processes_did_in_the_same_round() -> None:
    from _peer_report import Cell, bars

    made = report()
    for ceiling, rate in ((100.0, 99.0), (200.0, 198.0)):
        made.ceiling(ceiling)
        made.add(Cell("mosec", "convnet", 16), row(rate, p99=2.0, first=150), row(90))

    found = {each.text: each.met for each in bars(made)}

    assert found["convnet at 16: share of two processes without a server: 0.99 (at least 0.98)"] is True
    assert found["convnet at 16: p99 / p50: 2.00 (at most 1.2)"] is False
    assert found["convnet at 16: µs of the gateway's process a call: 150 (at most 200)"] is True


def test_a_peer_that_was_not_run_has_its_reason_and_no_figures() -> None:
    from _peer_report import rendered, short

    lines = {line[0]: line[1:] for line in short(report())}

    assert lines["Ray Serve 2.60.0"][0] == "not run: no such package"
    assert not any(lines["Ray Serve 2.60.0"][1:])
    assert lines["mosec 0.9.8"][1] == "100"
    assert [line[0] for line in rendered(report())] == ["this platform", "mosec 0.9.8"]


def test_the_table_takes_the_place_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import _peer_report

    monkeypatch.setattr(_peer_report, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/performance.md"):
        part = "<!-- begin benchmarks/peers.py -->\n\nold\n\n<!-- end benchmarks/peers.py -->"
        (tmp_path / name).write_text(f"# Before\n\n{part}\n\n# After\n")

    _peer_report.write(report())

    readme, whole = ((tmp_path / name).read_text() for name in ("README.md", "docs/performance.md"))
    for text in (readme, whole):
        assert text.startswith("# Before")
        assert text.endswith("# After\n")
        assert "old" not in text
        assert "Ray Serve 2.60.0" in text
        assert "no such package" in text
    assert "| mosec 0.9.8 | echo | 16 | 100 |" in whole
    assert "- met: echo at 16 connections: times mosec 0.9.8: 2.00 (at least 1.5)" in whole


@pytest.mark.slow  # it makes an environment
def test_a_package_that_cannot_be_had_is_a_peer_that_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from _servers import NotRun, python_of

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")

    with pytest.raises(NotRun, match="No matching distribution found for no-such-server"):
        python_of(("no-such-server==1.0",))
    assert not list(tmp_path.rglob("ready")), "what was half made is not taken for an environment"
