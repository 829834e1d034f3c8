"""
Fill docker/wheels with all that the images install, so that they are made with no index: see docker/Dockerfile.

    python docker/wheelhouse.py            of the Python that runs this, which must be that of the images' base

It prints the command that makes the node's image, without torch (750 MB) and what torch brings. A local image finds it
where this Python has it, mounted read-only (docker/compose.local.yml).
"""

import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "docker/wheels"
MOUNTED = ("torch",)


def name_of(requirement: str) -> str:
    return requirement.split(";")[0].split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip()


def node_requirements() -> list[str]:
    """Return what the extra ``node`` asks for, without what is mounted."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [name_of(each) for each in extras["node"] if name_of(each) not in MOUNTED]


def main() -> None:
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check"]
    for old in WHEELS.glob("gpufaas-*.whl"):
        old.unlink()
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(WHEELS), str(ROOT)], check=True)
    (wheel,) = WHEELS.glob("gpufaas-*.whl")
    asked_for = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    stamp, mark = WHEELS / "stamp", hashlib.sha256(asked_for + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == mark:
        return  # what we depend on is there since last time
    asked = [f"{wheel}[gateway,scheduler,docker,kubernetes,cluster,s3]", "pip", *node_requirements()]
    command = [*pip, "download", "-q", "--only-binary=:all:", "-d", str(WHEELS), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*command, f"--find-links={WHEELS}", *asked], check=True)
    stamp.write_text(mark)


if __name__ == "__main__":
    main()
