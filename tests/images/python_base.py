"""
A base image with Python, pip and what a server of ours needs, made from what is installed here, with no network.

    python tests/images/python_base.py
"""

import hashlib
import io
import sys
import sysconfig
import tarfile
import tempfile
from importlib.metadata import distribution
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from build import _linked, _wanted

IMAGE = "gpufaas-test-python"
PACKAGES = ("pip", "uvicorn", "click", "h11", "httptools", "msgspec")


def build() -> str:
    """Import the image into the engine, if it is not there; return its name."""
    import docker
    from docker.errors import ImageNotFound

    versions = "".join(f"{each}=={distribution(each).version}" for each in PACKAGES)
    contents = Path(__file__).read_bytes() + Path(__file__).with_name("build.py").read_bytes()
    tag = hashlib.sha256(contents + (versions + sys.version).encode()).hexdigest()[:12]
    image = f"{IMAGE}:{tag}"
    client = docker.from_env(timeout=120)
    try:
        try:
            client.images.get(image)
        except ImageNotFound:
            with tempfile.TemporaryFile() as file:
                _write(file)
                file.seek(0)
                changes = ["ENV PATH=/usr/local/bin:/usr/bin:/bin"]
                client.api.import_image_from_data(file.read(), repository=IMAGE, tag=tag, changes=changes)
    finally:
        client.close()
    return image


def _write(file: "tempfile._TemporaryFileWrapper[bytes]") -> None:
    python = Path(sys.executable).resolve()
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    packages = stdlib / "site-packages"
    with tarfile.open(fileobj=file, mode="w") as tar:
        programs = [python, Path("/bin/sh")]
        theirs = {
            Path(each.locate()): packages / each
            for name in PACKAGES
            for each in distribution(name).files or ()
            if ".." not in each.parts and "__pycache__" not in each.parts
        }
        libraries = [*stdlib.glob("lib-dynload/*.so"), *(each for each in theirs if each.suffix == ".so")]
        for path in sorted({*_linked([*programs, *libraries]), *programs}):
            tar.add(path.resolve(), str(path), recursive=False)
        tar.add(stdlib, str(stdlib), filter=_wanted)
        for path, at in theirs.items():
            tar.add(path, str(at), recursive=False)
        link = tarfile.TarInfo("usr/local/bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, str(python)
        tar.addfile(link)
        for directory in ("tmp", "var/openfaas", "root"):
            member = tarfile.TarInfo(directory)
            member.type, member.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
            tar.addfile(member)
        passwd = tarfile.TarInfo("etc/passwd")
        text = b"root:x:0:0:root:/root:/bin/sh\n"
        passwd.size = len(text)
        tar.addfile(passwd, io.BytesIO(text))


if __name__ == "__main__":
    print(build())
