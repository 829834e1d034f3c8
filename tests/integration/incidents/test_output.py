"""A function printed short lines in a loop, and the platform served nothing else: no call, no /healthz, no SIGTERM."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.integration.conftest import ECHO, HTTP, LIMIT_S, Platform, until

from gpufaas_gpu_manager.line_limit import PATIENCE_S

PRINTER = """
    import os, threading

    def handle(event, context):
        if event.path == "/flood":
            threading.Thread(target=flood, daemon=True).start()
        return "printing"

    def flood():
        while True:
            os.write(1, b"y\\n" * 1000)
"""


def test_a_printer_without_end_stops_nobody(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    echo, printer = platform.deploy("echo", ECHO, HTTP), platform.deploy("printer", PRINTER, HTTP)
    assert platform.call(echo, b"before").content == b"before"

    assert platform.call(f"{printer}/flood").status_code == 200

    for number in range(20):
        assert platform.http.get("/healthz").status_code == 200
        assert platform.call(echo, b"%d" % number).content == b"%d" % number
        assert platform.call(printer).text == "printing"
    until(lambda: "y" in platform.log("printer").splitlines())
    assert platform.stop() == 0


@pytest.mark.long
def test_the_log_says_how_much_of_a_printer_is_left_out(make_platform: Callable[..., Platform]) -> None:
    platform = make_platform("--device", "cpu:0=400MiB").start()
    printer = platform.deploy("printer", PRINTER, HTTP)
    platform.call(f"{printer}/flood")

    until(lambda: "are left out here" in platform.log("printer"), "what is left out is said", PATIENCE_S + LIMIT_S)

    kept = platform.log("printer").splitlines()
    assert len(kept) < 40_000
    assert sum(file.stat().st_size for file in (platform.data / "logs").iterdir()) < 21 * 1024 * 1024


PROGRESS = """
    import pathlib, sys, time

    def handle(event, context):
        print("\\r10%", end="", flush=True, file=sys.stderr)
        while not pathlib.Path(event.body.decode()).exists():
            time.sleep(0.01)
        print("\\r99%\\r100%", file=sys.stderr)
        return "done"
"""


def test_a_progress_bar_is_in_the_log_while_it_runs(platform: Platform, open_path: Path) -> None:
    bar, gate = platform.deploy("bar", PROGRESS, HTTP), open_path / "gate"
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(platform.call, bar, str(gate).encode())
        try:
            until(lambda: platform.log("bar").endswith("10%"), lambda: platform.log("bar"))
        finally:
            gate.touch()
        assert calling.result().text == "done"

    until(lambda: platform.log("bar").endswith("10%\n100%"), lambda: platform.log("bar"))
