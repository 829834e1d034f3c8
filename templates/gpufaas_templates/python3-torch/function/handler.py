"""A model function: `load` runs once per worker, `handle` once per call."""

from typing import Any

import torch
from torch import nn


class ByteScores(nn.Module):
    """A stand-in for your model: byte frequencies seen through one layer. float32[256] -> float32[classes]"""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(256, classes)

    def forward(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layer(counts), dim=-1)


def load(device: str) -> nn.Module:
    """
    Return the model, on *device*: ``cpu`` or ``cuda:0``.

    With weights beside this file, say model.safetensors, this maps them without copying::

        from pathlib import Path
        from gpufaas_functions import load_module

        return load_module(ByteScores, Path(__file__).parent / "model.safetensors", device)
    """
    torch.manual_seed(0)
    return ByteScores().to(device).eval()


def handle(model: nn.Module, event: Any, context: Any) -> Any:
    """
    Answer one call.

    *event* has body (bytes), headers, method, path, query, text and json(). *context* has hostname, call_id, function
    and device. Return str, bytes, a dict or list (sent as JSON), {"statusCode": 200, "body": ..., "headers": {...}},
    or yield pieces to stream them.

    For several calls in one forward pass, add this, and the annotation gpufaas.batch-max: "8" (not for an image)::

        def handle_batch(model, events, contexts):
            return [...]  # one answer for each event, in their order; an exception in place of one fails its call alone
    """
    body = event.body
    counts = torch.zeros(256)
    if body:
        counts = torch.bincount(torch.tensor(list(body)), minlength=256) / len(body)
    with torch.inference_mode():
        scores = model(counts.to(next(model.parameters()).device))
    return {"bytes": len(body), "scores": [round(score, 6) for score in scores.tolist()], "device": context.device}
