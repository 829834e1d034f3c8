"""
The CNNs of the GPU-FaaS paper's table that the examples use, in plain torch, with seeded random weights.

Layers and shapes are torchvision's (so are the sizes in bytes); torchvision itself would cost every worker a second and
80 MB at import. The weights are random but scaled so that activations neither vanish nor explode: the answers mean
nothing, and are the same wherever the same weights see the same image. Shared by the folders beside it through
``configuration.copy`` in stack.yaml.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS: Final = "weights.safetensors"
SIZE: Final = 224
_SMALLEST, _LARGEST = 64, 1024


# What a handler calls.


def serving(arch: str, handler: str) -> tuple[Callable[[str], nn.Module], Callable[[nn.Module, Any, Any], Any]]:
    """Return the ``load`` and ``handle`` of *arch*, whose weights lie beside the file *handler*."""

    def handle(model: nn.Module, event: Any, context: Any) -> Any:
        return answer(arch, model, event.body)

    return functools.partial(load, arch, Path(handler).with_name(WEIGHTS)), handle


def load(arch: str, path: str | Path, device: str) -> nn.Module:
    """Return *arch* with the weights in *path*, on *device*."""
    from gpufaas_functions import load_module

    return load_module(ARCHITECTURES[arch], path, device)


def answer(arch: str, model: nn.Module, body: bytes) -> Any:
    """
    Classify the image in *body*: raw float32[3, n, n] in 0..1, little-endian, or JSON ``{"seed": 7, "size": 224}``.

    Returns ``{"arch": ..., "top": [[class, score], ... five], "size": n}``, or a 400 that says what is expected.
    """
    try:
        image = read_image(body)
    except ValueError as exc:
        return {"statusCode": 400, "body": {"error": str(exc)}}
    return {"arch": arch, "top": classify(model, image), "size": image.shape[-1]}


def classify(model: nn.Module, image: Tensor) -> list[list[float]]:
    """Return the five best of 1,000 classes for *image*, float32[3, n, n], as [class, probability]."""
    with torch.inference_mode():
        scores = model(image.to(next(model.parameters()).device)[None])
        top = torch.softmax(scores[0], dim=0).topk(5)
    return [[index, round(score, 6)] for index, score in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def read_image(body: bytes) -> Tensor:
    """:raises ValueError: neither raw pixels nor a seed; says what is expected"""
    size = math.isqrt(len(body) // 12)
    if len(body) == size * size * 12 and _SMALLEST <= size <= _LARGEST:
        return torch.frombuffer(bytearray(body), dtype=torch.float32).view(3, size, size)
    try:
        given = json.loads(body)
        seed, size = given["seed"], given.get("size", SIZE)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError('send {"seed": 7} as JSON, or float32[3, 224, 224] as 602112 raw bytes') from None
    if type(seed) is not int or type(size) is not int or not _SMALLEST <= size <= _LARGEST or abs(seed) >= 2**63:
        raise ValueError(f"seed must be an integer, and size an integer from {_SMALLEST} to {_LARGEST}")
    return seeded_image(seed, size)


def seeded_image(seed: int, size: int = SIZE) -> Tensor:
    """Return the image of *seed*: float32[3, size, size] in 0..1, the same on every machine."""
    return torch.rand(3, size, size, generator=torch.Generator().manual_seed(seed))


# What a build.py calls.


def write_random_weights(arch: str, path: str | Path = WEIGHTS, seed: int = 0) -> None:
    """Write the weights of *arch* to *path*. Normal with He's deviation; the same for the same *arch* and *seed*."""
    from safetensors.torch import save_file

    with torch.device("meta"):
        shapes = ARCHITECTURES[arch]().state_dict()
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(name, tensor, generator) for name, tensor in shapes.items()}
    save_file(weights, path)
    size = sum(each.nbytes for each in weights.values())
    print(f"{arch}: {len(weights)} tensors, {size / 2**20:.1f} MiB")


def _random(name: str, shape: Tensor, generator: torch.Generator) -> Tensor:
    if shape.dim() >= 2:
        fan_in = shape[0].numel()
        return torch.randn(shape.shape, generator=generator).mul_(math.sqrt(2 / fan_in))
    if name.endswith("running_var") or (name.endswith("weight") and shape.dim() == 1):
        # The last norm of a residual branch is damped: with identity norms each block would double the variance.
        return torch.full(shape.shape, 0.2 if "damped" in name else 1.0)
    return torch.zeros(shape.shape, dtype=shape.dtype)


# The architectures.


def alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(True), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(True), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(True),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(True),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6), nn.Flatten(),
        nn.Linear(256 * 36, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, 1000),
    )  # fmt: skip


def vgg(*widths: int | str) -> nn.Module:
    """Convolutions of these widths; ``"M"`` is a pooling."""
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(True)]
            channels = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(),
        nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, 1000),
    )  # fmt: skip


class Fire(nn.Module):
    def __init__(self, channels: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeeze, 1)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return F.relu(torch.cat((self.expand1x1(x), self.expand3x3(x)), 1))


def squeezenet1_1() -> nn.Module:
    def pool() -> nn.Module:
        return nn.MaxPool2d(3, 2, ceil_mode=True)

    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 2), nn.ReLU(True), pool(), Fire(64, 16, 64), Fire(128, 16, 64), pool(),
        Fire(128, 32, 128), Fire(256, 32, 128), pool(),
        Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256),
        nn.Conv2d(512, 1000, 1), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class Residual(nn.Module):
    """Two 3x3 convolutions, or with *expansion* 4 the bottleneck 1x1, 3x3, 1x1; added to the input."""

    def __init__(self, channels: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        out = width * expansion
        if expansion == 1:
            plan = [(channels, width, 3, stride), (width, out, 3, 1)]
        else:
            plan = [(channels, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
        layers: list[nn.Module] = []
        for given, made, kernel, step in plan:
            conv = nn.Conv2d(given, made, kernel, step, kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(made), nn.ReLU(True)]
        self.branch = nn.Sequential(*layers[:-2])
        self.damped = layers[-2]
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.damped(self.branch(x)) + self.shortcut(x))


def resnet(*blocks: int, expansion: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            layers.append(Residual(channels, width, 2 if stage and not block else 1, expansion))
            channels = width * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Dense(nn.Module):
    """One layer of a dense block: its 32 channels are put beside what came in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow, grow = nn.Conv2d(channels, 128, 1, bias=False), nn.Conv2d(128, 32, 3, padding=1, bias=False)
        self.narrow = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(True), narrow)
        self.grow = nn.Sequential(nn.BatchNorm2d(128), nn.ReLU(True), grow)

    def forward(self, x: Tensor) -> Tensor:
        # The norm makes a tensor of its own, so the ReLU in place behind it leaves x alone.
        return torch.cat((x, self.grow(self.narrow(x))), 1)


def densenet(*blocks: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = 64
    for index, count in enumerate(blocks):
        for _ in range(count):
            layers.append(Dense(channels))
            channels += 32
        layers += [nn.BatchNorm2d(channels), nn.ReLU(True)]
        if index < len(blocks) - 1:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


_VGG16: Final = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
ARCHITECTURES: Final[dict[str, Callable[[], nn.Module]]] = {
    "alexnet": alexnet,
    "densenet121": functools.partial(densenet, 6, 12, 24, 16),
    "resnet18": functools.partial(resnet, 2, 2, 2, 2, expansion=1),
    "resnet50": functools.partial(resnet, 3, 4, 6, 3, expansion=4),
    "squeezenet1_1": squeezenet1_1,
    "vgg11": functools.partial(vgg, 64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"),
    "vgg16": functools.partial(vgg, *_VGG16),
}
