"""The gateway is installed without torch, and starts without it."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy", "safetensors"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import gpufaas_async_calls, gpufaas_gateway
for room in (gpufaas_gateway, gpufaas_async_calls):
    for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
assert "torch" not in sys.modules
"""


def test_every_module_of_the_gateway_imports_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stderr
