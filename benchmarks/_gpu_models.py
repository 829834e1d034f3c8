"""
The models of gpu.py: CNNs, transformers of the sizes of bert-base and gpt2, and transformers of so many bytes.

Copied beside a handler and into the processes that load by hand: it needs torch, and `architectures` beside it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

GiB: Final = 1 << 30
_WIDE: Final = 2048
_LAYER_BYTES: Final = 2 * (12 * _WIDE * _WIDE + 13 * _WIDE)


class Transformer(nn.Module):
    """Token numbers -> a score for each token, of the last position."""

    def __init__(self, tokens: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(512, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x[:, -1]) @ self.tokens.weight.T


def synthetic(size: int) -> Transformer:
    return Transformer(1024, _WIDE, max(1, size // _LAYER_BYTES), 16).to(torch.bfloat16)


def _cnn(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import architectures

        made: nn.Module = architectures.ARCHITECTURES[name]()
        return made

    return build


BUILD: Final[dict[str, Callable[[], nn.Module]]] = {
    "resnet50": _cnn("resnet50"),
    "vgg16": _cnn("vgg16"),
    "bert-base": lambda: Transformer(30522, 768, 12, 12),
    "gpt2": lambda: Transformer(50257, 768, 12, 12),
    **{f"transformer-{size}g": lambda size=size: synthetic(size * GiB) for size in (1, 4, 16)},
}


def answer(model: nn.Module, seed: int) -> int:
    """Run *model* once; return the place of its best score. What came from the device is there when it returns."""
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    if isinstance(model, Transformer):
        given = torch.randint(0, 1024, (1, 16), generator=generator)
    else:
        given = torch.rand(1, 3, 224, 224, generator=generator).to(first.dtype)
    with torch.inference_mode():
        return int(model(given.to(first.device)).argmax())


def write_weights(name: str, path: Path) -> int:
    """Write weights of *name*, random: those of transformers from the same few million numbers. Return their bytes."""
    from safetensors.torch import save_file

    if name in ("resnet50", "vgg16"):
        import architectures

        architectures.write_random_weights(name, path)
        return path.stat().st_size

    some = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.device("meta"):
        shapes = BUILD[name]().state_dict()
    weights = {}
    for key, shape in shapes.items():
        block = some.to(shape.dtype)
        flat = torch.empty(shape.numel(), dtype=shape.dtype)
        for at in range(0, shape.numel(), len(block)):
            flat[at : at + len(block)] = block[: min(len(block), shape.numel() - at)]
        weights[key] = flat.view(shape.shape)
    save_file(weights, path)
    return sum(each.nbytes for each in weights.values())


# --- loading by hand, in a process of its own ---


def load_by(how: str, name: str, path: Path, device: str) -> nn.Module:
    """Return the model by a way of loading; ``platform`` is what handlers call."""
    if how == "platform":
        from gpufaas_functions import load_module

        return load_module(BUILD[name], path, device)
    if how == "safetensors":
        from safetensors.torch import load_file

        with torch.device("meta"):
            model = BUILD[name]()
        model.load_state_dict(load_file(path, device=device), assign=True)
        return model.eval()
    if how == "torch.load":
        model = BUILD[name]()
        model.load_state_dict(torch.load(path.with_suffix(".pt"), map_location="cpu", weights_only=True))
        return model.eval().to(device)
    raise ValueError(how)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def start(how: str, name: str, path: Path, device: str, runs: int = 3) -> dict[str, Any]:
    """Load and run once; return the times in seconds and the answer."""
    began = time.perf_counter()
    torch.zeros(1, device=device)
    wait(device)
    ready = time.perf_counter()
    model = load_by(how, name, path, device)
    wait(device)
    loaded = time.perf_counter()
    found = answer(model, 7)
    ended = time.perf_counter()
    warm = []
    for _ in range(runs):
        again = time.perf_counter()
        answer(model, 7)
        warm.append(time.perf_counter() - again)
    held = torch.cuda.max_memory_reserved(device) if device.startswith("cuda") else 0
    times = {"context": ready - began, "load": loaded - ready, "first run": ended - loaded}
    times["warm run"] = sorted(warm)[runs // 2]
    return {"answer": found, "all": ended - began, **times, "reserved": held}


def main() -> None:
    """For each line ``[how, name, path]``: start in a fresh fork of this process, which has torch; say what it took."""
    device = sys.argv[1]
    for line in sys.stdin:
        how, name, path = json.loads(line)
        if os.fork() == 0:
            torch.set_num_threads(int(sys.argv[2]))
            print(json.dumps(start(how, name, Path(path), device)), flush=True)
            os._exit(0)
        _, status = os.wait()
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    main()
