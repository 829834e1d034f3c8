"""The decoder and its letters, shared by build.py and handler.py."""

from torch import Tensor, nn
from torch.nn import functional as F

WINDOW = 24
"""The letters that it sees of what was written so far."""
LETTERS = "\n !'*,-.:;?" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ZenDecoder(nn.Module):
    """int64[batch, WINDOW] -> float32[batch, letters], logits of the next letter."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), 16)
        self.hidden = nn.Linear(WINDOW * 16, 256)
        self.out = nn.Linear(256, len(LETTERS))

    def forward(self, window: Tensor) -> Tensor:
        return self.out(F.relu(self.hidden(self.letters(window).flatten(1))))


def window(text: str) -> list[int]:
    """Return the end of *text* as the decoder sees it; letters that it does not know are blanks."""
    return [max(LETTERS.find(each), 0) if each in LETTERS else 1 for each in text[-WINDOW:].rjust(WINDOW, "\n")]
