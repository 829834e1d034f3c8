"""
A model is updated while it is called: what the calls see, and how soon an earlier revision answers again.

    python benchmarks/handover.py [--calls 200] [--rate 10] [--size 500] [--json]

A function with --size MiB of weights sleeps 50 ms in each call, and reads a little of each tensor. It is called --rate
times a second, open loop, on a device with room for one copy and on one with room for two; after a quarter of the
calls, a revision with other weights is deployed, which the platform has had before. Then it is rolled back, and called
until the first revision answers.

Bars: no error; with room for two, no call slower than three times the median; a rollback within a second, where the
weights are in host memory: with room for two.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import httpx
from _platform import platform
from _starts import BODY, MiB, write_layers
from rich.console import Console
from rich.table import Table
from swap import deploy, occupation

from gpufaas_core import local_login

HANDLER: Final = """
import time
from pathlib import Path

from gpufaas_functions.loading import load_weights


def load(device):
    return load_weights(Path(__file__).parent / "weights.safetensors", device)


def handle(model, event, context):
    time.sleep(0.05)
    return [float(each[0, 0]) for each in model.values()]
"""
NAME: Final = "m00"
PATH: Final = f"/function/{NAME}"
SLOWEST, ROLLBACK_S = 3.0, 1.0
"""The bars."""


def handed_over(client: httpx.Client) -> dict[str, Any]:
    """Return what is deployed, once nothing is pending."""
    while True:
        found: dict[str, Any] = client.get(f"/system/function/{NAME}").raise_for_status().json()
        if "pending" not in found["gpufaas"]:
            return found
        time.sleep(0.05)


async def called(url: str, calls: int, rate: float, spec: dict[str, Any]) -> tuple[list[float], list[str], float]:
    """Return the seconds of each call, the errors, and the seconds until PUT was answered."""
    seconds: list[float] = []
    errors: list[str] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, auth=local_login.find(url), timeout=120, limits=limits) as client:
        began = time.perf_counter()
        put = 0.0

        async def call() -> None:
            sent = time.perf_counter()
            answer = await client.post(PATH, content=BODY)
            seconds.append(time.perf_counter() - sent)
            if answer.is_error:
                errors.append(answer.text)

        async def update() -> None:
            nonlocal put
            sent = time.perf_counter()
            (await client.put("/system/functions", json=spec)).raise_for_status()
            put = time.perf_counter() - sent

        async with asyncio.TaskGroup() as group:
            for number in range(calls):
                await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
                group.create_task(call())
                if number == calls // 4:
                    group.create_task(update())
    return seconds, errors, put


def measured(folders: list[Path], memory: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what was seen on a device of *memory* bytes."""
    with platform("--device", f"cpu:0={memory // MiB}MiB") as (url, _, _):  # noqa: SIM117 - the client needs the URL
        with httpx.Client(base_url=url, auth=local_login.find(url), timeout=120) as client:
            specs, answers = [], []
            for folder in folders:
                deploy(url, folder, [NAME], Path(__file__).resolve().parent.parent)
                found = handed_over(client)
                specs.append({"service": NAME, "image": found["image"], "annotations": found["annotations"]})
                answers.append(client.post(PATH, content=BODY).raise_for_status().text)
            assert answers[0] != answers[1], "revisions are told apart by what they answer"
            client.put("/system/functions", json=specs[0]).raise_for_status()
            handed_over(client)
            for _ in range(3):
                client.post(PATH, content=BODY).raise_for_status()
            seconds, errors, put_s = asyncio.run(called(url, options.calls, options.rate, specs[1]))
            handed_over(client)
            assert client.post(PATH, content=BODY).text == answers[1]
            sent = time.perf_counter()
            client.post(f"/system/function/{NAME}/rollback", json={}).raise_for_status()
            while client.post(PATH, content=BODY).raise_for_status().text != answers[0]:
                time.sleep(0.01)
            rollback_s = time.perf_counter() - sent
    middle = statistics.median(seconds)
    return {
        "calls": len(seconds), "errors": len(errors), "first_error": (errors or [""])[0], "p50_ms": 1e3 * middle,
        "slowest_ms": 1e3 * max(seconds), "slowest": max(seconds) / middle, "put_ms": 1e3 * put_s,
        "rollback_s": rollback_s,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--size", type=int, default=500, help="MiB of weights")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpufaas-handover-") as source:
        folders = [Path(source) / "first", Path(source) / "second"]
        for seed, folder in enumerate(folders):
            write_layers(folder / NAME, options.size, width=2048, seed=seed)
            (folder / NAME / "handler.py").write_text(HANDLER)
        copy = occupation(folders[0], Path(__file__).resolve().parent.parent, [])
        found = {f"room for {name}": measured(folders, int(copy * room), options)
                 for name, room in (("one", 1.5), ("two", 2.5))}  # fmt: skip
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        title = f"{options.size} MiB of weights, {options.calls} calls at {options.rate:g}/s across an update"
        table = Table("device", "errors", "p50, ms", "slowest, ms", "x p50", "PUT, ms", "rollback, s", title=title)
        for name, each in found.items():
            table.add_row(
                name, str(each["errors"]), f"{each['p50_ms']:.0f}", f"{each['slowest_ms']:.0f}",
                f"{each['slowest']:.1f}", f"{each['put_ms']:.0f}", f"{each['rollback_s']:.2f}",
            )  # fmt: skip
        Console().print(table)
        for each in found.values():
            if each["errors"]:
                print(each["first_error"])
    two = found["room for two"]
    no_error = not any(each["errors"] for each in found.values())
    return int(not (no_error and two["slowest"] <= SLOWEST and two["rollback_s"] <= ROLLBACK_S))


if __name__ == "__main__":
    raise SystemExit(main())
