"""Which files of a function are weights: they travel beside its bundle, each by its own digest."""

import pickletools
import re
import zipfile
from pathlib import Path
from typing import IO, Final

WEIGHTS: Final = (".safetensors", ".gguf", ".pt2", ".onnx", ".onnx_data", ".onnx.data")
_PICKLED: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")
_TENSORS: Final = re.compile(
    r"(_codecs encode|(builtins|__builtin__) (set|bytearray|complex)|collections (OrderedDict|Counter)"
    r"|torch(\.cuda|\.storage)? \w+|torch\.nn\.parameter \w+|torch\.(_utils|_tensor) _rebuild_\w+"
    r"|torch\.serialization _get_layout)"
)
"""What ``torch.load(weights_only=True)`` calls, a little more: it has the last word, in the worker (docs/adr/0066)."""
_LEGACY: Final = 5
"""The pickles in a file of torch before 1.6: a number, a version, a machine, the object, its storages."""


def is_weights(path: Path) -> bool:
    return path.name.endswith(WEIGHTS) or is_pickled(path)


def is_pickled(path: Path) -> bool:
    """
    Return whether the file *path* is a pickle, or a zip with one, as torch writes it.

    Most names say it. ``.bin`` may be anything: it is one if it begins as one. ``.pth`` is one of torch's, or a text
    that Python reads for its path: a text that does not end with a pickle's last opcode is none.
    """
    if path.suffix not in (".bin", ".pth"):
        return path.name.endswith(_PICKLED)
    with open(path, "rb") as file:
        start, size = file.read(4096), path.stat().st_size
        file.seek(max(0, size - 1))
        last = file.read(1)
    if path.suffix == ".bin":
        return start[:4] == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05")
    return last == b"." or any(each < 9 or each > 126 for each in start)


def loads_as_tensors(path: Path) -> bool:
    """Return whether ``torch.load(weights_only=True)`` may read *path*, by the names in it. Nothing is run."""
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb") as file:
                return all(_names_tensors(file) for _ in range(_LEGACY))
        with zipfile.ZipFile(path) as archive:
            pickled = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            with archive.open(pickled[0]) as entry:
                return _names_tensors(entry)
    except (OSError, ValueError, IndexError, zipfile.BadZipFile):
        return False


def _names_tensors(file: IO[bytes]) -> bool:
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "EXT1", "EXT2", "EXT4"):
            return False
        if opcode.name == "GLOBAL" and not _TENSORS.fullmatch(str(argument)):
            return False
    return True
