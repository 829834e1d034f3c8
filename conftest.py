"""What holds for all tests; those of tests/ share more in tests/conftest.py."""

import os
import sys

from hypothesis import settings
from tests.examples import LIGHT

pytest_plugins = ["tests.costs", "tests.leftovers"]

# How long an example takes is a matter of what else the machine does: no deadline. --hypothesis-profile chooses.
settings.register_profile("full", deadline=None)
settings.register_profile(LIGHT, deadline=None, max_examples=10, derandomize=True)
settings.load_profile("full")

# Images of Python often set it. Each process that a test starts, and there are hundreds, would compile all modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_make_parametrize_id(val: object) -> str | None:
    """A long text is not in the name of a test: Linux starts no process with an environment that has such a name."""
    if not isinstance(val, str | bytes) or len(val) <= 200:
        return None
    text = val if isinstance(val, str) else val.decode("ascii", "backslashreplace")
    return f"{ascii(text[:50])[1:-1]}-{len(val)}"
