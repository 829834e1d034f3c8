"""Whether a function declares the memory that it needs, by what was measured of it."""

from typing import Final

from gpufaas_core.reservations import peak_of
from gpufaas_core.units import Bytes, GiB, MiB, format_bytes
from gpufaas_gateway.catalogue import Deployed

_CALLS: Final = 10
"""Before so many calls, its peak may be that of small inputs."""
_MUCH: Final = 1.5
"""A function that declares more than this many times its peak is told of less."""
_CLOSE: Final = 1.1
"""One that declares less than this many times its peak is told of more."""


def memory_advice(function: Deployed) -> str | None:
    """
    Return in one line what *function* should declare instead; None: it declares none, what it declares fits, or it is
    not known yet. Programs and images are not measured.
    """
    declared, options = function.options.memory, function.options
    needs = [each.occupation for each in function.profiles.values() if each.measured and "memory" not in each.estimated]
    if not (declared and needs) or function.stats.invocations < _CALLS or function.spec.kind == "server":
        return None
    own = function.spec.memory - declared  # of a worker that is a process of its own: it comes on top
    need = max(needs) - own
    peak = peak_of(need)
    better = _rounded(need)
    name, unit = ("gpufaas.memory", "MiB") if options.device_memory else ("limits.memory", "Mi")
    if declared < peak * _CLOSE:
        return (
            f"Uses up to {format_bytes(peak)} and declares {format_bytes(declared)}, so that it may run out of memory: "
            f"{name}: {better // MiB}{unit} leaves room."
        )
    if declared > peak * _MUCH and better < declared:
        return (
            f"Uses at most {format_bytes(peak)} of the {format_bytes(declared)} that it declares: "
            f"{name}: {better // MiB}{unit} frees {format_bytes(declared - better)}."
        )
    return None


def _rounded(size: Bytes) -> Bytes:
    """Return *size*, and what makes it a number that is easy to read."""
    step = 256 * MiB if size > GiB else 50 * MiB
    return max(1, -(-size // step)) * step
