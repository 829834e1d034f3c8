"""Profiles that are taken (docs/adr/0072): what a worker measures of a batch, and how one joins what was learnt."""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpufaas_core._types import Bytes, Seconds
from gpufaas_core.constraints import DRIVER, TORCH
from gpufaas_core.model import Device, Profile, RatioDoc, Taken

VARIABLE: Final = "GPUFAAS_PROFILE"
"""Set for workers that measure their calls."""
HEADER: Final = b"x-gpufaas-profile"
"""Of a call: how many calls its batch has, and one of the following words, or none."""
TRACE: Final = "trace"
"""Its kernels are recorded."""
PEAK: Final = "peak"
"""The peak memory of the worker is looked at."""


class Measured(Struct, frozen=True):
    """The answer of a worker to a call that ran a batch."""

    wall_s: Seconds
    cpu_s: Seconds
    """Processor time of the worker meanwhile."""
    cores: int
    """That the worker may run on."""
    peak: Bytes = 0
    """Peak memory of the worker; 0: it was not looked at."""
    uses: float | None = None
    """On an emulated device: how much of the compute the batch used, in per cent."""
    kernels: tuple[tuple[Seconds, Seconds, int, int, int, Bytes], ...] = ()
    """Of each: start, end, blocks, threads of a block, registers of a thread, shared memory of a block."""
    gpu: tuple[int, Bytes, int] = (0, 0, 0)
    """Its multiprocessors; shared memory and threads of one."""


def profile_of(taken: Taken, before: Profile | None = None) -> Profile:
    """Return what is expected by *taken*, where calls have not taught it (*before*)."""
    alone = {1: next(iter(taken.batches.values())), **taken.batches}
    one_s = alone[1].p50_s
    # Estimates: the first load, call and measurement of a live copy replace them.
    guess = Profile(taken.load_s, one_s, taken.memory, measured=True, estimated=("load", "call", "memory"))
    known = guess if before is None else before
    seen = {(each.batch, each.share, each.neighbours) for each in known.ratios} | {(1, 0, 0)}
    ratios = [
        RatioDoc(size, 0, neighbours, each.p50_s / one_s, each.timed)
        for neighbours, batches in ((0, alone), (taken.at_once - 1, taken.together))
        for size, each in batches.items()
        if one_s > 0.0 and (size, 0, neighbours) not in seen
    ]
    return replace(known, ratios=(*known.ratios, *ratios), taken=taken)


def joined(learnt: Mapping[str, Profile], taken: Mapping[str, Profile]) -> dict[str, Profile]:
    """Return profiles by kind of device: what calls have taught, and what was taken."""
    found = {kind: replace(each, taken=None) for kind, each in learnt.items()}  # it may be of another need
    for kind, each in taken.items():
        if each.taken is not None:
            found[kind] = profile_of(each.taken, found.get(kind))
    return found


def why_stale(taken: Taken, devices: Iterable[Device]) -> str:
    """Return why *taken* says nothing of *devices*, which are of its kind; empty: it does."""
    for device in devices:
        for name, was, now in (("torch", taken.torch, TORCH), ("the driver", taken.driver, DRIVER)):
            if (found := device.labels.get(now, was)) != was:
                return f"it was taken with {name} {was or 'of no known version'}, and {device.id} has {found}"
    return ""
