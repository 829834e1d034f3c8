"""
The decisions of published systems as pure functions: a problem in, an answer out. No clock, no IO, no engine, no state.

Each module has a `Problem` (what `gpufaas solve` reads), `solve`, which returns the answer, `rows`, which returns that
as a table, and `explain`, which returns the working in words, a line each. The same problem gives the same answer.
`problem` reads problems strictly.
"""

from collections.abc import Mapping
from typing import Final

PLANS: Final[Mapping[str, str]] = {
    "hardware": "hardware",
    "variants": "variants",
    "select": "selection",
    "partition": "partition",
    "compute": "placement.compute",
    "size": "placement.size",
}
"""By the name that `gpufaas solve` knows: the module, below this package."""
