"""Files that are replaced whole: a reader finds the old text or the new one, never a part of it."""

import os
import tempfile
from pathlib import Path

from gpufaas_core.errors import GpufaasError


def replace_file(file: Path, text: str, mode: int = 0o600) -> None:
    """
    Write *text* to *file*, and make its folder if need be. Until it has *mode*, only its owner can read it.

    :raises GpufaasError: it cannot be written
    """
    aside = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, newline="", encoding="utf-8", delete=False) as made:
            aside = Path(made.name)
            made.write(text)
        aside.chmod(mode)
        os.replace(aside, file)
    except OSError as exc:
        if aside is not None:
            aside.unlink(missing_ok=True)
        raise GpufaasError(f"{file} cannot be written: {exc.strerror}") from exc
