"""Which files of a function are weights: they travel beside its bundle, each by its own digest."""

from pathlib import Path
from typing import Final

WEIGHTS: Final = (".safetensors", ".gguf", ".pt2", ".onnx", ".onnx_data", ".onnx.data")
_PICKLED: Final = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".joblib")


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
