"""What the benchmarks of starts count: misses of an ideal LRU list, phases, what a start adds."""

from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow  # torch is imported


@pytest.mark.parametrize(
    ("sequence", "room", "before", "misses"),
    [
        ([0, 1, 0, 1], 2, [], 2),
        ([0, 1, 2, 0], 2, [], 4),  # 0 was used least recently when 2 came
        ([0, 1, 0, 2, 0], 2, [], 3),
        ([0, 1], 2, [1, 0], 0),
        ([3, 2], 2, [1, 2, 3], 0),
    ],
)
def test_an_lru_list_misses_what_it_dropped(sequence: list[int], room: int, before: list[int], misses: int) -> None:
    from swap import lru_misses

    assert lru_misses(sequence, room, before) == misses


def test_each_device_keeps_the_most_called_models_and_one_place_for_the_others() -> None:
    from swap import kept_misses

    assert kept_misses([0, 1, 0, 2, 3, 0, 1, 3, 4], devices=1, room=2) == 6
    assert kept_misses([0, 1, 0, 2, 3, 0, 1, 3, 4], devices=1, room=3) == 3
    assert kept_misses([0, 0, 1, 1, 2, 3, 2, 3, 4], devices=2, room=2) == 3


@pytest.mark.parametrize(
    ("header", "beyond_ms"),
    [
        ("queue;dur=5, load;dur=60, run;dur=20, load-room;dur=10, load-fork;dur=20, load-load;dur=30", 45),
        ("queue;dur=5.0, load;dur=0.0, run;dur=20.0", 75),
        ("queue;dur=1, load;dur=9, run;dur=2, load-process;dur=4, load-read;dur=3, load-init;dur=2", 92),
    ],
)  # fmt: skip
def test_a_start_adds_what_is_neither_waiting_nor_load_nor_run(header: str, beyond_ms: int) -> None:
    from _starts import beyond_load_and_run, phases

    by_phase = phases(httpx.Response(200, headers={"server-timing": header}))

    assert beyond_load_and_run(0.1, by_phase) == pytest.approx(beyond_ms / 1e3)


def test_the_written_model_runs_by_hand_and_its_weights_leave_the_page_cache(tmp_path: Path) -> None:
    from _starts import MiB, by_hand, into_page_cache, out_of_page_cache, write_layers

    write_layers(tmp_path / "model", 1, width=256)
    weights = tmp_path / "model" / "weights.safetensors"

    with by_hand(1) as hand:
        times, answer = hand.start(tmp_path / "model")
        again = hand.start(tmp_path / "model")[1]

    assert weights.stat().st_size >= MiB
    assert answer == again
    assert 0 < times["load"] < times["all"]
    into_page_cache([weights])
    if out_of_page_cache([weights]):
        pytest.skip("posix_fadvise drops no pages of this file system")
