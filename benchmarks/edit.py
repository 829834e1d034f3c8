"""
Edits: how long a change of a handler takes until its new version answers, and what is done again for it.

    python benchmarks/edit.py [--only local,up,heavy,examples,second,turns] [--edits 10] [--factor F] [--json [FILE]]

- *local*: `local-run --watch`, from the save to the new answer: a plain handler, and one with a requirement and a
  build.py that sleeps for 5 s. pip, uv and build.py are counted: none of them may run again.
- *up*: the second one by `up --watch`.
- *heavy*: a model whose import takes 2 s of processor time (transformers, where it is installed), by `up`, from the
  second edit on. Its build.py draws weights at random: they must stay the same, byte for byte.
- *examples*: `up` of the examples, with nothing changed.
- *second*: what a second function with the same requirements, of 20 MB, adds to the data directory.
- *turns*: six models in turn, four with the heavy import, on a device with room for three: misses after the second.

p50 of --edits each. Wheels are made here, and taken from a folder: no index is asked. The bars are for a machine where
`peers.py --peers starlette --works echo` shows 10,000 calls/s of the platform at 16 connections. On a slower one they
are longer by --factor, which is measured so where wrk is installed. With a missed bar it exits with 1.
"""

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from _judged import Bar, most, status_of
from _pairs import write_json
from _platform import ROOT, free_port, gpufaas, platform
from _starts import MiB
from rich.console import Console
from rich.table import Table

PARTS: Final = ("local", "up", "heavy", "examples", "second", "turns")
LOCAL_S, UP_WATCH_S, HEAVY_S, EXAMPLES_S, SECOND_MB, MISS_S = 1.0, 1.5, 2.5, 2.0, 1.0, 0.3
CALLS_PER_S: Final = 10_000.0
"""The rate of starlette on the machine that the bars are for (`peers.py`, 16 connections)."""
WITHIN_S: Final = 180.0
PAUSE_S: Final = (0.6, 1.1)
"""Between an answer and the next edit: who edits has no step with who looks for changes."""
REAL: Final = "transformers" if importlib.util.find_spec("transformers") else ""
HEAVY: Final = REAL or "heavy_import"

_PLAIN: Final = """
{imports}
VERSION = "v{version}"


def handle(event, context):
    return VERSION
"""
_MODEL: Final = """
import hashlib
import time
from pathlib import Path

from safetensors.torch import load_file
{imports}
VERSION = "v{version}"


def load(device):
    file = Path(__file__).with_name("weights.safetensors")
    return load_file(file), hashlib.sha256(file.read_bytes()).hexdigest()


def handle(model, event, context):
    return VERSION + " " + model[1]
"""
_BUILD: Final = """
import time

with open({log!r}, "a") as log:
    log.write("build.py\\n")
time.sleep({sleep_s})
with open("made.txt", "w") as made:
    made.write(str(time.time_ns()))
"""
_BUILD_WEIGHTS: Final = """
import torch
from safetensors.torch import save_file

save_file({{"w": torch.rand({size}, generator=torch.Generator().manual_seed(time.time_ns()))}}, "weights.safetensors")
"""
_BURN: Final = """
import time

until = time.process_time() + {cpu_s}
while time.process_time() < until:
    sum(range(1000))
"""
_COUNT: Final = """
import os
import sys


def count(event, given):
    if event == "subprocess.Popen":
        program, asked = os.path.basename(os.fsdecode(given[1][0])), [*given[1][1:5]]
        ran = [name for name in ("pip", "uv") if name == program or ("-m" in asked and name in asked)]
        with open({log!r}, "a") as log:
            log.writelines(f"{{name}}\\n" for name in ran)


sys.addaudithook(count)
"""
"""Is imported by each Python that starts."""


@dataclass
class Place:
    """A folder with wheels, stand-ins that count who runs, and functions."""

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = self.folder / "ran.log"
        self.log.touch()
        self.wheels = self.folder / "wheels"
        self.wheels.mkdir()
        aside = self.folder / "counts"
        aside.mkdir()
        (aside / "sitecustomize.py").write_text(_COUNT.format(log=str(self.log)))
        self.env = {**os.environ, "PYTHONPATH": str(aside)}
        self.wheel("small_need", "NUMBER = 1\n")
        self.wheel("large_need", "NUMBER = 1\n", random.Random(1).randbytes(20 * MiB))
        self.wheel("heavy_import", _BURN.format(cpu_s=2.0))

    def wheel(self, name: str, code: str, data: bytes = b"") -> None:
        info = f"{name}-1.0.dist-info"
        files = {
            f"{name}/__init__.py": code.encode(),
            f"{name}/data.txt": data,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: edit\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items())
        with zipfile.ZipFile(self.wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for path, content in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
                wheel.writestr(path, content)

    def ran(self) -> dict[str, int]:
        """Return how often pip, uv and build.py have run."""
        lines = self.log.read_text().split()
        return {name: lines.count(name) for name in sorted(set(lines))}

    def judge(self, what: str, limit: float, seconds: Sequence[float], factor: float = 1.0, unit: str = "s") -> None:
        middle = statistics.median(seconds)
        self.found[what] = {"p50": middle, "most": max(seconds), "each": list(seconds), "bar": limit, "unit": unit}
        self.bars.append(most(f"{what}, {unit}", middle, limit * factor))

    def judge_equal(self, what: str, met: bool, found: object) -> None:
        self.found[what] = found
        self.bars.append(Bar(met, f"{what}: {found}"))


@dataclass
class Function:
    """One function of a stack file of its own."""

    place: Place
    name: str
    needs: str = ""
    sleep_s: float | None = None
    """How long its build.py sleeps; None: it has no build.py."""
    weights: int = 0
    """The bytes of weights that build.py draws. With any, it is a model."""
    memory: str = ""
    version: int = 0

    def __post_init__(self) -> None:
        self.home = self.place.folder / f"project-{self.name}"
        self.handler = self.home / self.name / "handler.py"
        self.handler.parent.mkdir(parents=True)
        entry: dict[str, Any] = {
            "lang": "python3-torch" if self.weights else "python3-http",
            "handler": f"./{self.name}", "image": f"{self.name}:latest",
        }  # fmt: skip
        if self.memory:
            entry["annotations"] = {"gpufaas.memory": self.memory}
        stack = {"version": "1.0", "provider": {"name": "openfaas"}, "functions": {self.name: entry}}
        (self.home / "stack.yaml").write_text(json.dumps(stack))
        if self.needs:
            where = "" if self.needs == REAL else f"--no-index\n--find-links {self.place.wheels}\n"
            (self.handler.parent / "requirements.txt").write_text(f"{where}{self.needs.replace('_', '-')}\n")
        if self.sleep_s is not None:
            build = _BUILD.format(log=str(self.place.log), sleep_s=self.sleep_s)
            build += _BUILD_WEIGHTS.format(size=self.weights // 4) if self.weights else ""
            (self.handler.parent / "build.py").write_text(build)
        self.edit()

    def edit(self) -> str:
        """Save it with a new version; return what it answers then, at its beginning."""
        self.version += 1
        imports = "" if not self.needs else f"import {self.needs}"
        if self.needs == "transformers":
            imports = "from transformers import AutoModel, AutoTokenizer"
        text = (_MODEL if self.weights else _PLAIN).format(imports=imports, version=self.version)
        self.handler.write_text(text)
        return f"v{self.version}"

    def until(self, url: str, answer: str, child: subprocess.Popen[bytes] | None = None) -> str:
        """Call it until it begins with *answer*. :raises SystemExit: it does not within `WITHIN_S`"""
        until, said = time.monotonic() + WITHIN_S, ""
        with httpx.Client(timeout=WITHIN_S) as client:
            while time.monotonic() < until and (child is None or child.poll() is None):
                with contextlib.suppress(httpx.TransportError):
                    said = client.post(f"{url}/function/{self.name}", content=b"{}").text
                    if said.split()[:1] == [answer]:
                        return said
                time.sleep(0.01)
        raise SystemExit(f"{self.name} does not answer {answer}, but {said[:300]!r}")

    def watched(self, url: str, edits: int, *command: str) -> list[float]:
        """Run *command*, which watches; return the seconds from each of so many saves to its answer at *url*."""
        seconds = []
        with self._running(url, *command) as child:
            self.until(url, f"v{self.version}", child)
            for _ in range(edits):
                time.sleep(random.uniform(*PAUSE_S))
                began = time.perf_counter()
                self.until(url, self.edit(), child)
                seconds.append(time.perf_counter() - began)
        return seconds

    @contextlib.contextmanager
    def _running(self, url: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        child = subprocess.Popen(
            [sys.executable, "-m", "gpufaas_cli", *command], cwd=self.home, env={**self.place.env, "OPENFAAS_URL": url},
            stdout=subprocess.DEVNULL, stderr=(self.home / "said.txt").open("wb"),
        )  # fmt: skip
        try:
            yield child
        finally:
            child.send_signal(signal.SIGINT)
            child.wait(30)

    def up(self, url: str) -> None:
        with self._running(url, "up") as child:
            if child.wait(WITHIN_S):
                raise SystemExit(f"up of {self.name} failed: {(self.home / 'said.txt').read_text()}")


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def local(place: Place, edits: int, factor: float) -> None:
    for function in (
        Function(place, "plain"), Function(place, "rich", needs="small_need", sleep_s=5.0),
    ):  # fmt: skip
        url = f"http://127.0.0.1:{free_port()}"
        before = place.ran()
        seconds = function.watched(url, edits, "local-run", "--watch", "-p", url.rpartition(":")[2])
        place.judge(f"local-run --watch, {function.name}", LOCAL_S, seconds, factor)
    _judge_again(place, "local-run", before, edits)


def up(place: Place, edits: int, factor: float) -> None:
    function = Function(place, "watched", needs="small_need", sleep_s=5.0)
    before = place.ran()
    with platform("--device", "cpu:0=1GiB") as (url, _, _):
        place.judge("up --watch", UP_WATCH_S, function.watched(url, edits, "up", "--watch"), factor)
    _judge_again(place, "up", before, edits)


def _judge_again(place: Place, what: str, before: dict[str, int], edits: int) -> None:
    """With what a first build runs (a resolver for what is needed, and perhaps one that installs; build.py once)."""
    again = {name: count - before.get(name, 0) for name, count in place.ran().items()}
    once = again.get("build.py", 0) == 1 and sum(again.values()) <= 4
    place.judge_equal(f"runs of pip, uv and build.py in {1 + edits} builds of {what}", once, again)


def heavy(place: Place, edits: int, factor: float) -> None:
    function = Function(place, "heavy", needs=HEAVY, sleep_s=1.0, weights=64 * MiB)
    seconds, weights = [], set()
    with platform("--device", "cpu:0=4GiB") as (url, _, _):
        function.up(url)
        weights.add(function.until(url, "v1").split()[1])
        for _ in range(edits + 1):
            time.sleep(random.uniform(*PAUSE_S))
            answer, began = function.edit(), time.perf_counter()
            function.up(url)
            weights.add(function.until(url, answer).split()[1])
            seconds.append(time.perf_counter() - began)
    place.found["first edit of a heavy handler"] = seconds[0]
    place.judge(f"up of a handler that imports {HEAVY}", HEAVY_S, seconds[1:], factor)
    place.judge_equal(f"sets of weights of {len(seconds) + 1} builds", len(weights) == 1, len(weights))


def examples(place: Place, edits: int, factor: float) -> None:
    home = place.folder / "examples"
    shutil.copytree(ROOT / "functions" / "examples", home, ignore=shutil.ignore_patterns("build", "__pycache__"))
    seconds = []
    with platform("--device", "cpu:0=2GiB") as (url, _, _):
        gpufaas(url, "up", "--parallel", "2", cwd=home)
        for _ in range(edits):
            began = time.perf_counter()
            gpufaas(url, "up", cwd=home)
            seconds.append(time.perf_counter() - began)
    place.judge("up of the examples, unchanged", EXAMPLES_S, seconds, factor)


def second(place: Place, edits: int, factor: float) -> None:
    del edits, factor
    with platform("--device", "cpu:0=1GiB") as (url, _, home):
        sizes = []
        for version, name in enumerate(("first", "second"), 1):
            function = Function(place, name, needs="large_need", version=version - 1)  # of other code
            function.up(url)
            function.until(url, f"v{version}")
            sizes.append(_size(home / "data"))
    place.found["the first one has, MB"] = sizes[0] / 1e6
    place.judge(
        "a second function with the same requirements adds", SECOND_MB, [(sizes[1] - sizes[0]) / 1e6], unit="MB"
    )


def _size(folder: Path) -> int:
    """Return the bytes on the disk of all files below *folder*, each once."""
    files = {(each.st_dev, each.st_ino): each.st_blocks * 512
             for path in folder.rglob("*") if not path.is_symlink() and (each := path.stat())}  # fmt: skip
    return sum(files.values())


def turns(place: Place, edits: int, factor: float) -> None:
    needs = [HEAVY] * 4 + ["small_need"] * 2
    models = [
        Function(place, f"turn{number}", needs=need, sleep_s=0.0, weights=64 * MiB, memory="300MiB")
        for number, need in enumerate(needs)
    ]
    seconds, starts = [], dict[str, int]()
    with platform("--device", "cpu:0=1000MiB") as (url, _, _), httpx.Client(timeout=WITHIN_S) as client:
        for each in models:
            each.up(url)
        for turn in range(2 + max(2, edits // 2)):
            for each in models:
                began = time.perf_counter()
                answer = client.post(f"{url}/function/{each.name}", content=b"{}").raise_for_status()
                took, start = time.perf_counter() - began, answer.headers["x-gpufaas-start"]
                if turn >= 2 and start != "hit":
                    seconds.append(took)
                    starts[start] = starts.get(start, 0) + 1
                time.sleep(0.2)  # what a call leaves to be done is done
    place.found["starts of six models in turn"] = starts
    place.judge("a miss of six models in turn, after the second turn", MISS_S, seconds, factor)


def factor_here() -> float:
    """Return how much slower this machine is than that of the bars, at least 1; 1 where wrk is not installed."""
    if not shutil.which("wrk"):
        print("wrk is missing: the bars are not scaled", file=sys.stderr)
        return 1.0
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), "--peers", "starlette", "--works", "echo"]
        command += ["--rounds", "1", "--seconds", "2", "--json", file.name]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # it judges bars
        (cell,) = [each for each in json.load(file)["cells"] if each["connections"] == 16]
    return max(1.0, CALLS_PER_S / statistics.median(each["ours"]["rps"] for each in cell["rounds"]))


def show(place: Place, factor: float) -> None:
    table = Table(title=f"this machine: {factor:.2f} times slower than that of the bars", title_justify="left")
    for heading in ("", "p50", "most", "bar"):
        table.add_column(heading, justify="right" if heading else "left")
    for what, each in place.found.items():
        if isinstance(each, dict) and "p50" in each:
            table.add_row(f"{what}, {each['unit']}", f"{each['p50']:.2f}", f"{each['most']:.2f}", f"{each['bar']:g}")
        else:
            table.add_row(what, f"{each:.2f}" if isinstance(each, float) else str(each), "", "")
    Console(width=max(Console().width, 120)).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS")
    parser.add_argument("--edits", type=int, default=10)
    parser.add_argument("--factor", type=float, help="how much slower this machine is; default: measured")
    parser.add_argument(
        "--json", nargs="?", const=True, type=Path, metavar="FILE", help="write what was found, as JSON"
    )
    options = parser.parse_args()
    asked = options.only.split(",")
    if unknown := set(asked) - set(PARTS):
        parser.error(f"--only {', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    factor = options.factor or factor_here()
    parts: dict[str, Callable[[Place, int, float], None]] = {each.__name__: each for each in (
        local, up, heavy, examples, second, turns,
    )}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gpufaas-edit-", ignore_cleanup_errors=True) as folder:
        place = Place(Path(folder))
        for name in asked:
            with Console(stderr=True).status(name):
                parts[name](place, options.edits, factor)
        if options.json:
            bars = list(map(dataclasses.asdict, place.bars))
            write_json({"factor": factor, "heavy": HEAVY, "found": place.found, "bars": bars}, options.json)
        if options.json is not True:
            show(place, factor)
    return status_of(place.bars)


if __name__ == "__main__":
    raise SystemExit(main())
