"""What kernels ask for of a GPU's multiprocessors, and its mean over time."""

import pytest

from gpufaas_core.taken import Measured
from gpufaas_scheduler.plans.placement.kernels import (
    H200,
    V100,
    Kernel,
    Run,
    blocks_of_one,
    fit_together,
    highest,
    mean,
    share,
    wsm,
)

KIB = 1024


@pytest.mark.parametrize(
    ("kernel", "v100", "h200"),
    [
        (Kernel(160, 256, 64), 50, 30.3),
        (Kernel(100, 128, 32, 48 * KIB), 62.5, 18.9),
        (Kernel(392, 256, 128, 33 * KIB), 100, 100),
        (Kernel(1, 1024, 32), 1.25, 0.76),
    ],
)
def test_the_share_of_the_multiprocessors(kernel: Kernel, v100: float, h200: float) -> None:
    assert share(kernel, V100) == v100
    assert share(kernel, H200) == pytest.approx(h200, abs=0.05)


def test_registers_limit_how_many_blocks_share_a_multiprocessor() -> None:
    assert blocks_of_one(Kernel(160, 256, 64), V100) == 4


def test_a_block_too_large_for_a_multiprocessor_is_refused() -> None:
    with pytest.raises(ValueError, match="needs more than a multiprocessor has"):
        share(Kernel(1, 64, shared=97 * KIB), V100)


@pytest.mark.parametrize(("second", "fit"), [(20, True), (40, False)])
def test_kernels_fit_together_if_there_are_multiprocessors_for_both(second: int, fit: bool) -> None:
    assert fit_together([Kernel(50, 2048), Kernel(second, 2048)], V100) is fit


def test_kernels_that_overlap_add_up_and_gaps_count_as_nothing() -> None:
    runs = [Run(0, 2, 60), Run(1, 3, 30), Run(5, 10, 10)]

    assert highest(runs) == 90
    assert mean(runs) == (60 + 90 + 30 + 0 * 2 + 10 * 5) / 10
    assert (highest([]), mean([])) == (0, 0)


def test_wsm_of_a_traced_batch_weighs_kernels_by_their_time() -> None:
    """One kernel fills 40 of 80 multiprocessors for 1 s, another one all of them for 3 s; a gap of 1 s counts as 0."""
    kernels = ((0.0, 1.0, 40, 1024, 64, 0), (2.0, 5.0, 500, 1024, 64, 0))
    measured = Measured(5.0, 0.1, 1, kernels=kernels, gpu=(80, 96 * 1024, 1024))

    assert wsm(measured) == pytest.approx((50 + 3 * 100) / 5)
    assert wsm(Measured(1.0, 1.0, 1)) == 0.0
