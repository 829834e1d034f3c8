"""What workers have in common that are processes of this machine, whichever fork server has forked them."""

import signal

from gpufaas_gpu_manager.disk_watch import watch_disk
from gpufaas_gpu_manager.launch.recipes import Recipes
from gpufaas_gpu_manager.reaper import kill_group
from gpufaas_gpu_manager.running import Running
from gpufaas_gpu_manager.worker import Worker


class OwnProcess(Running):
    """One that says nothing, and whose memory nobody changes: others replace what they do."""

    def __init__(self, worker: Worker, recipes: Recipes) -> None:
        self.worker = worker
        self.recipes = recipes

    def started(self, pid: int | None) -> None:
        """Its fork has given it process *pid*. None: none, of which the worker is told as of an end."""
        if pid is not None and not self.worker.reaped:
            self.worker.on_started(pid)
            watch_disk(self.worker)

    def kill(self) -> None:
        """Send SIGKILL to its process, its process group and its control group. The fork server kills what is left."""
        if self.worker.limits is not None:
            self.worker.limits.kill()
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self.worker.pid is not None and not self.worker.reaped:
            kill_group(self.worker.pid, number)

    def close(self) -> None:
        self.recipes.drop_own(self.worker)
