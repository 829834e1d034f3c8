"""The gateway's ports. `adapters/` and `cluster/` implement them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.bundle import Manifest, WorkerSpec
from gpufaas_core.constraints import Constraint
from gpufaas_core.environment import Environment
from gpufaas_core.errors import GpufaasError
from gpufaas_core.explanation import Explanation
from gpufaas_core.logs import LogLine, LogQuery
from gpufaas_core.messages import Grant, Outer
from gpufaas_core.model import Asked, CallId, Device, EngineStatus, Function, FunctionId, Profile, Seconds, Taken
from gpufaas_core.wire.heads import AnswerHead, CallHead, EndHead
from gpufaas_gateway.history import Revision
from gpufaas_gateway.spec import FunctionRecord, Namespace, Quota


class Store(Protocol):
    """
    Keeps functions, namespaces and their quotas over restarts. Calls block, and may come from several threads.

    Each method raises `StorageFailed` if it cannot read or write; then nothing has changed.
    """

    def put(
        self,
        record: FunctionRecord,
        worker: WorkerSpec | None = None,
        function: Function | None = None,
        noted: Sequence[Revision] = (),
        seen: str | None = None,
    ) -> None:
        """
        Store *record*, replacing an earlier one of the function, whose number of calls is kept; in the same step its
        history becomes `history.noting` of *noted*.

        :param worker: like *function*, for stores from which nodes and the scheduler read
        :param seen: the state of the record that is replaced, empty: there is none; None: whatever is there
        :raises Overtaken: the record there has another state than *seen*
        """

    def history(self, name: str) -> list[Revision]:
        """Return the last revisions of ``NAME.NAMESPACE``, newest first; none if there is no such function."""

    def remove(self, name: str) -> None:
        """
        Remove the function ``NAME.NAMESPACE``, if it is there, and its history. Its profiles stay: they belong to the
        bundle.
        """

    def all(self) -> list[FunctionRecord]:
        """Return all records, sorted by namespace and name."""

    def save_profile(self, digest: str, kind: str, profile: Profile) -> None:
        """Store the profile of *digest* (`WorkerSpec.profiled`) on devices of *kind*, replacing an earlier one."""

    def profiles(self, digest: str) -> dict[str, Profile]:
        """Return the profiles of *digest* (`WorkerSpec.profiled`) by kind of device."""

    def add_invocations(self, counts: Mapping[str, int]) -> None:
        """Add to the numbers of calls by ``NAME.NAMESPACE``, all or none. Unknown names are skipped."""

    def put_namespace(self, namespace: Namespace) -> None:
        """Store *namespace*, replacing an earlier one of that name."""

    def remove_namespace(self, name: str) -> None:
        """Remove the namespace, if it is there, but nothing that is in it."""

    def namespaces(self) -> list[Namespace]:
        """Return all namespaces except the default one, which is not stored, sorted by name."""

    def put_quota(self, namespace: str, quota: Quota) -> None:
        """Store *quota*, replacing an earlier one. It is durable when this returns."""

    def remove_quota(self, namespace: str) -> None:
        """Remove the quota of *namespace*, if it has one."""

    def quotas(self) -> dict[str, Quota]:
        """Return all quotas by namespace, sorted by it."""


class SecretStore(Protocol):
    """
    Keeps secrets by namespace and name. Calls block; each may raise `StorageFailed`.

    Values must never appear in errors or logs.
    """

    def names(self, namespace: str) -> list[str]:
        """Return the names in *namespace*, sorted; none if there is no such namespace."""

    def create(self, namespace: str, name: str, value: bytes) -> None:
        """:raises NameTaken: it exists"""

    def update(self, namespace: str, name: str, value: bytes) -> None:
        """
        Replace the value. When this returns, running functions find it in their files.

        :raises UnknownName: it does not exist
        """

    def remove(self, namespace: str, name: str) -> None:
        """:raises UnknownName: it does not exist"""

    def drop(self, namespace: str) -> None:
        """Remove all secrets of *namespace*."""


class ArtifactWriter(Protocol):
    def write(self, data: bytes, /) -> object: ...


class Artifacts(Protocol):
    """Immutable bytes by sha256. Calls block."""

    def has(self, digest: str) -> bool: ...

    def writer(self, digest: str) -> AbstractContextManager[ArtifactWriter]:
        """
        Store the bytes of *digest*. They are kept if the block ends without an exception, and dropped otherwise.

        :raises CorruptArtifact: raised at the end of the block: the bytes have another digest
        :raises StorageFailed: they could not be written
        """


class Workers(Protocol):
    """The node or nodes that run workers."""

    async def define(self, spec: WorkerSpec) -> Manifest:
        """
        Install the bundle of *spec*, so that its revision can be called, and return its manifest. A second call for
        the same revision replaces the spec.

        :raises UnknownArtifact: the bundle, or weights that it names, were never uploaded
        :raises CorruptArtifact: their bytes on disk are not those of their digest
        :raises InvalidSpec: the bundle is malformed
        """

    async def check(self, spec: WorkerSpec) -> None:
        """
        Import the handler of a defined revision in a process of its own. Its output goes to the logs.

        :raises InvalidSpec: the import failed; has the last line of the traceback
        """

    async def forget(self, function: FunctionId) -> None:
        """
        Drop the definition of a revision that gets no new calls, once the calls that the scheduler still has are
        served. Does nothing for a revision that was never defined.
        """

    def devices(self) -> Sequence[Device]: ...

    async def environments(self, constraints: Sequence[Constraint] = ()) -> list[Environment]:
        """
        Return the different Python environments, each with its nodes, of the nodes that have a device for
        *constraints*. Nodes that do not answer are left out.
        """


class Scheduler(Protocol):
    """The scheduler, as management routes use it."""

    def deploy(self, function: Function, worker: WorkerSpec, succeeds: FunctionId | None = None) -> None:
        """
        Add a revision, which may be called from now on; *worker* is for the nodes that run it. It is loaded as often as
        the one that it *succeeds*, and beside that one.
        """

    def remove(self, function: FunctionId, drain: bool) -> None:
        """Stop placing new calls. Waiting calls are served if *drain*, else answered ``removed`` at once."""

    def scale(self, function: FunctionId, copies: int) -> None:
        """Set the desired copies of a deployed function, within its bounds. 0 evicts idle copies."""

    async def probe(self, function: Function, worker: WorkerSpec) -> None:
        """
        Add a revision that is in no store. It ends with `end_probe`, and with the gateway.

        :raises GrantRefused: no scheduler leads
        """

    def end_probe(self, function: FunctionId) -> None:
        """Remove it, and what it still has. Does nothing if it is not there."""

    def profiled(self, function: FunctionId, kind: str, taken: Taken) -> None:
        """A profile of a function was taken on a device of this kind, and is stored."""

    def status(self) -> EngineStatus: ...

    async def explain(self, call: CallId) -> Explanation | None:
        """Return why a call was started where it was, or waits; None if the call is not known."""


class LogReader(Protocol):
    """Reads what functions printed: `gpufaas_core.logs.FunctionLogs`, or the logs of all nodes."""

    def query(self, query: LogQuery) -> list[LogLine]:
        """Return the lines, oldest first. Blocks; may be called from any thread."""

    def follow(self, query: LogQuery) -> AsyncIterator[LogLine]:
        """Yield what `query` returns, then each line as it comes, until the logs are closed."""

    def known(self, name: str, namespace: str) -> bool:
        """Return whether there are lines of this function, also if it is not deployed."""

    def drop(self, name: str, namespace: str) -> None:
        """Delete what a removed function printed."""


class CallExchange(Protocol):
    """A call at its worker; see `gpufaas_gpu_manager.exchange.Exchange`."""

    load_s: Seconds
    phases: tuple[tuple[str, Seconds], ...]
    tier: str
    grant: Grant
    resume: Callable[[], None] | None
    """If it is set, the reader awaits `PAUSE`, and this goes on with him (`Driven.resume`)."""
    sink: Callable[[bytes], bool] | None
    """If it is set, pieces of the body go there before they wait for `chunk`; False: it does not take one now."""

    @property
    def loading_s(self) -> Seconds:
        """How long it has waited for a worker that still loads; 0.0: it does not, or nobody here knows."""

    def when_runs(self, tell: Callable[[], None]) -> None:
        """Call *tell* when a worker takes the call; now, if one has."""

    @property
    def silent(self) -> bool:
        """Whether `answer` would wait."""

    @property
    def end(self) -> EndHead | None:
        """How its function ended; None: it has not."""

    @property
    def unread(self) -> int: ...

    async def answer(self) -> tuple[AnswerHead, bytes | memoryview, bool]: ...

    async def chunk(self) -> bytes | None: ...

    async def send_body(self, piece: bytes) -> None:
        """:raises GrantRefused: it was refused before this, which is to go under the next grant"""

    async def end_body(self) -> None:
        """:raises GrantRefused: as `send_body`"""

    def keep_for(self, spool: AnswerSpool) -> None:
        """What comes of its answer and a slow caller does not read may wait in *spool*, until `close`."""

    def close(self) -> None: ...

    def fail(self, error: GpufaasError) -> None:
        """The reader that waits for it gets *error*; nobody will read on."""


class NodePort(Protocol):
    """Where calls are carried to: a node in this process, or a connection to one."""

    def call(self, grant: Grant, head: CallHead, body: bytes | memoryview) -> CallExchange:
        """:raises GrantRefused: nothing of it was taken, and the scheduler knows"""


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
        asked: Asked | None = None,
    ) -> Grant | asyncio.Future[Grant]: ...

    def on_grant(self, call: CallId, begin: Callable[[Grant], None]) -> None:
        """Have *begin* called with the grant of *call*, if it waits for one, before its future has it."""

    def again(self, call: CallId) -> asyncio.Future[Grant]: ...

    def cancel(self, call: CallId) -> None: ...

    def over(self, call: CallId) -> None: ...
