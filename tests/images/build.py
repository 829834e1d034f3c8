"""
A base image made from nothing, with no registry and no network: this machine's Python, what it is linked with, a shell.

    python tests/images/build.py

About a second and 60 MB. On top of it the server of the contract tests, which it runs. The tag tells what is in it:
it is made once, and sessions with other servers keep apart.
"""

import hashlib
import io
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

IMAGE = "gpufaas-test"
_HERE = Path(__file__).parent
_LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "__pycache__",
             "site-packages", "dist-packages", "pydoc_data"}  # fmt: skip
_PASSWD = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"


def build() -> str:
    """Import the image into the engine, if it is not there; return its name."""
    import docker
    from docker.errors import ImageNotFound

    contents = b"".join((_HERE / name).read_bytes() for name in ("build.py", "server.py"))
    tag = hashlib.sha256(contents + sys.version.encode()).hexdigest()[:12]
    image = f"{IMAGE}:{tag}"
    python = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    client = docker.from_env(timeout=120)
    try:
        try:
            client.images.get(image)
        except ImageNotFound:
            pass
        else:
            return image
        with tempfile.TemporaryFile() as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                programs = [python, Path("/bin/sh")]
                libraries = sorted(stdlib.glob("lib-dynload/*.so"))
                for path in sorted({*_linked([*programs, *libraries]), *programs}):
                    tar.add(path.resolve(), str(path), recursive=False)
                tar.add(stdlib, str(stdlib), filter=_wanted)
                for at, text in (
                    ("etc/passwd", _PASSWD),
                    ("etc/group", "root:x:0:\napp:x:1000:\n"),
                    ("home/app/server.py", (_HERE / "server.py").read_text()),
                ):
                    member = tarfile.TarInfo(at)
                    member.size = len(text.encode())
                    tar.addfile(member, io.BytesIO(text.encode()))
                for directory in ("tmp", "var/openfaas", "root"):
                    member = tarfile.TarInfo(directory)
                    member.type, member.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
                    tar.addfile(member)
            file.seek(0)
            changes = [f'CMD ["{python}", "-u", "/home/app/server.py"]', "ENV PATH=/usr/bin:/bin", "EXPOSE 8080"]
            client.api.import_image_from_data(file.read(), repository=IMAGE, tag=tag, changes=changes)
    finally:
        client.close()
    return image


def _linked(programs: Iterable[Path]) -> set[Path]:
    """Return the shared libraries of *programs* and their loader, under the names that they are looked for."""
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    return {Path(each) for each in re.findall(r"(?:=> |^\t)(/\S+) \(0x", said, re.MULTILINE)}


def _wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    parts = set(Path(member.name).parts)
    return None if parts & _LEFT_OUT or any(part.startswith("config-") for part in parts) else member


if __name__ == "__main__":
    print(build())
