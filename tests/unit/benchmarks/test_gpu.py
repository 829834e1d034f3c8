"""The benchmark for a machine with a GPU: what fails or has no time is marked, and costs nothing else."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # torch is imported
SECTIONS = ("transfers", "starts", "storm", "together", "profiles", "tests")


def test_a_section_that_fails_is_marked_and_the_others_are_in_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu

    def no_kernel(*_: object) -> object:
        raise RuntimeError("CUDA error: no kernel image [for] these bytes")

    for name in SECTIONS:
        monkeypatch.setattr(gpu, name, lambda *_: {"said": "done"})
    monkeypatch.setattr(gpu, "starts", no_kernel)
    out = tmp_path / "bundle.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--out", str(out)])

    gpu.main()

    bundle = json.loads(out.read_text())
    assert "CUDA error: no kernel image [for] these bytes" in bundle["starts"]["not run"]
    assert "no_kernel" in bundle["starts"]["traceback"]
    assert [bundle[name] for name in ("transfer", "storm", "together", "profiles", "tests")] == [{"said": "done"}] * 5
    assert "starts: {" in capsys.readouterr().out


def test_what_no_time_is_left_for_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu

    for name in SECTIONS:
        monkeypatch.setattr(gpu, name, lambda *_: {"said": "done"})
    out = tmp_path / "bundle.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--minutes", "0.4", "--out", str(out)])

    gpu.main()

    bundle = json.loads(out.read_text())
    assert bundle["transfer"] == {"said": "done"}
    assert bundle["starts"] == bundle["tests"] == {"not run": "out of time"}
