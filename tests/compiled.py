"""Which tests are for one form of the engine only (docs/adr/0045)."""

import os

import pytest

from gpufaas_core import compiled

IS_COMPILED = compiled.said() == "compiled"
REQUIRED = "compiled" in os.environ.get("GPUFAAS_REQUIRE", "").split(",")

python_only = pytest.mark.skipif(IS_COMPILED, reason="it looks into Python modules: GPUFAAS_COMPILED=0")
needs_compiled = pytest.mark.skipif(
    not (IS_COMPILED or REQUIRED), reason="the engine is not compiled: make test-compiled"
)
