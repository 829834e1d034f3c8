"""What workers have in common that are processes of this machine, whichever fork server has forked them."""

import signal

from gpufaas_core.model import Bytes
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.reaper import kill_group
from gpufaas_gpu_manager.worker import Worker


class OwnProcess:
    """`Running` of one that says nothing, and whose memory nobody changes: others replace what they do."""

    waits_for = ""
    death_known_s = 0.5

    def __init__(self, worker: Worker, recipes: Recipes) -> None:
        self.worker = worker
        self._recipes = recipes

    def started(self, pid: int | None) -> None:
        """Its fork has given it process *pid*. None: none, of which the worker is told as of an end."""
        if pid is not None and not self.worker.reaped:
            self.worker.on_started(pid)

    def end(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to its process, its process group and its control group. The fork server kills what is left."""
        if self.worker.limits is not None:
            self.worker.limits.kill()
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self.worker.pid is not None and not self.worker.reaped:
            kill_group(self.worker.pid, number)

    def said_all(self) -> bool:
        return True

    def hear_out(self) -> bool:
        return False

    def limit_to(self, memory: Bytes) -> None: ...

    def in_use(self) -> Bytes:
        return 0

    def close(self) -> None:
        self._recipes.drop_own(self.worker)
