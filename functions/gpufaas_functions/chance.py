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
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Final

_generators: Final[dict[int, Any]] = {}
"""Those that were found, by `id`."""


def find_generators() -> None:
    """Remember the generators that are in memory and were not frozen (`gc.freeze`). Takes 0.1 s with torch."""
    kinds = {kind for base in _bases() for kind in _with_subclasses(base)} - {random.SystemRandom}
    objects = iter(gc.get_objects())
    # torch's are not listed themselves: what refers to them is. In pieces: there are a million references.
    while piece := list(islice(objects, 1000)):
        for each in gc.get_referents(*piece):
            if type(each) in kinds and each is not random._inst:  # which Python seeds after each fork
                _generators[id(each)] = each


def seed_afresh() -> None:
    """Seed them from the kernel, and with them the key by which processes of `multiprocessing` trust each other."""
    for each in _generators.values():
        with suppress(Exception):  # of a class that somebody has derived, and that cannot do it
            _seed(each)
    if processes := sys.modules.get("multiprocessing.process"):
        processes.current_process().authkey = os.urandom(32)


def _bases() -> Iterator[type[Any]]:
    yield random.Random
    for module, name in (("numpy.random", "BitGenerator"), ("numpy.random", "RandomState"), ("torch", "Generator")):
        if kind := getattr(sys.modules.get(module), name, None):
            yield kind


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _seed(generator: Any) -> None:
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(generator, numpy.BitGenerator):
        generator.__setstate__(type(generator)().__getstate__())  # with what `spawn` derives others from
    elif numpy is not None and isinstance(generator, numpy.RandomState):
        state = generator.get_state(legacy=False)
        generator.set_state({**state, "has_gauss": 0})  # drawn and not given out yet; the rest is its bit generator's
    else:
        generator.seed()
