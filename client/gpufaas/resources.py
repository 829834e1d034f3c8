"""
The JSON objects of the gateway: docs/openfaas.md and ``/openapi.json`` describe each field. A gateway of another
version, or of OpenFaaS, may leave fields out, and send others.
"""

from typing import Any, NamedTuple, NotRequired, TypedDict


class Outcome(NamedTuple):
    """The answer to a change: ``202 Accepted``."""

    status: int
    reason: str
    revision: str = ""
    """Of a deployment: what takes the calls now, or once it is loaded. Empty: the gateway does not say."""


class _Settings(TypedDict, total=False):
    """What is said when a function is deployed, and is shown of it later."""

    namespace: str
    envProcess: str
    envVars: dict[str, str]
    constraints: list[str]
    secrets: list[str]
    labels: dict[str, str]
    annotations: dict[str, str]
    """``gpufaas.bundle`` names the bundle by its digest, where the function is a process."""
    limits: dict[str, str]
    requests: dict[str, str]
    readOnlyRootFilesystem: bool


class Deployment(_Settings):
    """The body of a deployment."""

    service: str
    """The function's name."""
    image: str


class Function(_Settings, total=False):
    name: str
    image: str
    createdAt: str
    replicas: int
    availableReplicas: int
    invocationCount: int
    usage: dict[str, float]
    """Only if it was asked for: ``cpu`` in millicores, ``totalMemoryBytes``."""
    gpufaas: dict[str, Any]
    """Not from OpenFaaS: ``state``, ``devices``, ``hits``, ``misses``, ``memory`` in bytes, ``profiles`` …"""


class Version(TypedDict, total=False):
    release: str
    sha: str
    commit_message: str


class Provider(TypedDict, total=False):
    provider: str
    orchestration: str
    version: Version


class Info(TypedDict, total=False):
    provider: Provider
    version: Version
    arch: str


class Status(TypedDict, total=False):
    """The whole platform as its scheduler sees it."""

    policy: str
    devices: list[dict[str, Any]]
    """Each with ``device``, ``used`` (bytes), ``busy``, ``resident``, ``hits``, ``misses``, ``evictions`` …"""
    queued: dict[str, int]
    """Waiting calls, by function."""
    running: dict[str, int]
    desired: dict[str, int]
    held: list[str]
    """Those of ``desired`` from which the autoscaler takes nothing for a while: their number was set."""
    failing: dict[str, dict[str, Any]]
    offers: list[dict[str, Any]]
    """The kinds of nodes that can be ordered."""
    ordered: dict[str, str]
    """Open orders, and their kinds."""
    unmet: dict[str, str]
    """Kinds whose last order failed, and why."""
    functions: dict[str, dict[str, Any]]
    asyncQueues: dict[str, Any]


class Explanation(TypedDict, total=False):
    call: str
    function: str
    policy: str
    state: str
    """``waiting``, ``local``, ``running`` or ``ended``."""
    at: float
    waited_s: float
    device: str | None
    hit: bool | None
    via: str | None
    victims: list[str]
    rule: str
    options: list[dict[str, Any]]
    passed_over: list[str]
    passed_over_count: int
    overtaken_by: list[str]
    overtaken_by_count: int
    batch: list[str]
    service: dict[str, Any] | None


class Node(TypedDict):
    name: str
    address: str
    state: str
    """``ready``, ``draining`` or ``drained``; ``unknown`` while no scheduler leads."""
    ageSeconds: float
    """How old all of this is, while no scheduler leads; else 0."""
    note: str
    version: str
    joinedSeconds: float
    running: int
    residentCopies: int
    devices: list[dict[str, Any]]


class Plan(TypedDict, total=False):
    """A version of the plan of copies. 0: there was none yet."""

    version: int
    replicas: list[dict[str, Any]]
    """Each as docs/placing.md says, with ``wait_s``; of the plan in force also ``state`` and ``reason``."""
    by: str
    at: float
    """Unix time."""
    why: str
    expected: dict[str, float]
    notes: list[str]
    planner: dict[str, Any]
    """What makes plans says of itself."""


class Environment(TypedDict, total=False):
    """The Python environment of some nodes."""

    python: str
    implementation: str
    abi: str
    platforms: list[str]
    markers: dict[str, str]
    distributions: dict[str, Any]
    nodes: list[str]


class Secret(TypedDict, total=False):
    """Never with its value."""

    name: str
    namespace: str


class Namespace(TypedDict, total=False):
    name: str
    labels: dict[str, str]
    annotations: dict[str, str]


class Quota(TypedDict, total=False):
    """A limit that is missing or None does not hold."""

    namespace: str
    maxFunctions: int | None
    maxMemory: int | None
    """Bytes."""
    maxInFlight: int | None
    maxWaiting: int | None
    used: dict[str, int]


class CallStatus(TypedDict, total=False):
    """The state of an asynchronous call."""

    callId: str
    function: str
    state: str
    """``queued``, ``running``, ``callback``, ``done``, ``dead`` or ``cancelled``; the last three are final."""
    attempts: int
    callbackAttempts: int
    status: int | None
    """The status of the last execution."""
    reason: str | None
    acceptedAt: str
    endedAt: str | None
    dueAt: str | None


class LogLine(TypedDict):
    name: str
    namespace: str
    instance: str
    """The worker."""
    timestamp: str
    """RFC 3339."""
    text: str
    stream: NotRequired[str]
    """``stdout`` or ``stderr``, where it is known."""
    callId: NotRequired[str]
