"""What a node is told when it starts, and where its functions' secrets are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gpufaas_core.model import FunctionId, Seconds
from gpufaas_core.origin import Origins


class SecretFiles(Protocol):
    """Where functions find their secrets as files (gpufaas_adapters.files.secrets)."""

    def mount(
        self, function: FunctionId, namespace: str, names: Sequence[str], *, for_container: bool = False
    ) -> Path: ...

    def unmount(self, function: FunctionId) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    abort_grace_s: Seconds = 10.0
    """How long an abandoned call may run on before its worker is killed for the device's sake."""
    untaken_s: Seconds = 60.0
    """How long a lease that was opened, or that one is void, is kept for a call that has not come."""
    term_grace_s: Seconds = 2.0
    """How long a server that is evicted may take to end by itself: the next one waits for its memory."""
    check_timeout_s: Seconds = 120.0
    """For the import of a handler at deploy: generous, a first import from a cold disk is slow."""
    threads: int = 0
    """Of the math libraries in each worker; 0: the machine's cores divided by its CPU devices."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What every worker gets in its environment, below what its function asks for."""
    secrets: SecretFiles | None = None
    """None: functions have none."""
    origins: Origins | None = None
    """Makes of ``OPENFAAS_URL`` each worker's own; None: all have the same, and their calls are as anybody's."""
