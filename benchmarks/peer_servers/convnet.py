"""The convnet that all servers of peers.py answer with: resnet18 of the examples, 64 x 64 pixels, one thread."""

import os
from typing import Any

import torch
from common import architectures
from safetensors.torch import load_file


def load() -> torch.nn.Module:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = architectures.ARCHITECTURES["resnet18"]()
    model.load_state_dict(load_file(os.environ["BENCH_WEIGHTS"]), assign=True)
    return model.requires_grad_(False).eval()


def answer(model: torch.nn.Module, given: dict[str, int]) -> Any:
    image = architectures.seeded_image(given["seed"], given["size"])
    return {"arch": "resnet18", "top": architectures.classify(model, image), "size": given["size"]}
