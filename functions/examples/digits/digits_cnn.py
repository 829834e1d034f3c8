"""The digit classifier and its images, shared by build.py, handler.py and clients that need images."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DigitsCnn(nn.Module):
    """float32[batch, 1, 8, 8] in 0..1 -> float32[batch, 10], logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 16, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(x.flatten(1), 0.3, self.training)
        return self.out(F.relu(self.hidden(x)))


def split() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """
    Return scikit-learn's 1,797 bundled digits as (images, labels) to train on, and held out: every fifth.

    Images are float64[n, 8, 8] in 0..16, labels int64[n].
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    held_out = torch.arange(len(digits.target)).remainder(5).eq(0).numpy()
    return ((digits.images[~held_out], digits.target[~held_out]), (digits.images[held_out], digits.target[held_out]))
