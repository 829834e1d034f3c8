"""The folder of a new function: a copy of its template's skeleton, or a server with a Dockerfile."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpufaas_cli.bundles import check_name
from gpufaas_cli.source_files import NOT_HANDLER, copy_tree
from gpufaas_core.errors import InvalidSpec, StorageFailed
from gpufaas_templates import find_template

DOCKERFILE: Final = "dockerfile"
"""The ``lang`` that has no template: the handler folder contains a Dockerfile."""
_IMAGE_SKELETON: Final[Mapping[str, str]] = {
    "Dockerfile": """\
# Anything that serves HTTP on port 8080 is a function; SIGTERM asks it to end.
FROM docker.io/library/python:3.13-alpine
COPY server.py /home/app/
USER 65534
EXPOSE 8080
CMD ["python3", "/home/app/server.py"]
""",
    "server.py": """\
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = b"" if self.path.startswith("/_/") else self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_GET


signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the first process of a container has no such default
ThreadingHTTPServer(("", 8080), Handler).serve_forever()
""",
}


def new_function(
    name: str, lang: str, root: Path, template_dirs: Sequence[Path] = (Path("template"),), place: str | None = None
) -> list[Path]:
    """
    Write the skeleton of template *lang* to the new folder ``root/name``, or *place* in *root*; return the files
    written, sorted.

    :raises InvalidSpec: a name that cannot be deployed, an unknown template, or the folder exists
    :raises StorageFailed: *root* cannot be written
    """
    check_name(name)
    place = place or name
    if place in NOT_HANDLER:
        raise InvalidSpec(f"a folder {place}/ has a meaning of its own here: choose another name for the function")
    if Path(place).is_absolute() or ".." in Path(place).parts:
        raise InvalidSpec(f"{place!r} is no folder beside the stack file: name one like ./src/{name}")
    folder = root / place
    template = None if lang.lower() == DOCKERFILE else find_template(lang, template_dirs)
    if folder.exists() or folder.is_symlink():
        raise InvalidSpec(f"{folder} exists already: choose another name, or remove it first")
    if template is not None and not template.skeleton.is_dir():
        raise InvalidSpec(f"template {template.name} has no folder {template.handler_folder}/ in {template.path}")
    try:
        if template is not None:
            copy_tree(template.skeleton, folder)
        else:
            folder.mkdir(parents=True)
            for file, content in _IMAGE_SKELETON.items():
                (folder / file).write_text(content)
    except OSError as exc:
        shutil.rmtree(folder, ignore_errors=True)
        raise StorageFailed(f"cannot write {exc.filename or folder}: {exc.strerror or exc}") from exc
    return sorted(path for path in folder.rglob("*") if path.is_file())
