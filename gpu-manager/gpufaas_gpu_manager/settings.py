"""The settings of a node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_core.origin import Origins
from gpufaas_gpu_manager.isolation.ids import Uids
from gpufaas_gpu_manager.isolation.walls import Walls


class SecretFiles(Protocol):
    """Secrets of functions as files (gpufaas_adapters.files.secrets)."""

    def mount(
        self, function: FunctionId, namespace: str, names: Sequence[str], *, for_container: bool = False, uid: int = 0
    ) -> Path: ...

    def unmount(self, function: FunctionId) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    abort_grace_s: Seconds = 10.0
    """
    How long an abandoned call may run on before its worker is killed, but no longer than 1 s beyond its time limit; and
    a worker that gives no sign of life, if no caller waits for what it has begun.
    """
    untaken_s: Seconds = 60.0
    """How long a grant, or the note that one is void, is kept for a call that has not arrived."""
    term_grace_s: Seconds = 2.0
    """How long a worker that is evicted may take to end by itself; the next worker waits for its memory."""
    check_timeout_s: Seconds = 120.0
    """For the import of a handler at deploy. A first import from a cold disk is slow."""
    threads: int = 0
    """The threads of the math libraries in each worker; 0: the machine's cores divided by its CPU devices."""
    standby: int = 0
    """Blank processes that wait to become workers (standbys.py), for each home; 0: none."""
    park: Literal["auto", "on", "off"] = "off"
    """Evicted workers are parked, within the budget for weights in host memory: those of CPU devices, all, none."""
    env: Mapping[str, str] = field(default_factory=dict)
    """In the environment of every worker; a function's own variables replace these."""
    secrets: SecretFiles | None = None
    """None: functions have no secrets."""
    sockets: Path | None = None
    """A directory for those of the unix sockets on which servers may listen in place of a port; None: they cannot."""
    scratch: Path | None = None
    """A directory for the scratch directories of workers that are processes of this machine; None: they have none."""
    origins: Origins | None = None
    """Gives each worker an ``OPENFAAS_URL`` of its own; None: all have the same, and their calls have no origin."""
    isolation: Walls = field(default_factory=Walls)
    """What holds the workers that are processes of this machine."""
    uids: Uids | None = None
    """Those of functions; None: their workers have the platform's."""

    def parks(self, torch_device: str) -> bool:
        """Whether workers of such a device are parked."""
        return self.park == "on" or (self.park == "auto" and torch_device == "cpu")
