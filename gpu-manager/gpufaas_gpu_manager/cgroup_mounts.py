"""Where the control groups of a process are mounted, from its ``cgroup`` and ``mountinfo`` in ``/proc``."""

import re
from pathlib import Path
from typing import Final

_CONTROLLERS: Final = ("memory", "pids", "freezer", "cpu")
_ESCAPED: Final = re.compile(r"\\(\d{3})")


def own_groups(process: Path) -> dict[str, Path]:
    """
    Return the directory of the process's own group for each controller of version 1 in use; ``""`` is version 2.

    :param process: the process's directory under ``/proc``
    """
    own: dict[str, str] = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    found: dict[str, Path] = {}
    for line in (process / "mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        root, point = (_ESCAPED.sub(lambda found: chr(int(found[1], 8)), each) for each in fields.split()[3:5])
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup2":
            names = [""]
        elif kind == "cgroup":
            names = [each for each in options.split(",") if each in _CONTROLLERS]
        else:
            continue
        for name in names:
            if name in own and name not in found:
                found[name] = _within(Path(point), root, own[name])
    return found


def _within(point: Path, root: str, path: str) -> Path:
    """Return where group *path* is below a mount of *root*: a container may see only its own part of the tree."""
    if path == root or root == "/":
        return point / path.strip("/") if path != root else point
    return point / path.removeprefix(root).strip("/") if path.startswith(root + "/") else point
