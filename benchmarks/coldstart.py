"""
Cold starts on a CPU device by tier and phase: what the platform adds to loading a model by hand.

    python benchmarks/coldstart.py [--rounds 5] [--threads 1] [--model NAME]... [--park] [--json [FILE]] [--write]
    python benchmarks/coldstart.py --base TREE [--rounds 9] [--model NAME]... [--json [FILE]]
    python benchmarks/coldstart.py --isolation none,best [--rounds 20] [--model NAME]...

By hand: a process that has torch imported maps the same safetensors, builds the model on meta, assigns the weights and
runs the first inference (a fresh fork of that process each time). The platform: one HTTP request for a model that is
not in the device's memory, until its answer. Before each, a call of `filler`, which takes the whole device, evicts it:
the request evicts that, and the filler's own ``room`` phase is how long the model's memory took to be free.

Each round starts each model by hand and on each platform, with its weights in the page cache and after
posix_fadvise(DONTNEED) on all their files, and calls it once more (a hit). The tier is what the platform says. Beside
the platform as it is: without standby workers and without a host tier, where it has them, or, with --park, one that
parks what it evicts. Each round also evicts a model that has written 1 GiB of private memory, which no other process
keeps. --write puts the table into docs/performance.md, and its lines about the platform as it is into README.md. The
bars are judged at the end; with a missed one it exits with 1.

--base: starts beside those of another working tree's platform (`_base.py`), none by hand: wall time until the answer,
its phases, and the processor time of the platform and all its descendants from the request until a second after the
answer, in which a new standby is made. `--model echo`, a function without a model, is measured only so.

--isolation: starts under two levels, in turn. The second may take 1.10 times as long as the first, by the medians.
"""

import argparse
import contextlib
import functools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from _base import measure, options_of, pairs_of
from _document import table, write_part
from _pairs import CPU, Row, write_json
from _platform import ROOT, gpufaas, platform, serves_with
from _servers import Tree
from _starts import (
    BODY,
    ByHand,
    MiB,
    beyond_load_and_run,
    by_hand,
    into_page_cache,
    out_of_page_cache,
    phases,
    write_layers,
)
from rich.console import Console
from rich.table import Table

from gpufaas_core import local_login

MODELS: Final = ("resnet50", "vgg16", "layers-1gib")
ECHO: Final = "echo"
TIERS: Final = ("hit", "parked", "host", "peer", "disk", "store")
DEVICE_MIB, FILLER_MIB = 1700, 1600
SETTLE_S = 1.0
"""Before each start: what others do off the path (staging, standby workers, the kernel after much was read) is done."""
STARTS: Final = 4
"""Of each platform in a round that compares two."""
BASE_LIMIT: Final = 1.05
LEVEL_LIMIT: Final = 1.10
FILLER: Final = f"""
import mmap


def load(device):
    return mmap.mmap(-1, {(FILLER_MIB - 60) * MiB}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def handle(model, event, context):
    return "full"
"""
PRIVATE: Final = "private-1gib"
HOLDER: Final = """
import torch


def load(device):
    return [torch.ones(2**22) for _ in range(64)]


def handle(model, event, context):
    return len(model)
"""
RATIO, PROCESS_S, FREED_S = 1.3, 0.015, 0.1
"""The bars: of a start from the host tier, as a multiple of that by hand; of its process, with a standby; of 1 GiB."""
VARIANTS: Final = (("without standby", "--standby"), ("without host tier", "--host-cache"))
Times = dict[str, float]


@dataclass(frozen=True)
class Served:
    """One platform."""

    name: str
    client: httpx.Client
    home: Path
    processes: Tree | None = None

    def weights(self, path: Path) -> list[Path]:
        """Return the files that the platform may read the weights in the file *path* from, each under one name."""
        size = path.stat().st_size
        files = [each for each in (self.home / "data").rglob("*") if each.is_file() and each.stat().st_size == size]
        return list({each.stat().st_ino: each for each in files}.values())


def write_functions(home: Path, models: tuple[str, ...], threads: int) -> None:
    shutil.copytree(ROOT / "functions" / "examples", home / "src", ignore=shutil.ignore_patterns("build"))
    functions: dict[str, Any] = {}
    langs = {ECHO: "python3-http"}
    for name, memory in (*((model, DEVICE_MIB - 100) for model in (*models, PRIVATE)), ("filler", FILLER_MIB)):
        functions[name] = {
            "lang": langs.get(name, "python3-torch"), "handler": f"./{name}", "image": f"{name}:latest",
            "annotations": {"gpufaas.memory": f"{memory}MiB"},
        }  # fmt: skip
    for name, handler in (("filler", FILLER), (PRIVATE, HOLDER)):
        (home / "src" / name).mkdir()
        (home / "src" / name / "handler.py").write_text(handler)
    if MODELS[2] in models:
        write_layers(home / "src" / MODELS[2], 1024, width=4096)
    for model in (each for each in models if each != ECHO):
        handler = home / "src" / model / "handler.py"
        handler.write_text(f"import torch\n\ntorch.set_num_threads({threads})\n" + handler.read_text())
    stack = {
        "version": "1.0", "provider": {"name": "openfaas"}, "configuration": {"copy": ["./common"]},
        "functions": functions,
    }  # fmt: skip
    (home / "src" / "stack.yaml").write_text(json.dumps(stack))


@contextlib.contextmanager
def serve(name: str, tree: Path, options: list[str], models: tuple[str, ...], threads: int) -> Iterator[Served]:
    with (
        platform("--device", f"cpu:0={DEVICE_MIB}MiB", *options, tree=tree) as (url, child, home),
        httpx.Client(base_url=url, auth=local_login.find(url), timeout=120) as client,
    ):
        write_functions(home, models, threads)
        gpufaas(url, "up", cwd=home / "src", tree=tree)
        yield Served(name, client, home, Tree(child.pid))


def called(served: Served, model: str, expected: object = None) -> tuple[Times, str]:
    """Call *model*; return its times in seconds, and how the platform says that it was started."""
    began = time.perf_counter()
    response = served.client.post(f"/function/{model}", content=BODY)
    took = time.perf_counter() - began
    assert response.status_code == 200, response.text
    assert expected in (None, response.json()), "the answers differ"
    by_phase = phases(response)
    times = {"took": took, "beyond": beyond_load_and_run(took, by_phase), **by_phase}
    return times, response.headers["x-gpufaas-start"]


def evict(served: Served) -> float:
    """Fill the device; return the seconds until the memory of what was there was free."""
    response = served.client.post("/function/filler", content=b"")
    assert response.status_code == 200, response.text
    return phases(response).get("room", 0.0)


def started(served: Served, model: str) -> Row:
    """
    Start *model* with nothing in its way; return what that took, and the processor time.

    Nothing ends meanwhile: the kernel counts that of processes that have ended by ticks, as long as half a start.
    """
    none = {"serviceName": model, "replicas": 0}
    served.client.post(f"/system/scale-function/{model}", json=none).raise_for_status()
    time.sleep(SETTLE_S)
    before = served.processes.cpu_s()[0]
    times, tier = called(served, model)
    time.sleep(SETTLE_S)
    assert tier != "hit", f"{model} was still there"
    cpu_us = 1e6 * (served.processes.cpu_s()[0] - before)
    return {CPU: cpu_us, **{f"{name} ms": 1e3 * seconds for name, seconds in times.items()}}


class Rounds:
    """What was measured: the times of each round, by model, platform and case."""

    def __init__(self) -> None:
        self.private: dict[str, list[float]] = {}
        """By platform: how long 1 GiB of private memory took to be free."""
        self.rows: dict[tuple[str, str, str], list[Times]] = {}
        self.tiers: dict[tuple[str, str, str], str] = {}
        self.still_cached = 0.0

    def add(self, model: str, name: str, case: str, times: Times, tier: str) -> None:
        self.rows.setdefault((model, name, case), []).append(times)
        self.tiers[model, name, case] = tier

    def one(self, hand: ByHand, platforms: list[Served], model: str, *, keep: bool = True) -> None:
        """Start *model* by hand and on each platform, with its weights in the page cache and without."""
        folder = next(
            each.parent for each in (platforms[0].home / "src" / "build" / model).rglob("weights.safetensors")
        )
        into_page_cache([folder / "weights.safetensors"])
        time.sleep(SETTLE_S)
        quick, expected = hand.start(folder)
        self._drop([folder / "weights.safetensors"])
        time.sleep(SETTLE_S)
        slow = hand.start(folder)[0]
        into_page_cache(
            [folder / "weights.safetensors"]
        )  # long before its next start: what follows such reading is slow
        for served in platforms:
            for case, reference in (("page cache", quick), ("no page cache", slow)):
                freed = evict(served)
                if case == "no page cache":
                    self._drop(served.weights(folder / "weights.safetensors"))
                else:
                    into_page_cache(served.weights(folder / "weights.safetensors"))
                time.sleep(SETTLE_S)
                times, tier = called(served, model, expected)
                assert tier != "hit", f"{model} was still there"
                if keep:
                    more = {"by hand": quick["all"], "ratio": times["took"] / quick["all"], "freed": freed}
                    self.add(model, served.name, case, {**times, **more, "by hand so": reference["all"]}, tier)
            times, tier = called(served, model, expected)
            if keep and served is platforms[0]:
                warm = {"by hand": quick["again"], "by hand so": quick["again"], "freed": 0.0}
                self.add(model, served.name, "warm", {**times, **warm, "ratio": times["took"] / quick["again"]}, tier)
            into_page_cache(served.weights(folder / "weights.safetensors"))

    def free(self, served: Served) -> None:
        """Let a model take 1 GiB of private memory, and evict it."""
        evict(served)
        served.client.post(f"/function/{PRIVATE}", content=b"").raise_for_status()
        self.private.setdefault(served.name, []).append(evict(served))

    def _drop(self, files: list[Path]) -> None:
        self.still_cached = max(self.still_cached, out_of_page_cache(files))

    def medians(self) -> list[dict[str, Any]]:
        found = []
        for (model, name, case), times in self.rows.items():
            keys = {key for each in times for key in each}
            row = {key: statistics.median(each.get(key, 0.0) for each in times) for key in sorted(keys)}
            found.append({
                "model": model, "platform": name, "case": case, "tier": self.tiers[model, name, case], **row,
                "each": [each["took"] for each in times],
            })  # fmt: skip
        return found


def compare_levels(levels: list[str], models: tuple[str, ...], rounds: int, threads: int) -> int:
    """Start *models* under each of *levels* in turn, and print the medians; return 1 if one misses its bar."""
    taken: dict[tuple[str, str], list[Row]] = {}
    with contextlib.ExitStack() as stack:
        platforms = [
            stack.enter_context(serve(level, ROOT, ["--isolation", level], models, threads)) for level in levels
        ]
        for turn in range(rounds + 1):
            for model in models:
                for served in platforms:
                    row = started(served, model)
                    if turn:  # the first warms the page cache
                        taken.setdefault((model, served.name), []).append(row)
    missed = False
    for model in models:
        first, second = ([each["took ms"] for each in taken[model, level]] for level in levels)
        ratio = statistics.median(second) / statistics.median(first)
        missed |= ratio > LEVEL_LIMIT
        for level in levels:
            rows = taken[model, level]
            names = ("took ms", "process ms", CPU)
            told = ", ".join(f"{name} {statistics.median(row[name] for row in rows):.2f}" for name in names)
            print(f"{model}, {level}: {told}")
        print(f"{model}: {ratio:.3f} times {levels[0]} (at most {LEVEL_LIMIT})")
    return int(missed)


NOT_PHASES: Final = frozenset(
    ("model", "platform", "case", "tier", "each", "took", "beyond", "ratio", "freed", "by hand", "by hand so", "queue")
)


def rendered(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells, in ms."""
    names = list(dict.fromkeys(name for row in rows for name in ("room", "fork", *row) if name not in NOT_PHASES))
    found = [name for name in names if any(row.get(name, 0) >= 5e-5 for row in rows)]
    headings = ["model", "platform", "weights", "tier", "answer", *found, "beyond load + run", "freed", "by hand"]
    cells = [
        [
            row["model"], row["platform"], row["case"], row["tier"],
            *(f"{1e3 * row.get(name, 0):.1f}" for name in ("took", *found, "beyond", "freed")),
            f"{1e3 * row['by hand so']:.1f}", f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    return [*headings, "times by hand"], cells


def short(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the lines for README.md: one for each model and tier."""
    wanted = {
        ("as it is", "warm"): "hit",
        ("as it is", "page cache"): "host",
        ("without host tier", "no page cache"): "disk",
    }
    lines = []
    for row in sorted(rows, key=lambda row: (MODELS.index(row["model"]), TIERS.index(row["tier"]))):
        if wanted.get((row["platform"], row["case"])) == row["tier"]:
            platform_s = row["took"] - sum(row.get(name, 0.0) for name in ("read", "transfer", "init", "run"))
            times = (row["took"], platform_s, row["by hand so"], row["took"] / row["by hand so"])
            lines.append([
                row["model"], row["tier"], *(f"{1e3 * each:.0f}" for each in times[:3]), f"{times[3]:.2f}",
            ])  # fmt: skip
    return lines


def bars(rows: list[dict[str, Any]], private: dict[str, list[float]]) -> list[tuple[bool, str]]:
    """Return whether each bar is met, and what it asks and found."""
    found = []
    for row in rows:
        if (row["platform"], row["case"], row["tier"]) == ("as it is", "page cache", "host"):
            text = f"{row['model']}, from the host tier: {row['ratio']:.2f} times by hand (at most {RATIO})"
            found.append((row["ratio"] <= RATIO, text))
            process = f"{row['model']}: process {1e3 * row['process']:.1f} ms (below {1e3 * PROCESS_S:.0f})"
            found.append((row["process"] < PROCESS_S, process))
    freed_s = max(
        [statistics.median(private["as it is"]), *(each["freed"] for each in rows if each["platform"] == "as it is")]
    )
    found.append((freed_s < FREED_S, f"1 GiB free again after {1e3 * freed_s:.0f} ms (below {1e3 * FREED_S:.0f})"))
    return found


def write(rows: list[dict[str, Any]], rounds: int, private: dict[str, list[float]]) -> None:
    """Put the tables into the documents: all of it, and what a reader of README.md needs."""
    headings, cells = rendered(rows)
    freed = ", ".join(f"{1e3 * statistics.median(each):.0f} ms ({name})" for name, each in private.items())
    told = (
        f"Milliseconds, medians of {rounds} rounds on a CPU device; *times by hand*: against mapping the same weights\n"
        "from the page cache and running once, in a process that has torch. *beyond*: all but queue, load and run;\n"
        "*freed*: how long the memory of the evicted model took to be free. A model that had written 1 GiB of private\n"
        f"memory: {freed}."
    )
    judged = "\n".join(f"- {'met' if met else '**missed**'}: {text}" for met, text in bars(rows, private))
    command = "```console\n$ python benchmarks/coldstart.py --write\n```"
    write_part(
        ROOT / "docs" / "performance.md", "benchmarks/coldstart.py",
        f"{command}\n\n{told}\n\n{table(headings, cells)}\n\n{judged}",
    )  # fmt: skip
    heads = ["model", "weights were in", "answer, ms", "of it the platform's", "by hand, ms", "times by hand"]
    told = (
        "`hit`: in the device's memory. `host`: in host memory. `disk`: there, and not in the page cache. A CPU\n"
        f"device, medians of {rounds} rounds."
    )
    write_part(ROOT / "README.md", "benchmarks/coldstart.py", f"{table(heads, short(rows))}\n\n{told}")


def measured(options: argparse.Namespace, models: tuple[str, ...]) -> Rounds:
    """Start *models* on each platform and by hand, one after the other in each round."""
    console = Console(stderr=True)
    rounds = Rounds()
    with contextlib.ExitStack() as stack:
        wanted = [("as it is", ROOT, [])]
        if options.park:
            wanted.append(("parking", ROOT, ["--park"]))
        else:
            wanted += [(name, ROOT, [flag, "0"]) for name, flag in VARIANTS if serves_with(ROOT, flag)]
        with console.status("building and deploying"):
            platforms = [stack.enter_context(serve(*each, models, options.threads)) for each in wanted]
            hand = stack.enter_context(by_hand(options.threads))
        for turn in range(options.rounds + 1):
            for model in models:
                with console.status(f"{model}, round {turn} of {options.rounds}"):
                    rounds.one(hand, platforms, model, keep=turn > 0)  # the first warms profiles and page cache
            for served in platforms:
                with console.status(f"1 GiB of private memory, round {turn} of {options.rounds}"):
                    rounds.free(served)
    return rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each start; they wait for each other")
    parser.add_argument(
        "--model", action="append", choices=(*MODELS, ECHO), help=f"repeatable; default: all but {ECHO}"
    )
    parser.add_argument("--park", action="store_true", help="compare with a platform that parks")
    parser.add_argument("--json", nargs="?", const=True, type=Path, metavar="FILE", help="instead of a table")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md and docs/performance.md")
    parser.add_argument("--isolation", metavar="LEVEL,LEVEL", help="compare two levels, and only these")
    options = options_of(parser, rounds=5, limit=BASE_LIMIT)
    if options.base and (options.park or options.write):
        parser.error("--base is compared with the platform as it is, and written into no document")
    models = tuple(options.model or MODELS)
    if options.isolation:
        return compare_levels(options.isolation.split(","), models, options.rounds, options.threads)
    if options.base or models == (ECHO,):
        pairs = pairs_of(options, STARTS)
        parts = {f"a cold start of {model}": functools.partial(started, model=model) for model in models}
        measure(
            pairs, options, parts, lambda tree: serve(tree.name, tree, [], models, options.threads),
            lambda served: str(served.client.base_url),
        )  # fmt: skip
        return pairs.finish(options)
    if ECHO in models:
        parser.error(f"{ECHO} has no weights: it is measured by itself, or with --base")
    rounds = measured(options, models)
    rows = rounds.medians()
    if rounds.still_cached > 0.01:
        told = f"{rounds.still_cached:.0%} of the weights' pages stayed in the page cache"
        print(f"posix_fadvise does not empty the page cache here: {told}", file=sys.stderr)
    if options.json:
        more = {"still_cached": rounds.still_cached, "private_freed": rounds.private}
        write_json({"rounds": options.rounds, **more, "rows": rows}, options.json)
    else:
        headings, cells = rendered(rows)
        shown = Table(title=f"starts on a CPU device, ms (medians of {options.rounds} rounds)", title_justify="left")
        for place, heading in enumerate(headings):
            shown.add_column(heading, justify="left" if place < 4 else "right")
        for each in cells:
            shown.add_row(*each)
        Console(width=max(Console().width, 150)).print(shown)
    if options.write:
        write(rows, options.rounds, rounds.private)
    judged = bars(rows, rounds.private)
    for met, text in judged:
        print(f"{'met' if met else 'MISSED'}: {text}", file=sys.stderr)
    return 0 if all(met for met, _ in judged) else 1


if __name__ == "__main__":
    raise SystemExit(main())
