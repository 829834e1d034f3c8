"""
Install what the role ROLE needs into /opt/gpufaas, in `docker build` (docker/Dockerfile).

Python alone: the base may have no shell tools, and no pip but that of the wheelhouse.
"""

import glob
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

SOURCE = Path("/build")
WHEELS = SOURCE / "docker/wheels"
HOME = Path("/opt/gpufaas")
EXTRAS = {
    "gateway": "gateway,cluster,s3",
    "scheduler": "scheduler,cluster",
    "node": "node,docker,kubernetes,cluster,s3",
}
OWNED = ("/home/gpufaas", "/var/lib/gpufaas", "/var/lib/gpufaas-objects")


def main() -> None:
    role = os.environ.get("ROLE", "")
    if role not in EXTRAS:
        sys.exit(f"ROLE is {role!r}: build with --build-arg ROLE=gateway, scheduler or node")
    venv.create(HOME, symlinks=True, with_pip=False)
    python = str(HOME / "bin/python")
    offline = sorted(WHEELS.glob("gpufaas-*.whl"))
    env = {name: value for name, value in os.environ.items() if value}
    pip = glob.glob(str(WHEELS / "pip-*.whl"))
    if pip:
        env["PYTHONPATH"] = pip[0]  # pip runs from its wheel, and leaves nothing of itself behind
        install = [python, "-P", "-m", "pip", "install"]
    else:
        install = [sys.executable, "-P", "-m", "pip", "--python", python, "install"]
    # What pip needs itself it finds in the folder of the venv's own packages, which are on no path of the base's.
    install += ["--no-cache-dir", "--disable-pip-version-check", "--root-user-action=ignore", "--no-compile"]
    source = offline[-1] if offline else SOURCE
    if offline:
        install += ["--no-index", f"--find-links={WHEELS}"]
    install += ["-c", str(SOURCE / "constraints.txt")]
    extras = os.environ.get("EXTRAS") or EXTRAS[role]
    done = subprocess.run([*install, f"{source}[{extras}]", *os.environ.get("ALSO", "").split()], env=env, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    if packages := os.environ.get("PACKAGES"):
        (site,) = HOME.glob("lib/python3*/site-packages")
        # Last on the path: only what the image lacks comes from there, which is torch of the machine that made it.
        (site / "zz-packages.pth").write_text(f"{packages}\n")
    # Byte code is made here once: the root of the container cannot be written.
    subprocess.run([python, "-P", "-m", "compileall", "-q", str(HOME / "lib")], check=False)
    shutil.copy(SOURCE / "docker/health.py", HOME / "health.py")
    for folder in OWNED:
        Path(folder).mkdir(parents=True, exist_ok=True)


if __name__ == "__main__":
    main()
