"""
Which digit is it? One image of 8x8 pixels, each 0 (white) to 16 (black), as 8 rows of 8 or 64 in a row; or a list.

Answers ``{"digit": 3, "probabilities": [ten]}``, or a list of these for a list of images. Calls that wait run together,
as one list of all their images.
"""

from pathlib import Path
from typing import Any

import torch
from digits_cnn import DigitsCnn

from gpufaas_functions import load_module

EXPECTED = "send JSON: 64 numbers from 0 to 16, or 8 rows of 8, or a list of at most 1024 such images"


def load(device: str) -> Any:
    return load_module(DigitsCnn, Path(__file__).parent / "weights.safetensors", device)


def handle(model: Any, event: Any, context: Any) -> Any:
    return handle_batch(model, [event], [context])[0]


def handle_batch(model: Any, events: list[Any], contexts: list[Any]) -> list[Any]:
    given = [read(each) for each in events]
    images = [each for each in given if isinstance(each, torch.Tensor)]
    found = iter(classify(model, torch.cat([each.reshape(-1, 1, 8, 8) for each in images])) if images else ())
    answers: list[Any] = []
    for each in given:
        if not isinstance(each, torch.Tensor):
            answers.append({"statusCode": 400, "body": {"error": f"{each}: {EXPECTED}"}})
        elif is_one(each):
            answers.append(next(found))
        else:
            answers.append([next(found) for _ in each])
    return answers


def read(event: Any) -> torch.Tensor | str:
    """Return the pixels of one call, or what is wrong with them."""
    try:
        given = event.json()
        pixels = torch.tensor(given["pixels"] if isinstance(given, dict) else given, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError):
        return "this is no image"
    if not is_one(pixels) and (pixels.shape[1:] not in ((64,), (8, 8)) or not 1 <= len(pixels) <= 1024):
        return f"this has the shape {list(pixels.shape)}"
    if not ((pixels >= 0) & (pixels <= 16)).all():
        return "there are pixels outside 0 to 16"
    return pixels


def is_one(pixels: torch.Tensor) -> bool:
    return pixels.shape in ((64,), (8, 8))


def classify(model: Any, images: torch.Tensor) -> list[Any]:
    with torch.inference_mode():
        probabilities = torch.softmax(model((images / 16).to(next(model.parameters()).device)), dim=1).tolist()
    return [
        {"digit": max(range(10), key=each.__getitem__), "probabilities": [round(share, 6) for share in each]}
        for each in probabilities
    ]
