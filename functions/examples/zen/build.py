"""Trains the decoder on the Zen of Python, which comes with Python: seeded, a few seconds, at least 99 % right."""

import codecs
import contextlib
import io

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from zen_decoder import LETTERS, ZenDecoder, window

STEPS = 80


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
        import this
    text = codecs.decode(this.s, "rot13")
    x = torch.tensor([window(text[:at]) for at in range(1, len(text))])
    y = torch.tensor([LETTERS.index(each) for each in text[1:]])
    model = ZenDecoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = model(x).argmax(1).eq(y).float().mean().item()
    print(f"{right:.1%} of {len(y)} letters are right, loss {loss.item():.4f}")
    if right < 0.99:
        raise SystemExit(f"only {right:.1%} of the letters are right, at least 99 % expected")
    save_file(model.state_dict(), "weights.safetensors")


main()
