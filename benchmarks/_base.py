"""
What `--base TREE` of a benchmark is: another working tree's platform and this one's, in turn (`_pairs.py`).

Judged is the processor time of a call. A process keeps its luck (addresses, the seed of hashes) for life, and that is
some per cent of a call: both platforms start anew for each round. Each process is asked whose code it runs.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from _deploying import deploy
from _pairs import CPU, Limit, Pairs, Parts, by_turns
from _platform import ROOT, STARTED, interpreter_of, is_code_of

from gpufaas_core import local_login

PAIRS: Final = 9
LIMIT: Final = 1.03
S = TypeVar("S")


def options_of(parser: argparse.ArgumentParser, *, rounds: int = 1, limit: float = LIMIT) -> argparse.Namespace:
    """Add ``--rounds``, ``--base`` and ``--bar`` to *parser*; return what it makes of the command line."""
    told = "compare with another working tree, and only with it"
    parser.add_argument("--rounds", type=int, help=f"default: {rounds}; with --base {PAIRS}")
    parser.add_argument("--base", type=working_tree, metavar="TREE", help=told)
    parser.add_argument("--bar", type=float, default=limit, help=f"times the base's processor time; default: {limit}")
    options = parser.parse_args()
    options.rounds = options.rounds or (PAIRS if options.base else rounds)
    return options


def working_tree(path: str) -> Path:
    """
    Return the working tree at *path*, absolute.

    :raises SystemExit: it is none, its code does not run, or its engine is compiled where this one's is not
    """
    tree = Path(path).resolve()
    if not (tree / "core" / "gpufaas_core").is_dir():
        raise SystemExit(f"{path} is no working tree of this project")
    said = {each: _run(interpreter_of(each), "-P", str(STARTED), "/dev/stdout") for each in (ROOT, tree)}
    mine, other = (is_code_of(each, json.loads(said[each])) for each in (ROOT, tree))
    if mine != other:
        told = f"{mine} runs the engine of this tree, {other} that of {tree}"
        raise SystemExit(f"{told}: `make compiled` or `make pure` in one of them, or GPUFAAS_COMPILED=0")
    return tree


def pairs_of(options: argparse.Namespace, slices: float = 1) -> Pairs:
    names = ("this tree", "the base") if options.base else ("this tree",)
    return Pairs(names, options.rounds, Limit(CPU, "at most", options.bar), slices=max(1, round(slices)))


def measure(
    pairs: Pairs,
    options: argparse.Namespace,
    parts: Parts[S],
    serve: Callable[[Path], AbstractContextManager[S]],
    url_of: Callable[[S], str] | None = None,
) -> None:
    """
    Measure each of *parts* of both working trees in all rounds.

    :param serve: what *parts* get of a working tree
    :param url_of: a URL of a platform that was started: its workers are checked, and each part runs once before
    :raises SystemExit: a worker runs other code, or calls failed
    """
    trees = [ROOT, options.base] if options.base else [ROOT]
    for turn in range(options.rounds):
        with contextlib.ExitStack() as stack:
            sides = by_turns(turn, trees, lambda tree: stack.enter_context(serve(tree)))
            for side, tree in zip(sides, trees, strict=True):
                if url_of:
                    check_workers(url_of(side), tree)
                    for part in parts.values():
                        part(side)
            pairs.round(turn, parts, sides)


def check_workers(url: str, tree: Path) -> None:
    """:raises SystemExit: a worker of the platform with the URL *url* does not run the code of *tree*"""
    with httpx.Client(base_url=httpx.URL(url).join("/"), auth=local_login.find(url), timeout=60) as client:
        deploy(client, "whose-code", STARTED.read_text(), kind="http")
        is_code_of(tree, client.post("/function/whose-code").raise_for_status().json())
        client.request("DELETE", "/system/functions", json={"functionName": "whose-code"}).raise_for_status()


def aside(tree: Path, *arguments: str) -> Any:
    """
    Run this program with *arguments* by the code of *tree*; return what it prints as JSON.

    :raises SystemExit: it prints none, or what it says as its ``code`` is other code
    """
    said = json.loads(_run(interpreter_of(tree), sys.argv[0], "--json", *arguments))
    is_code_of(tree, said.pop("code"))
    return said


def _run(*command: str) -> str:
    """Run *command*; return what it prints, whatever its bars are."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout
