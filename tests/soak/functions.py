"""
The functions of the soak. Each body begins with ``ID SECONDS WHAT``; each answers ``VERSION ID …`` and writes the id to
a record, in one write to a file opened with O_APPEND, so that it is known how often a call was executed.
"""

import textwrap
from collections.abc import Mapping
from typing import Final, NamedTuple

from tests.integration.conftest import HTTP, TORCH

_COMMON: Final = """
import os, time, urllib.request

FILE = os.open(os.environ["record"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
VERSION = os.environ["version"]

def begin(event):
    id_, seconds, what = event.body.decode().split()
    os.write(FILE, id_.encode() + b"\\n")
    return id_, float(seconds), what

def serve(event):
    id_, seconds, _ = begin(event)
    time.sleep(seconds)
    return f"{VERSION} {id_}"
"""

_MODEL: Final = """
def load(device):
    import torch
    return torch.nn.Linear(2048, 2048, device=device)  # a module: it can be parked

def handle(model, event, context):
    return serve(event)
"""

_HOG: Final = """
def load(device):
    return None

def handle(model, event, context):
    id_, seconds, what = begin(event)
    held = []
    while what == "hog":
        held.append(os.urandom(4 << 20))
        if len(held) > 1000:
            raise RuntimeError("4 GB, and no limit held it")
    time.sleep(seconds)
    return f"{VERSION} {id_}"
"""

_BATCH: Final = """
def load(device):
    import torch
    return torch.nn.Linear(2048, 2048, device=device)

def handle_batch(model, events, contexts):
    for event in events:
        os.write(FILE, event.headers["X-Id"].encode() + b"\\n")
    time.sleep(float(events[0].headers["X-Seconds"]))  # callers hang up before their bodies are read
    answers = []
    for event in events:
        id_, *_ = event.body.decode().split()
        answers.append(f"{VERSION} {id_}")
    return answers
"""

_CPU: Final = """
def handle(event, context):
    return serve(event)
"""

_STREAM: Final = """
def handle(event, context):
    id_, seconds, _ = begin(event)
    def pieces():
        for letter in f"{VERSION} {id_}":
            time.sleep(seconds / 20)
            yield letter
    return pieces()
"""

_LARGE: Final = """
def handle(event, context):
    id_, _, what = begin(event)
    def pieces():
        yield f"{VERSION} {id_}\\n"
        for _ in range(int(what)):
            yield (id_.encode() + b" ") * (65536 // (len(id_) + 1))
    return pieces()
"""

_OUTER: Final = """
def handle(event, context):
    id_, seconds, _ = begin(event)
    answers = []
    for inner in ("cpu", "model-a"):
        body = f"{id_}.{inner} {seconds / 4} -".encode()
        request = urllib.request.Request(os.environ["OPENFAAS_URL"] + "/function/" + inner, body)
        answers.append(urllib.request.urlopen(request, timeout=60).read().decode().split()[1])
    return " ".join([VERSION, id_, *answers])
"""

_PRINTER: Final = """
def handle(event, context):
    id_, seconds, _ = begin(event)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print("it prints, and prints, and prints", id_)
    return f"{VERSION} {id_}"
"""


class Function(NamedTuple):
    name: str
    lang: str
    source: str
    rate: float
    """Its share of all calls."""
    kind: str = "plain"
    """How it is called, and judged: see `load.Load`."""
    annotations: Mapping[str, str] = {}


def _made(name: str, lang: str, source: str, rate: float, kind: str = "plain", **annotations: str) -> Function:
    return Function(name, lang, textwrap.dedent(_COMMON) + source, rate, kind, annotations)


FUNCTIONS: Final = (
    _made("model-a", TORCH, _MODEL, 14),
    _made("model-b", TORCH, _MODEL, 8),
    _made("model-c", TORCH, _MODEL, 4),
    _made("hog", TORCH, _HOG, 2, "hog"),
    _made("batch", TORCH, _BATCH, 2, "batch", batch_max="4", batch_wait="20ms"),
    _made("slots", TORCH, _MODEL, 6, slots="3"),
    _made("cpu", HTTP, _CPU, 24),
    _made("updated", HTTP, _CPU, 10),
    _made("cancelled", HTTP, _CPU, 8, "cancel"),
    _made("stream", HTTP, _STREAM, 8),
    _made("large", HTTP, _LARGE, 2, "large"),
    _made("outer", HTTP, _OUTER, 6, "nested"),
    _made("printer", HTTP, _PRINTER, 2),
    _made("queued", HTTP, _CPU, 12, "async"),
)
