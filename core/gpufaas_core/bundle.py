"""
What is deployed: a bundle, and what a node must know to start workers from it.

A bundle is a directory, and on the wire a tar of it without the weights::

    gpufaas.json        the manifest below
    function/           the author's folder: handler.py and what it imports
    site/               requirements that the platform does not provide (absent when there are none)

Weights are artifacts of their own, named in the manifest by sha256; a node links each into the bundle at its path, so
that two functions with the same weights share one file, and one page cache. The digest of a bundle is the sha256 of
its tar, which is made reproducibly (names sorted, no times, no owners): the same function has the same digest.
"""

from typing import Literal

from msgspec import Struct, field

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.constraints import Constraint
from gpufaas_core.model import FunctionId

MANIFEST = "gpufaas.json"
FUNCTION_DIR = "function"
SITE_DIR = "site"

Kind = Literal["model", "http", "server"]


class Weights(Struct, frozen=True):
    """One file of weights. `path` is relative to the bundle: ``function/weights.safetensors``."""

    path: str
    sha256: str
    bytes: Bytes


class Needs(Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle takes from the Python environment that it runs in (`gpufaas_core.environment.misfits`)."""

    python: str = ""
    """``3.11``: what is in ``site/`` was chosen for it. Empty: there is nothing in it."""
    packages: tuple[str, ...] = ()
    """Requirements that are left to the platform, without their markers: ``numpy>=2``."""
    wheels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tags of what is compiled in ``site/``, by NAME==VERSION; one of them must be supported."""


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    kind: Kind
    """
    ``model``: load(device) and handle(model, event, context). ``http``: handle(event, context). ``server``: a program
    that speaks HTTP on a port.
    """
    template: str
    handler: str = "handler"
    """Module inside ``function/`` that has the functions."""
    weights: tuple[Weights, ...] = ()
    requirements: tuple[str, ...] = ()
    """What is in ``site/``, as NAME==VERSION."""
    allow_pickle: bool = False
    """The author accepted that pickled weights can run any code."""
    command: tuple[str, ...] = ()
    """Of a server: the program and its arguments. ``python`` and ``python3`` are the platform's own."""
    workdir: str = FUNCTION_DIR
    """Of a server: the directory inside the bundle that it runs in; ``.`` is the bundle itself."""
    port: int = 0
    """Of a server: the port that its code has fixed, as OpenFaaS's templates have 5000; 0: the one that PORT says."""
    env: dict[str, str] = field(default_factory=dict)
    """Of a server: what its template sets in the environment, below what its function asks for."""
    version: int = 1
    needs: Needs | None = None
    """None: nothing but Python. Not in the file then, which older releases can read so."""
    data_bytes: Bytes = 0
    """Of the other files in ``function/`` that are no code. Not in the file: counted where the bundle is installed."""

    @property
    def weight_bytes(self) -> Bytes:
        return sum(each.bytes for each in self.weights)


class WorkerSpec(Struct, frozen=True):
    """All that a node needs to start workers of one revision of a function."""

    function: FunctionId
    name: str
    namespace: str
    digest: str
    """sha256 of the bundle."""
    kind: Kind
    slots: int = 1
    memory: Bytes = 0
    """Its first reservation, declared or derived: what it gets back when a smaller, measured one was too small."""
    env: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names, in its namespace, of the secrets that its workers find as files; never values."""
    stall_s: Seconds = 60.0
    """A load that makes no progress (no CPU time, no bytes read, no memory) for so long is killed."""
    image: str = ""
    """Runs in a container of this image, and has no bundle."""
    ready_path: str = ""
    """A server is ready when a GET of this path says so; empty: when its port accepts a connection."""
    health_path: str = ""
    """A server that is up is asked here every so often; one that fails is replaced. Empty: it is not asked."""
    health_period_s: Seconds = 10.0
    health_failures: int = 3
    """So many failures in a row are one too many."""
    read_only: bool = False
    """A container's root file system; its /tmp can be written all the same."""
    cpus: float = 0.0
    """A container's limit in cores; 0: none."""
    memory_limit: Bytes = 0
    """What a container may use at most (limits.memory); 0: what is reserved for it."""
    labels: dict[str, str] = field(default_factory=dict)
    exclusive: bool = False
    """A server that has its device to itself during a call, as models have in any case."""
    constraints: tuple[Constraint, ...] = ()
    """Of the devices that it may run on: the scheduler keeps to them, and a check of it happens on one."""
    elastic: bool = False
    """It declares no memory: the scheduler says, once it is loaded, how much it may use beyond what is reserved."""
