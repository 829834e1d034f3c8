"""vgg11 with random weights: {"seed": 7} or raw float32[3, 224, 224] in, the five best classes out."""

from pathlib import Path
from typing import Any

from common import architectures

ARCH = "vgg11"


def load(device: str) -> Any:
    return architectures.load(ARCH, Path(__file__).parent / architectures.WEIGHTS, device)


def handle(model: Any, event: Any, context: Any) -> Any:
    return architectures.answer(ARCH, model, event.body)
