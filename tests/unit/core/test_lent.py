"""Memory that is lent."""

import mmap

from gpufaas_core.lent import lend
from gpufaas_core.units import MiB


def test_what_was_lent_is_back_when_no_part_of_it_is_left() -> None:
    memory = mmap.mmap(-1, 2 * MiB)
    given_back: list[str] = []
    part = lend(memory, 0, 2 * MiB, given_back.append, "it").cast("B")[:5]
    part[0] = 1
    further = part[:1]
    del part
    assert given_back == []
    assert (further[0], memory[0]) == (1, 1)
    del further
    assert given_back == ["it"]
