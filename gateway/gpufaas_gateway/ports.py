"""What the gateway needs from outside, in its own words. Adapters are in `adapters/` and `cluster/`."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, Protocol

from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.constraints import Constraint
from gpufaas_core.environment import Environment
from gpufaas_core.errors import GpufaasError
from gpufaas_core.frames import AnswerHead, CallHead
from gpufaas_core.logs import LogLine, LogQuery
from gpufaas_core.messages import Lease, Outer
from gpufaas_core.model import CallId, Device, EngineStatus, Explanation, Function, FunctionId, Profile, Seconds
from gpufaas_core.remote_build import BuildConfig
from gpufaas_gateway.spec import FunctionRecord, Namespace, Quota


class FunctionStore(Protocol):
    """
    Keeps what must survive a restart. Calls block, and may come from several threads.

    Every method raises `StorageFailed` when the data cannot be written or read; then nothing has changed.
    """

    def put(self, record: FunctionRecord, worker: WorkerSpec | None = None, function: Function | None = None) -> None:
        """
        Keep *record*, in place of an earlier one of that name and namespace, whose count of calls stays.

        *worker* and *function* are what nodes and the scheduler need to know, for stores from which they learn it.
        """
        ...

    def remove(self, name: str) -> None:
        """Forget the function (``NAME.NAMESPACE``), if it is there. Its profiles stay: they belong to the bundle."""
        ...

    def all(self) -> list[FunctionRecord]:
        """Return every record, ordered by namespace and name."""
        ...

    def save_profile(self, digest: str, kind: str, profile: Profile) -> None:
        """Keep what the bundle *digest* costs on devices of *kind*, in place of what was known."""
        ...

    def profiles(self, digest: str) -> dict[str, Profile]:
        """Return what is known of the bundle *digest*, by device kind."""
        ...

    def add_invocations(self, counts: Mapping[str, int]) -> None:
        """Add to the counts of calls, by ``NAME.NAMESPACE``, all or none; names that are not there are skipped."""
        ...

    def put_namespace(self, namespace: Namespace) -> None:
        """Keep *namespace*, in place of an earlier one of that name."""
        ...

    def remove_namespace(self, name: str) -> None:
        """Forget the namespace, if it is there. What is in it is not touched."""
        ...

    def namespaces(self) -> list[Namespace]:
        """Return every namespace but the default one, which is not kept, ordered by name."""
        ...

    def close(self) -> None: ...


class Quotas(Protocol):
    """What namespaces may use, for those that have a limit. Calls block; every one may raise `StorageFailed`."""

    def put_quota(self, namespace: str, quota: Quota) -> None:
        """Keep *quota*, in place of an earlier one; durable when it returns."""
        ...

    def remove_quota(self, namespace: str) -> None:
        """Let *namespace* have no limit, if it has one."""
        ...

    def quotas(self) -> dict[str, Quota]:
        """Return all that there are, by namespace, ordered by it."""
        ...


class Store(FunctionStore, Quotas, Protocol):
    """What is deployed, and what may be."""


class Secrets(Protocol):
    """
    Values by namespace and name, that only functions are shown. Calls block; every one may raise `StorageFailed`.

    No error and no log has a value in it.
    """

    def names(self, namespace: str) -> list[str]:
        """Return the names in *namespace*, sorted; none when there is no such namespace."""
        ...

    def create(self, namespace: str, name: str, value: bytes) -> None:
        """:raises NameTaken: it exists"""
        ...

    def update(self, namespace: str, name: str, value: bytes) -> None:
        """
        Replace the value; functions that run find it in their files when this returns.

        :raises UnknownName: it does not exist
        """
        ...

    def remove(self, namespace: str, name: str) -> None:
        """:raises UnknownName: it does not exist"""
        ...

    def drop(self, namespace: str) -> None:
        """Remove every secret of *namespace*, if there are any."""
        ...


class ArtifactWriter(Protocol):
    def write(self, data: bytes, /) -> object: ...


class Artifacts(Protocol):
    """Bytes by sha256, immutable. Calls block."""

    def has(self, digest: str) -> bool: ...

    def writer(self, digest: str) -> AbstractContextManager[ArtifactWriter]:
        """
        Take the bytes of *digest*; they are there when the block ends without an exception, and not at all otherwise.

        :raises CorruptArtifact: at the end of the block: the bytes have another digest
        :raises StorageFailed: they could not be written
        """
        ...


class Workers(Protocol):
    """The node or nodes that run workers."""

    async def define(self, spec: WorkerSpec) -> Manifest:
        """
        Install the bundle of *spec* so that leases of its revision can be served, and return what is in it. May be
        asked again for a revision: the later spec counts.

        :raises UnknownArtifact: the bundle, or weights that it names, were never uploaded
        :raises CorruptArtifact: their bytes on disk are not those of their digest
        :raises InvalidSpec: the bundle is malformed
        """
        ...

    async def check(self, spec: WorkerSpec) -> None:
        """
        Import the handler of a defined revision in a scratch process that ends; its output goes to the logs.

        :raises InvalidSpec: it does not import; carries the last line of the traceback
        """
        ...

    async def forget(self, function: FunctionId) -> None:
        """
        No new call of this revision will come. Calls that the scheduler still has (it drains) are served first: the
        node drops the definition once there are none. A revision that was never defined is no error.
        """
        ...

    def devices(self) -> Sequence[Device]: ...

    async def environments(self, constraints: Sequence[Constraint] = ()) -> list[Environment]:
        """
        Return the different Python environments of the nodes that have a device for *constraints*, each with its nodes.
        Nodes that cannot be asked now are left out.
        """
        ...


class Scheduler(Protocol):
    """The engine, as the management routes use it; calls are placed by `PlacementPort`."""

    def deploy(self, function: Function, worker: WorkerSpec) -> None:
        """A revision may be called from now on; *worker*: what the nodes that run it need to know."""
        ...

    def remove(self, function: FunctionId, drain: bool) -> None:
        """Stop placing new calls; those that wait are served (*drain*) or answered ``removed`` at once."""
        ...

    def scale(self, function: FunctionId, copies: int) -> None:
        """Want so many copies of a deployed function from now on, within its bounds; 0 evicts those that idle."""
        ...

    def status(self) -> EngineStatus: ...

    async def explain(self, call: CallId) -> Explanation | None:
        """Why a call of a model function was started where it was, or why it waits; None: not among those known."""
        ...


class FunctionLogs(Protocol):
    """What functions printed; see `gpufaas_core.logs.FunctionLogs`, whose words these are."""

    def query(self, query: LogQuery) -> list[LogLine]:
        """Return the lines, oldest first. Blocks (it may read files); may be called from any thread."""
        ...

    def follow(self, query: LogQuery) -> AsyncIterator[LogLine]:
        """Yield what `query` returns, then each line as it comes, until the logs are closed."""
        ...

    def known(self, name: str, namespace: str) -> bool:
        """Whether there is a line of this function; it may not be deployed (any more, or yet)."""
        ...

    def drop(self, name: str, namespace: str) -> None:
        """Delete what a removed function printed."""
        ...


class ImageBuilder(Protocol):
    """What makes container images of sources."""

    def build(self, config: BuildConfig, context: IO[bytes], secrets: Mapping[str, bytes]) -> AsyncGenerator[str]:
        """
        Build *context*, a tar with a Dockerfile in it, to the image that *config* names, and push it where that is
        asked for; yield what the build prints, line by line. It is ended when the iterator is closed.

        :param secrets: what the Dockerfile mounts at build time, by id; never in a line nor in the image
        :raises InvalidSpec: it cannot be built or pushed; says why in one line
        """
        ...


class CallExchange(Protocol):
    """A call at its worker; see `gpufaas_gpu_manager.exchange.Exchange`."""

    load_s: Seconds
    phases: tuple[tuple[str, Seconds], ...]
    lease: Lease

    @property
    def loading_s(self) -> Seconds:
        """How long it has waited for a worker that still loads; 0.0: it does not, or nobody here knows."""
        ...

    @property
    def end(self) -> Any: ...

    @property
    def unread(self) -> int: ...

    async def answer(self) -> tuple[AnswerHead, bytes, bool]: ...

    async def chunk(self) -> bytes | None: ...

    async def send_body(self, piece: bytes) -> None:
        """:raises LeaseRefused: it was refused before this, which is to go under the next lease"""

    async def end_body(self) -> None:
        """:raises LeaseRefused: as `send_body`"""

    def keep_for(self, spool: AnswerSpool) -> None:
        """What comes of its answer and a slow caller does not read may wait in *spool*, until `close`."""

    def close(self) -> None: ...

    def fail(self, error: GpufaasError) -> None:
        """Whoever waits for it gets *error*; nobody will read on."""


class NodePort(Protocol):
    """Where calls are carried to: a node in this process, or a connection to one."""

    def call(self, lease: Lease, head: CallHead, body: bytes | memoryview) -> CallExchange:
        """:raises LeaseRefused: nothing of it was taken, and the scheduler knows"""


class PlacementPort(Protocol):
    """The scheduler, as a gateway asks it; see `gpufaas_scheduler.service.SchedulerService`."""

    def place(
        self,
        call: CallId,
        function: FunctionId,
        timeout_s: Seconds,
        size: float = 0.0,
        outer: Outer | None = None,
        endless: bool = False,
    ) -> Lease | asyncio.Future[Lease]: ...

    def again(self, call: CallId) -> asyncio.Future[Lease]: ...

    def cancel(self, call: CallId) -> None: ...

    def over(self, call: CallId) -> None: ...
