"""The port behind which a worker runs."""

from typing import Protocol

from gpufaas_core.model import Bytes, Seconds


class Running(Protocol):
    """
    How one worker runs: a process forked from the fork server, a program, a container.

    It calls its worker: `on_started` when there is a process; `calls.on_slots`, then `on_ready`; `on_failed` with the
    reason of a failure; `on_reaped` once, when nothing of it is left. After `start`, unless that raised, `on_reaped`
    always comes.
    """

    waits_for: str = ""
    """What the error says that a stuck load has not done: ``to listen on port 8080``. Empty: nothing."""

    death_known_s: Seconds = 0.5
    """
    How long it may take until its end is known here. A broken connection mostly means that the worker died: the error
    for the caller waits so long for the reason.
    """

    async def start(self) -> None:
        """:raises GpufaasError, OSError: nothing was started"""

    def end(self) -> None:
        """End it in an orderly way: it was evicted, and runs no call."""
        self.kill()

    def kill(self) -> None:
        """End it and all that it started, at once. May be called repeatedly, and before there is a process."""

    def said_all(self) -> bool:
        """Whether all output of a worker that is gone was read."""
        return True

    def hear_out(self) -> bool:
        """
        The worker is gone: read all that it has sent, at any pace of its callers. What waits in the kernel is a few MB.

        :return: whether some of it still waits
        """
        return False

    def limit_to(self, memory: Bytes) -> None:  # noqa: ARG002 - the port's
        """Hold it to *memory* bytes from now on, if its limit can change."""
        return

    def in_use(self) -> Bytes:
        """Return the memory that counts against its limit now, in bytes; 0: it is not measured."""
        return 0

    def close(self) -> None:
        """Release what this side holds; the worker is gone, or the node closes."""
        return
