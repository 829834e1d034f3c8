"""What an older engine left to this one, which takes over."""

from __future__ import annotations

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, CopyId, Part, Seconds
from gpufaas_core.snapshot import CallDoc, DeviceDoc, EngineDoc, FunctionDoc


class Older:
    """What is known of an older engine."""

    __slots__ = ("adopted", "left", "remembered", "whole")

    def __init__(self) -> None:
        self.left: Left | None = None
        """Its docs, and what has come since; None: after `Serving`, or without an older engine."""
        self.remembered: dict[CallId, tuple[CallDoc, Seconds]] = {}
        """Its calls that may arrive again, and when their docs were written."""
        self.whole: dict[CopyId, tuple[Part, ...]] = {}
        """During a takeover: the parts of the copies with several of which all are there."""
        self.adopted = 0
        """The number of calls that were found running."""


class Left:
    """What an older engine left, and the events that have come since."""

    def __init__(self, event: m.Restored, at: Seconds) -> None:
        self.event = event
        self.events: list[tuple[Seconds, m.Event]] = []
        self._at = at - event.elapsed_s
        """When the newest doc was made, on this engine's clock."""
        every: list[DeviceDoc | FunctionDoc | EngineDoc] = [*event.functions, *event.devices]
        if event.engine is not None:
            every.append(event.engine)
        self._newest = max(((each.epoch, each.at_s) for each in every), default=(0, 0.0))

    def since(self, doc: DeviceDoc | FunctionDoc | EngineDoc) -> Seconds:
        """Return when *doc* was made. That is not known for an epoch older than the newest: it counts as new."""
        epoch, at_s = self._newest
        return self._at - (at_s - doc.at_s) if doc.epoch == epoch else self._at
