"""
Which digit is it? One image of 8x8 pixels, each 0 (white) to 16 (black), as 8 rows of 8 or 64 in a row; or a list.

Answers ``{"digit": 3, "probabilities": [ten]}``, or a list of these for a list of images.
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
    try:
        given = event.json()
        pixels = torch.tensor(given["pixels"] if isinstance(given, dict) else given, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError):
        return refusal("this is no image")
    single = pixels.shape in ((64,), (8, 8))
    if not single and (pixels.shape[1:] not in ((64,), (8, 8)) or not 1 <= len(pixels) <= 1024):
        return refusal(f"this has the shape {list(pixels.shape)}")
    if not ((pixels >= 0) & (pixels <= 16)).all():
        return refusal("there are pixels outside 0 to 16")
    with torch.inference_mode():
        images = pixels.reshape(-1, 1, 8, 8) / 16
        probabilities = torch.softmax(model(images.to(next(model.parameters()).device)), dim=1).tolist()
    answers = [
        {"digit": max(range(10), key=each.__getitem__), "probabilities": [round(share, 6) for share in each]}
        for each in probabilities
    ]
    return answers[0] if single else answers


def refusal(reason: str) -> Any:
    return {"statusCode": 400, "body": {"error": f"{reason}: {EXPECTED}"}}
