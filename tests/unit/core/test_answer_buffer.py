"""The unread part of an answer: in memory, then in a file, and bounded in both."""

import asyncio
import sys
from pathlib import Path

import pytest
from tests.waiting import eventually

from gpufaas_core import answer_buffer
from gpufaas_core.answer_buffer import AnswerBuffer
from gpufaas_core.answer_spool import AnswerSpool
from gpufaas_core.errors import GpufaasError
from gpufaas_core.wire.heads import EndHead

PIECE = bytes(range(256)) * 256  # 64 KiB


class Filled(AnswerBuffer):
    """One of 256 KiB whose source is the test."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop(), 256 * 1024)
        self.paused = False

    def fill(self, pieces: int, piece: bytes = PIECE) -> int:
        """Keep pieces until the source is to pause; return how many."""
        for count in range(pieces):
            if self.paused:
                return count
            self._pass_or_keep(piece)
        return pieces

    def finish(self, error: GpufaasError | None = None) -> None:
        self.end, self.error = EndHead(0.0), error
        self._wake_reader()

    async def goes_on(self) -> None:
        """Return once the source may send more."""
        await eventually(lambda: not self.paused)

    def _wake(self) -> None:
        self._wake_reader()

    def _pause_source(self) -> bool:
        self.paused = True
        return True

    def _resume_source(self) -> None:
        self.paused = False


async def read(buffer: AnswerBuffer) -> bytes:
    whole = b""
    while (piece := await buffer.chunk()) is not None:
        whole += piece
    return whole


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_buffer, "SLOW_S", 0.01)


async def test_a_source_is_paused_and_goes_on_as_its_reader_reads() -> None:
    buffer = Filled()

    assert buffer.fill(100) == 4
    await asyncio.sleep(5 * answer_buffer.SLOW_S)
    assert buffer.paused, "there is no file to go on to"
    await buffer.chunk()
    await buffer.chunk()
    await buffer.chunk()
    assert not buffer.paused


async def test_a_source_whose_reader_is_slow_is_not_made_to_wait_for_him(tmp_path: Path) -> None:
    buffer, spool = Filled(), AnswerSpool(tmp_path)
    buffer.keep_for(spool)

    kept = buffer.fill(100)
    await buffer.goes_on()
    kept += buffer.fill(100 - kept)
    buffer.finish()

    assert kept == 100
    assert spool.used == 96 * len(PIECE)
    assert await read(buffer) == PIECE * 100
    buffer.close()
    assert spool.used == 0
    assert not list(tmp_path.iterdir())


async def test_what_one_answer_and_all_of_them_may_have_on_disk_is_bounded(tmp_path: Path) -> None:
    spool = AnswerSpool(tmp_path, each=10 * len(PIECE), whole=15 * len(PIECE))
    first, second, third = Filled(), Filled(), Filled()
    kept = []
    for each in (first, second, third):
        each.keep_for(spool)
        each.fill(4)
        if spool.has_room:
            await each.goes_on()
        else:
            await asyncio.sleep(5 * answer_buffer.SLOW_S)

        kept.append(each.fill(100))

    assert kept == [10, 5, 0]
    first.close()
    await third.goes_on()
    assert third.fill(100) == 10
    second.close()
    third.close()
    assert spool.used == 0


async def test_a_reader_who_has_read_all_of_his_file_goes_on_although_others_have_the_disk(tmp_path: Path) -> None:
    spool = AnswerSpool(tmp_path, each=10 * len(PIECE), whole=15 * len(PIECE))
    first, second = Filled(), Filled()
    for each in (first, second):
        each.keep_for(spool)
        each.fill(4)
        await each.goes_on()
        each.fill(100)
    assert second.paused

    while second.unread:
        await second.chunk()

    assert not second.paused, "nothing else would wake its function before the time limit"
    first.close()
    second.close()


async def test_the_file_of_an_answer_without_end_does_not_grow_although_its_reader_never_catches_up(
    tmp_path: Path,
) -> None:
    spool = AnswerSpool(tmp_path, each=10 * len(PIECE))
    buffer = Filled()
    buffer.keep_for(spool)
    sent = b""
    read_back = b""
    for number in range(200):
        if not buffer.paused:
            piece = number.to_bytes(2, "big") * 20_001  # of a size that does not divide the file's
            sent += piece
            buffer._pass_or_keep(piece)
        elif not read_back:
            await buffer.goes_on()
            read_back += await buffer.chunk() or b""
        else:
            read_back += await buffer.chunk() or b""
        assert spool.used <= 10 * len(PIECE)
    assert len(sent) > 30 * len(PIECE)
    buffer.finish()

    assert read_back + await read(buffer) == sent
    buffer.close()
    assert spool.used == 0


async def test_a_full_disk_makes_the_source_wait_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = Filled()
    buffer.keep_for(AnswerSpool(tmp_path))
    buffer.fill(4)
    await buffer.goes_on()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    assert buffer.fill(2) == 2
    monkeypatch.setattr("os.pwrite", full)
    assert buffer.fill(5) == 1
    assert buffer.paused
    monkeypatch.undo()
    whole = b"".join([await buffer.chunk() or b"" for _ in range(6)])
    assert not buffer.paused
    buffer.finish()
    assert whole + await read(buffer) == PIECE * 7
    buffer.close()


async def test_small_pieces_are_read_together_and_cost_what_they_take() -> None:
    """A function that sends single bytes: each would be a write of its own, and 8 MiB of them half a GB of objects."""
    buffer = Filled()

    kept = buffer.fill(1_000_000, b"x")

    assert kept * sys.getsizeof(b"x") < 2 * 256 * 1024
    assert await buffer.chunk() == b"x" * kept


async def test_an_answer_that_breaks_off_gives_what_came_first(tmp_path: Path) -> None:
    buffer = Filled()
    buffer.keep_for(AnswerSpool(tmp_path))
    buffer.fill(4)
    await buffer.goes_on()
    buffer.fill(4)
    buffer.finish(GpufaasError("broke off"))

    size = sum([len(await buffer.chunk() or b"") for _ in range(5)])
    assert size == 8 * len(PIECE)
    with pytest.raises(GpufaasError, match="broke off"):
        await buffer.chunk()
    buffer.close()
