"""
Goes on with a text, letter by letter: ``?letters=80&pause=0.05`` streams 80 letters, at most 20 a second.

Continuous batching: each forward pass computes the next letter of all texts that are being written now. A call that
comes joins the next pass, and leaves when its text is long enough. It needs ``gpufaas.slots``, the most texts at once.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from zen_decoder import LETTERS, ZenDecoder, window

from gpufaas_functions import load_module

HEADERS = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-cache"}


class Writing:
    """One text that is being written."""

    def __init__(self, prompt: str, letters: int, pause: float) -> None:
        self.text = prompt
        self.letters = letters
        self.left = letters
        """Letters that are not written yet."""
        self.pause = pause
        self.ready: asyncio.Queue[str] = asyncio.Queue()


class Writers:
    """All texts that are being written, and the loop that writes them."""

    def __init__(self, net: Any, device: str) -> None:
        self.net, self.device = net, device
        self.passes = 0
        self._writing: list[Writing] = []
        self._loop: asyncio.Task[None] | None = None

    async def write(self, text: Writing) -> AsyncIterator[str]:
        self._writing.append(text)
        if self._loop is None:
            self._loop = asyncio.create_task(self._write())
        try:
            for _ in range(text.letters):
                yield await text.ready.get()
        finally:  # also when the caller has hung up
            if text in self._writing:
                self._writing.remove(text)

    async def _write(self) -> None:
        try:
            while texts := list(self._writing):
                # In a thread: meanwhile the loop sends what is written, and takes calls.
                for each, letter in zip(texts, await asyncio.to_thread(self._next, texts), strict=True):
                    each.text += letter
                    each.left -= 1
                    each.ready.put_nowait(letter)
                self._writing = [each for each in self._writing if each.left]
                await asyncio.sleep(max(each.pause for each in texts))
        finally:
            self._loop = None

    def _next(self, texts: list[Writing]) -> list[str]:
        self.passes += 1
        with torch.inference_mode():
            windows = torch.tensor([window(each.text) for each in texts], device=self.device)
            return [LETTERS[each] for each in self.net(windows).argmax(1).tolist()]


def load(device: str) -> Writers:
    return Writers(load_module(ZenDecoder, Path(__file__).parent / "weights.safetensors", device), device)


async def handle(model: Writers, event: Any, context: Any) -> Any:
    try:
        letters, pause = int(event.query.get("letters", "80")), float(event.query.get("pause", "0"))
    except ValueError:
        letters = -1
        pause = 0.0
    if not (0 < letters <= 1000 and 0 <= pause <= 1):
        return {"statusCode": 400, "body": {"error": "letters must be 1 to 1000, and pause 0 to 1 seconds"}}
    prompt = event.body.decode(errors="replace")[-1000:]
    return {"headers": HEADERS, "body": model.write(Writing(prompt or "The Zen", letters, pause))}
