"""A pod's output, followed to its end. A stream that breaks is opened again behind its last line."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Final

from gpufaas_core.model import Seconds
from gpufaas_gpu_manager.launch.kubernetes_api import ApiError, ApiLost, ApiServer
from gpufaas_gpu_manager.launch.pod_manifest import CONTAINER
from gpufaas_gpu_manager.line_limit import LineLimit

log = logging.getLogger(__name__)

_STAMP: Final = re.compile(r"\d{4}-\d\d-\d\dT")
_AGAIN_S: Final[Seconds] = 1.0


class PodLog:
    """
    See module.

    :param on_lines: given the lines
    :param is_dead: whether the container has ended: then a stream that ends is complete
    """

    def __init__(
        self, server: ApiServer, pod: str, on_lines: Callable[[list[str]], None], is_dead: Callable[[], bool]
    ) -> None:
        self._server = server
        self._pod = pod
        self._on_lines = on_lines
        self._is_dead = is_dead
        self._limit = LineLimit(time.monotonic())
        self._last = ""
        """The timestamp of the newest line."""

    async def follow(self) -> None:
        """Return when there will be no more lines."""
        while True:
            ended = self._is_dead()
            try:
                async for piece in self._server.log(self._pod, CONTAINER, self._last):
                    self._limit.feed(piece)
                    await self._hand_on()
                ended = True  # the server follows the container to its end
            except ApiError as exc:
                log.debug("kubernetes.no_log pod=%s: %s", self._pod, exc)
                ended = ended or exc.status == 404
            except ApiLost as exc:
                log.debug("kubernetes.log_lost pod=%s: %s", self._pod, exc)
            self._on_lines(self._new(self._limit.end(time.monotonic())))
            if ended:
                return
            await asyncio.sleep(_AGAIN_S)

    async def _hand_on(self) -> None:
        """Hand on the lines that have come, at the rate that `LineLimit` allows; the server waits meanwhile."""
        while True:
            if lines := self._new(self._limit.turn(time.monotonic())):
                self._on_lines(lines)
            pause = self._limit.wait()
            if not pause:
                return
            await asyncio.sleep(pause)

    def _new(self, stamped: list[str]) -> list[str]:
        """Return the lines after the last one, without timestamps: a stream that was opened again repeats some."""
        lines = []
        for each in stamped:
            stamp, _, text = each.partition(" ")
            if not _STAMP.match(stamp):
                lines.append(each)  # the rest of a line that was cut
            elif not self._last or stamp > self._last:
                self._last = stamp
                lines.append(text)
        return lines
