"""Ways out by files: what a function reads, and where it writes."""

import contextlib
import ctypes
import importlib
import os
import shutil
import stat
import sys
import time

from tests.ways_out.ways import Facts, call, content, contents_below, opened, planted, way_out

# --- secrets of the operator ---


@way_out("reads the admin password from its file", "password")
def password_from_its_file(facts: Facts) -> str:
    return content(f"{facts['auth']}/basic-auth-password")


@way_out("reads the credentials that the server writes for the operator's tools", "password")
def password_from_the_credentials(facts: Facts) -> str:
    return contents_below(f"{facts['runtime']}/gpufaas")


@way_out("reads the key in the .ssh of the user's home", "key")
def key_of_the_user(facts: Facts) -> str:
    return content(f"{facts['home']}/.ssh/id_ed25519")


@way_out("reads the cluster's token from its file", "token")
def token_of_the_cluster(facts: Facts) -> str:
    return content(facts["token"])


@way_out("opens /etc/shadow", "same_file")
def shadow(_: Facts) -> str:
    return opened("/etc/shadow", os.O_RDONLY)


# --- what other functions have ---


@way_out("reads all secrets", "secret")
def secrets_of_all(facts: Facts) -> str:
    return contents_below(f"{facts['data']}/secrets")


@way_out("reads the secrets that are mounted for another function", "secret")
def secrets_as_mounted(facts: Facts) -> str:
    return contents_below(f"{facts['data']}/secret-mounts")


@way_out("reads another function's code", "code")
def code_of_another(facts: Facts) -> str:
    return contents_below(f"{facts['prey_bundle']}/function")


@way_out("reads another function's code through a hard link", "code")
def hard_link(facts: Facts) -> str:
    link = f"{facts['data']}/bundles/{facts['mark']}-link"
    os.link(f"{facts['prey_bundle']}/function/handler.py", link)
    try:
        return content(link)
    finally:
        os.unlink(link)


@way_out("reads another function's code through a symbolic link", "code")
def symbolic_link(facts: Facts) -> str:
    link = f"/tmp/{facts['mark']}-link"
    os.symlink(f"{facts['prey_bundle']}/function/handler.py", link)
    try:
        return content(link)
    finally:
        os.unlink(link)


@way_out("writes into another function's bundle", "planted")
def bundle_of_another(facts: Facts) -> str:
    return planted(f"{facts['prey_bundle']}/function/{facts['mark']}.py")


@way_out("writes into its own bundle, which other workers run and nothing checks again", "planted")
def bundle_of_its_own(facts: Facts) -> str:
    return planted(f"{facts['bundle']}/function/{facts['mark']}.py")


@way_out("plants a pickle where another function's compiled code is read", "planted")
def compiled_code_of_another(facts: Facts) -> str:
    return planted(f"{facts['data']}/compiled/{facts['prey_digest']}/prey.others/cpu/{facts['mark']}.pkl")


@way_out("reads what another function has in /tmp", "temporary")
def temporary_file_of_another(facts: Facts) -> str:
    return content(facts["temporary"])


@way_out("reads what another function has in /dev/shm", "shared")
def shared_memory_file_of_another(facts: Facts) -> str:
    return content(facts["shared"])


@way_out("reads what another worker has in its scratch directory", "scratch")
def scratch_of_another(facts: Facts) -> str:
    return contents_below(f"{facts['data']}/scratch")


@way_out("runs a package that it requires elsewhere than in its confined workers", "package")
def package_that_it_requires(_: Facts) -> str:
    return f"brought {os.getpid()} {importlib.import_module('brought').found}"


# --- what the platform has ---


@way_out("reads the database, with all functions' variables", "variable")
def database_read(facts: Facts) -> str:
    return "".join(content(f"{facts['data']}/gpufaas.db{end}", 1 << 24) for end in ("", "-wal"))


@way_out("opens the database to write", "same_file")
def database_written(facts: Facts) -> str:
    return opened(f"{facts['data']}/gpufaas.db", os.O_RDWR)


@way_out("opens the uploaded archive of another function", "same_file")
def archive_read(facts: Facts) -> str:
    return opened(facts["archive"], os.O_RDONLY)


@way_out("opens the uploaded archive of another function to write", "same_file")
def archive_written(facts: Facts) -> str:
    return opened(facts["archive"], os.O_RDWR)


@way_out("opens the queue of asynchronous calls", "same_file")
def queue_of_calls(facts: Facts) -> str:
    return opened(f"{facts['data']}/async/calls.db", os.O_RDWR)


@way_out("puts a file beside the bodies of others' asynchronous calls", "planted")
def bodies_of_calls(facts: Facts) -> str:
    return planted(f"{facts['data']}/async/bodies/{facts['mark']}")


@way_out("puts a file among the spooled bodies", "planted")
def spool(facts: Facts) -> str:
    return planted(f"{facts['data']}/spool/{facts['mark']}")


@way_out("plants a file in the packages that the platform imports", "planted")
def packages_of_the_platform(facts: Facts) -> str:
    return planted(f"{facts['packages']}/{facts['mark']}.txt")


@way_out("plants a file in the home of the user", "planted")
def home_of_the_user(facts: Facts) -> str:
    return planted(f"{facts['home']}/.config/{facts['mark']}")


@way_out("makes the platform follow a link that stands in place of its scratch directory", "link_was_followed")
def link_in_place_of_scratch(facts: Facts) -> str:
    scratch = os.environ["GPUFAAS_SCRATCH"]
    shutil.rmtree(scratch)
    os.symlink(facts["kept"], scratch)
    return scratch


@way_out("leaves a program of root's with SUID for a user of the machine", "suid_of_root")
def program_with_suid(facts: Facts) -> str:
    path = planted(f"{facts['open_folder']}/{facts['mark']}-suid")
    os.chmod(path, 0o4755)
    return path


# --- /proc and /sys ---


@way_out("reads secrets through /proc/PID/root of the platform", "secret")
def root_of_the_platform(facts: Facts) -> str:
    return contents_below(f"/proc/{facts['serve']}/root{facts['data']}/secrets")


@way_out("reads secrets through /proc/PID/cwd of the fork server", "secret")
def folder_of_the_fork_server(facts: Facts) -> str:
    up = "../" * os.readlink(f"/proc/{facts['fork_server']}/cwd").count("/")
    return contents_below(f"/proc/{facts['fork_server']}/cwd/{up}{facts['data']}/secrets")


@way_out("opens a setting of the kernel to write")
def setting_of_the_kernel(_: Facts) -> str:
    return opened("/proc/sys/kernel/core_pattern", os.O_WRONLY)


@way_out("opens the trigger of emergency commands to write")
def emergency_commands(_: Facts) -> str:
    return opened("/proc/sysrq-trigger", os.O_WRONLY)


@way_out("opens a setting in /sys to write")
def setting_in_sys(_: Facts) -> str:
    return opened("/sys/kernel/mm/transparent_hugepage/enabled", os.O_WRONLY)


@way_out("opens the switch of whom the kernel ends first, of the platform")
def whom_the_kernel_ends(facts: Facts) -> str:
    return opened(f"/proc/{facts['serve']}/oom_score_adj", os.O_WRONLY)


# --- devices ---


@way_out("opens the machine's memory")
def memory_of_the_machine(_: Facts) -> str:
    return opened("/dev/mem", os.O_RDONLY)


@way_out("opens the kernel's log")
def log_of_the_kernel(_: Facts) -> str:
    return opened("/dev/kmsg", os.O_WRONLY)


@way_out("makes a node of the disk that the data are on, and opens it")
def disk(facts: Facts) -> str:
    path = f"/tmp/{facts['mark']}-disk"
    os.mknod(path, stat.S_IFBLK | 0o600, facts["disk"])
    try:
        return opened(path, os.O_RDONLY)
    finally:
        os.unlink(path)


@way_out("opens the data by a handle, past all paths", "secret")
def file_by_handle(facts: Facts) -> str:
    raw = bytes.fromhex(facts["handle"])
    for folder in ("/", facts["bundle"], "/tmp", sys.prefix):
        mount = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with open(call("open_by_handle_at", mount, ctypes.create_string_buffer(raw), os.O_RDONLY)) as file:
                return file.read()
        except OSError as exc:
            failed = exc
        finally:
            os.close(mount)
    raise failed


@way_out("walks up from a descriptor of a folder that it was started with", "secret")
def folder_that_it_inherited(facts: Facts) -> str:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.fstat(int(name)).st_mode):
                return contents_below(f"/proc/self/fd/{name}/{'../' * 32}{facts['data']}/secrets")
    return ""


# --- filling ---


def _fills(folder: str, size: int) -> str:
    path = os.path.join(folder, "filling")
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
        return f"{size} bytes in {folder}"
    finally:
        os.unlink(path)


@way_out("fills /tmp with twice its reservation")
def tmp_filled(facts: Facts) -> str:
    return _fills("/tmp", facts["too_much"])


@way_out("fills /dev/shm with twice its reservation")
def shm_filled(facts: Facts) -> str:
    return _fills("/dev/shm", facts["too_much"])


@way_out("fills its scratch directory with twice its reservation")
def scratch_filled(facts: Facts) -> str:
    return _fills(os.environ["GPUFAAS_SCRATCH"], facts["too_much"])


@way_out("fills its bundle, or the folder that it runs in, with twice its reservation")
def bundle_filled(facts: Facts) -> str:
    return _fills(os.getcwd(), facts["too_much"])


@way_out("fills its log at any speed", "log_filled")
def log_filled(_: Facts) -> str:
    line, until = b"x" * 50_000 + b"\n", time.monotonic() + 1
    pipe = os.dup(1)
    os.set_blocking(pipe, False)
    written = 0
    while time.monotonic() < until:
        try:
            written += os.write(pipe, line)
        except BlockingIOError:
            time.sleep(0.001)
    os.set_blocking(pipe, True)
    os.close(pipe)
    return f"{written} bytes"
