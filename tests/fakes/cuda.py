"""
A GPU that is a folder: modules for `pynvml` and `torch` that keep one account of its memory, a file for each process.

`FolderGpu` writes them to a folder for PYTHONPATH. Workers, their allocator's limit and the driver's figures behave as
on a GPU, and nothing is computed. What the modules say of real ones is from their documentation.
"""

import os
from pathlib import Path

_PYNVML = """
import gpu_folder

class NVMLError(Exception):
    pass

class Memory:
    def __init__(self):
        self.total, self.used = gpu_folder.TOTAL, gpu_folder.used()

class Process:
    def __init__(self, pid, size):
        self.pid, self.usedGpuMemory = pid, size

def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "0.0"
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetHandleByUUID(uuid): return 0
def nvmlDeviceGetMigMode(handle): raise NVMLError("Not Supported")
def nvmlDeviceGetName(handle): return "Folder"
def nvmlDeviceGetUUID(handle): return "GPU-folder"
def nvmlDeviceGetMinorNumber(handle): raise NVMLError("Not Supported")
def nvmlDeviceGetMemoryInfo(handle): return Memory()
def nvmlDeviceGetComputeRunningProcesses(handle): return [Process(*each) for each in gpu_folder.sizes().items()]
def nvmlDeviceGetMPSComputeRunningProcesses_v3(handle): raise NVMLError("Not Supported")
"""

_TORCH = """
import gpu_folder
from types import SimpleNamespace

class OutOfMemoryError(RuntimeError):
    pass

now = peak = 0
share = 1.0

def take(size):
    \"\"\"Allocate so many bytes, until `give`.\"\"\"
    global now, peak
    _context()
    if now + size > share * gpu_folder.TOTAL or size > gpu_folder.TOTAL - gpu_folder.used():
        raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size >> 20} MiB.")
    now += size
    peak = max(peak, now)
    gpu_folder.hold(gpu_folder.CONTEXT + gpu_folder.KERNELS + now)

def give():
    global now
    now = 0
    gpu_folder.hold(gpu_folder.CONTEXT + gpu_folder.KERNELS)

def _context():
    if not gpu_folder.mine():
        if gpu_folder.CONTEXT > gpu_folder.TOTAL - gpu_folder.used():
            raise OutOfMemoryError("CUDA out of memory.")
        gpu_folder.hold(gpu_folder.CONTEXT)

def zeros(count, device): _context()
def set_num_threads(count): pass

def _set_share(fraction, device):
    global share
    share = fraction

cuda = SimpleNamespace(
    mem_get_info=lambda device: (gpu_folder.TOTAL - gpu_folder.used(), gpu_folder.TOTAL),
    synchronize=lambda device: None,
    memory_reserved=lambda device: now,
    max_memory_reserved=lambda device: peak,
    set_per_process_memory_fraction=_set_share,
    empty_cache=lambda: None,
    is_initialized=lambda: gpu_folder.mine() > 0,
)
"""

_FOLDER = """
import os

HOME = {home!r}
TOTAL, CONTEXT, KERNELS = {total}, {context}, {kernels}

def sizes():
    found = {{}}
    for name in os.listdir(HOME):
        if os.path.exists(f"/proc/{{name}}"):
            with open(f"{{HOME}}/{{name}}") as file:
                found[int(name)] = int(file.read() or 0)
    return found

def used(): return sum(sizes().values())
def mine(): return sizes().get(os.getpid(), 0)

def hold(size):
    with open(f"{{HOME}}/new-{{os.getpid()}}", "w") as file:
        file.write(str(size))
    os.rename(file.name, f"{{HOME}}/{{os.getpid()}}")
    with open(f"{{HOME}}/../most", "a") as file:
        file.write(f"{{used()}} {{size}}\\n")
"""


class FolderGpu:
    """See module."""

    def __init__(self, home: Path, total: int, context: int, kernels: int) -> None:
        """:param kernels: memory that a process takes when it first computes, and torch does not know of"""
        self.modules = home / "modules"
        self._most = home / "most"
        self._held = home / "held"
        self._held.mkdir(parents=True)
        (self.modules / "safetensors").mkdir(parents=True)
        (self.modules / "safetensors" / "__init__.py").touch()
        (self.modules / "safetensors" / "torch.py").touch()
        folder = _FOLDER.format(home=str(home / "held"), total=total, context=context, kernels=kernels)
        for name, text in (("pynvml", _PYNVML), ("torch", _TORCH), ("gpu_folder", folder)):
            (self.modules / f"{name}.py").write_text(text)

    def held(self) -> dict[int, int]:
        """Return the bytes that each living process holds, by its id."""
        files = (each for each in self._held.iterdir() if each.name.isdecimal())
        return {int(each.name): int(each.read_text() or 0) for each in files if Path(f"/proc/{each.name}").exists()}

    def fill(self, size: int) -> None:
        """Have this process hold so many bytes."""
        (self._held / str(os.getpid())).write_text(str(size))

    @property
    def most(self) -> int:
        """The most bytes that all processes have held at once."""
        return max(all_held for all_held, _ in self._seen())

    @property
    def most_of_one(self) -> int:
        return max(one for _, one in self._seen())

    def _seen(self) -> list[tuple[int, int]]:
        return [(int(all_held), int(one)) for all_held, one in map(str.split, self._most.read_text().splitlines())]
