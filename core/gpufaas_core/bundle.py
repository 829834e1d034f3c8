"""
The bundle that is deployed, and what a node must know to start workers from it.

A bundle is a directory, and on the wire a tar of its code::

    gpufaas.json        the manifest below
    function/           the author's folder: handler.py and what it imports
    site/               requirements that the platform does not provide (absent when there are none)

Parts and weights are separate artifacts, named in the manifest by sha256. A node extracts a part once, and links it and
the weights into each bundle that names them: functions share files and page cache. The digest of a bundle is the sha256
of its tar. All tars are reproducible (names sorted, no times, no owners): the same function has the same digest.
"""

from hashlib import sha256
from typing import Literal

from msgspec import Struct, field, json

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.capabilities import CAPABILITIES
from gpufaas_core.constraints import Constraint
from gpufaas_core.model import FunctionId, Need
from gpufaas_core.start_env import own_process

_NAMES = frozenset({"OPENFAAS_NAME", "OPENFAAS_NAMESPACE"})
"""What the platform adds to the environment of each function."""
MANIFEST = "gpufaas.json"
FUNCTION_DIR = "function"
SITE_DIR = "site"

Kind = Literal["model", "http", "server"]


class WeightsFile(Struct, frozen=True):
    """One file of weights. `path` is relative to the bundle: ``function/weights.safetensors``."""

    path: str
    sha256: str
    bytes: Bytes


class Part(Struct, frozen=True):
    """A tar of files that are built seldom, so that an edit of the code sends only that (docs/adr/0065)."""

    name: Literal["site", "made"]
    """``site``: the content of ``site/``. ``made``: what build.py made, weights apart, by its path in the bundle."""
    sha256: str
    bytes: Bytes


class Needs(Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle needs of its Python environment (`gpufaas_core.environment.misfits`)."""

    python: str = ""
    """The version that ``site/`` was made for: ``3.11``. Empty: there is no ``site/``."""
    packages: tuple[str, ...] = ()
    """Requirements that the platform provides, without their markers: ``numpy>=2``."""
    wheels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The tags of each compiled wheel in ``site/``, by NAME==VERSION; one of them must be supported."""


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """As ``gpufaas.json``, without what has its default: older releases can read it."""

    kind: Kind
    """
    ``model``: load(device) and handle(model, event, context). ``http``: handle(event, context). ``server``: a program
    that speaks HTTP on a port.
    """
    template: str
    handler: str = "handler"
    """The module inside ``function/`` that has the handler."""
    weights: tuple[WeightsFile, ...] = ()
    requirements: tuple[str, ...] = ()
    """The packages in ``site/``, as NAME==VERSION."""
    allow_pickle: bool = False
    """The author accepted that pickled weights can run any code."""
    command: tuple[str, ...] = ()
    """A server's program and its arguments. ``python`` and ``python3`` are the platform's Python."""
    workdir: str = FUNCTION_DIR
    """A server's working directory inside the bundle; ``.`` is the bundle itself."""
    port: int = 0
    """The port that a server's code fixes (5000 in OpenFaaS's templates); 0: the port in PORT."""
    env: dict[str, str] = field(default_factory=dict)
    """The environment variables of a server's template; those of the function override them."""
    version: int = 1
    """2: it has parts. Older releases refuse it then."""
    needs: Needs | None = None
    """None: only Python."""
    parts: tuple[Part, ...] = ()
    data_bytes: Bytes = 0
    """Size of the data files in ``function/``. Not in the file: it is counted where the bundle is installed."""

    @property
    def weight_bytes(self) -> Bytes:
        return sum(each.bytes for each in self.weights)


class WorkerSpec(Struct, frozen=True):
    """What a node needs to start workers of one revision of a function."""

    function: FunctionId
    name: str
    namespace: str
    digest: str
    """sha256 of the bundle."""
    kind: Kind
    need: Need = Need(0)
    """Its slots, and the compute of its device that a call has, which a node counts for calls without a scheduler."""
    memory: Bytes = 0
    """Its first reservation, declared or derived. It applies again when a smaller, measured one was too small."""
    env: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    """Names of the secrets, in its namespace, that its workers find as files; never values."""
    stall_s: Seconds = 60.0
    """A load without progress (no CPU time, no bytes read, no memory) for this long is killed."""
    image: str = ""
    """It runs in a container of this image, and has no bundle; empty: it has a bundle."""
    ready_path: str = ""
    """A server is ready once a GET of this path succeeds; empty: once its port accepts a connection."""
    ready_delay_s: Seconds = 0.0
    """Before it is first asked whether it is ready."""
    ready_period_s: Seconds = 0.0
    """Between two questions; 0: it is asked as often as is cheap."""
    ready_timeout_s: Seconds = 5.0
    ready_successes: int = 1
    """The good answers in a row after which the server is ready."""
    health_path: str = ""
    """The path for regular health checks of a server; one that fails them is replaced. Empty: no checks."""
    health_period_s: Seconds = 10.0
    health_failures: int = 3
    """The server is replaced after this many failures in a row."""
    health_delay_s: Seconds = 0.0
    health_timeout_s: Seconds = 5.0
    read_only: bool = False
    """The container's root file system is read-only; its /tmp is not."""
    capabilities: tuple[str, ...] = CAPABILITIES
    """That processes of its container have."""
    cpus: float = 0.0
    """The container's limit in cores; 0: none."""
    memory_limit: Bytes = 0
    """The container's memory limit (limits.memory); 0: its reservation."""
    preload: tuple[str, ...] = ()
    """Modules that its workers find imported; not of the bundle."""
    connect: str = ""
    """The TCP ports that its workers may connect to (`read_ports`); empty: as their node says."""
    labels: dict[str, str] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()
    """On the devices that it may run on. The scheduler obeys them, and a deployment is checked on such a device."""
    elastic: bool = False
    """It declares no memory: once it is loaded, the scheduler says how much it may use beyond its reservation."""
    weights: tuple[WeightsFile, ...] = ()
    """Of its bundle, so that a node knows which it has before it has the bundle. Empty, too, if its gateway is of an
    older release."""

    @property
    def own_process(self) -> str:
        """The variables for which its workers are processes of their own (`start_env`); empty: they are forked."""
        return "" if self.image or self.kind == "server" else ", ".join(own_process(self.env))

    @property
    def profiled(self) -> str:
        """
        Under which name its costs are kept: the bundle's, and more if its author's environment, its share or its slots
        may change them.
        """
        env = {name: value for name, value in self.env.items() if name not in _NAMES}
        need = self.need
        usual = need.sharing not in ("spatial", "share") and (self.kind != "model" or need.slots == 1)
        if usual and not env:
            return self.digest
        differs = [sorted(env.items()), [] if usual else [need.sharing, need.compute, need.slots]]
        return f"{self.digest}+{sha256(json.encode(differs)).hexdigest()[:12]}"

    @property
    def taken_as(self) -> str:
        """Under which name a profile of it is kept that was taken: an edit that leaves weights and need finds it."""
        env = {name: value for name, value in self.env.items() if name not in _NAMES}
        weights = sorted(each.sha256 for each in self.weights) or [self.digest]
        return f"taken+{sha256(json.encode([weights, self.need, sorted(env.items())])).hexdigest()[:32]}"
