"""
Generators of random numbers that are in memory at a fork: every worker would draw the same. A worker seeds all afresh.

They are found before the fork, whichever module keeps them; Python's own one and those of OpenSSL, `tempfile`, `uuid`
and CUDA look after themselves. A generator that a module has seeded itself looks like any other, and is seeded afresh,
too. Numbers that were drawn before the fork cannot be found.
"""

import gc
import os
import random
import sys
from contextlib import suppress
from itertools import islice
from typing import Any, Final

_KINDS: Final = ("random.Random", "numpy.random.BitGenerator", "numpy.random.RandomState", "torch.Generator")
_generators: Final[dict[int, Any]] = {}
"""Those that were found, by `id`."""


def find_generators() -> None:
    """Remember the generators that are in memory and were not frozen (`gc.freeze`). Takes 0.1 s with torch."""
    parts = [each.rpartition(".") for each in _KINDS]
    kinds = [kind for module, _, name in parts if (kind := getattr(sys.modules.get(module), name, None))]
    for each in kinds:
        kinds += each.__subclasses__()
    wanted, objects = set(kinds), iter(gc.get_objects())
    # torch's are not listed themselves: what refers to them is. In pieces: there are a million references.
    while piece := list(islice(objects, 1000)):
        _generators.update((id(each), each) for each in gc.get_referents(*piece) if type(each) in wanted)
    _generators.pop(id(random._inst), None)  # Python seeds it after each fork


def seed_afresh() -> None:
    """Seed them from the kernel, and with them the key by which processes of `multiprocessing` trust each other."""
    # RandomStates of numpy come before their BitGenerators, whose `SeedSequence` they drop.
    for each in sorted(_generators.values(), key=lambda each: not hasattr(each, "seed")):
        with suppress(Exception):  # of a class that somebody has derived, and that cannot do it
            if hasattr(each, "seed"):
                each.seed()
            else:
                each.__setstate__(type(each)().__getstate__())
    if processes := sys.modules.get("multiprocessing.process"):
        processes.current_process().authkey = os.urandom(32)
