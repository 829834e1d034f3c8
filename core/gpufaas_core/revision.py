"""Which revision of the sources this is."""

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

UNKNOWN = "unknown"


def git_revision() -> str:
    """
    Return the commit that this program was made from, ``unknown`` where nothing says it: what ``GPUFAAS_REVISION`` says
    (of images), else what pip noted (PEP 610), else that of the working tree that it runs in, with ``-dirty`` where
    tracked files were changed since. Some 10 ms.
    """
    return (
        os.environ.get("GPUFAAS_REVISION") or _installed() or _of_tree(Path(__file__).resolve().parents[2]) or UNKNOWN
    )


def _installed() -> str:
    try:
        noted = importlib.metadata.distribution("gpufaas").read_text("direct_url.json")
        return str(json.loads(noted or "{}").get("vcs_info", {}).get("commit_id", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        return ""


def _of_tree(root: Path) -> str:
    if not (root / ".git").exists():  # not of a repository that happens to be above site-packages
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
