"""Ways out by processes: what a function does to others, and how it escapes what holds its own."""

import _thread
import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time

from tests.ways_out.ways import Facts, call, content, memory_of, number_of, opened, way_out

# --- looking ---


@way_out("sees the command line of another function's process", "command", seen_by_user=True)
def command_line_of_another(facts: Facts) -> str:
    return content(f"/proc/{facts['served']}/cmdline")


@way_out("lists the descriptors of another function's process", "descriptors", seen_by_user=True)
def descriptors_of_another(facts: Facts) -> str:
    return " ".join(sorted(os.listdir(f"/proc/{facts['prey']}/fd")))


@way_out("reads another function's variables from its process", "variable")
def variables_of_another(facts: Facts) -> str:
    return content(f"/proc/{facts['served']}/environ")


@way_out("reads the token that another function calls others with", "url")
def token_of_another(facts: Facts) -> str:
    return content(f"/proc/{facts['served']}/environ")


@way_out("reads the variables that the operator started the platform with", "operators_variable")
def variables_of_the_platform(facts: Facts) -> str:
    return content(f"/proc/{facts['serve']}/environ")


@way_out("finds the operator's variables in its own process, which is a fork of the platform's", "operators_variable")
def variables_in_its_own_process(_: Facts) -> str:
    found = " ".join(text.decode() for *_, text in memory_of(os.getpid(), rb"OPS-[0-9a-f]{32}"))
    return content("/proc/self/environ") + found


@way_out("finds another function's variables in its own process, as what started both left them", "variable")
def variables_left_in_its_own_process(_: Facts) -> str:
    return " ".join(text.decode() for *_, text in memory_of(os.getpid(), rb"VAR-[0-9a-f]{32}"))


@way_out("finds the token of another function in its own process, as what started both left it", "url")
def token_left_in_its_own_process(_: Facts) -> str:
    return " ".join(text.decode() for *_, text in memory_of(os.getpid(), rb"http://[\w.:]+/from/[\w-]{40,}"))


@way_out("reads where the platform's memory lies", "map")
def map_of_the_platform(facts: Facts) -> str:
    return content(f"/proc/{facts['serve']}/maps")


@way_out("finds the admin password in the platform's memory", "password")
def password_from_memory(facts: Facts) -> str:
    return " ".join(found.decode() for *_, found in memory_of(facts["serve"], rb"PW-[0-9a-f]{32}"))


@way_out("reads another function's memory", "memory")
def memory_of_another(facts: Facts) -> str:
    return " ".join(found.decode() for *_, found in memory_of(facts["prey"], rb"MEM-[0-9a-f]{32}"))


@way_out("reads the fork server's memory", "map")
def memory_of_the_fork_server(facts: Facts) -> str:
    next(memory_of(facts["fork_server"], rb"gpufaas_gpu_manager"))
    return content(f"/proc/{facts['fork_server']}/maps") + content(f"/proc/{facts['serve']}/maps")


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@way_out("reads another function's memory by process_vm_readv", "memory")
def memory_by_readv(facts: Facts) -> str:
    here = ctypes.create_string_buffer(36)
    mine, theirs = _Span(ctypes.addressof(here), 36), _Span(facts["address"], 36)
    call("process_vm_readv", facts["prey"], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    return str(here.raw, "latin-1")


# --- changing ---


@way_out("changes another function's answers in its memory", "answer_changed")
def answer_of_another(facts: Facts) -> str:
    changed = 0
    for memory, at, _ in memory_of(facts["prey"], rb"ANS-[0-9a-f]{32}", "r+b"):
        memory.seek(at)
        changed += memory.write(b"EVIL")
    return f"{changed} bytes"


@way_out("changes another function's answers by process_vm_writev", "answer_changed")
def answer_by_writev(facts: Facts) -> str:
    here = ctypes.create_string_buffer(b"EVIL", 4)
    mine, theirs = _Span(ctypes.addressof(here), 4), _Span(facts["answer_at"], 4)
    return str(call("process_vm_writev", facts["prey"], ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0))


@way_out("attaches to another function's process as a debugger")
def debugger(facts: Facts) -> str:
    seize, interrupt, detach = 0x4206, 0x4207, 17
    call("ptrace", seize, facts["prey"], 0, 0)
    call("ptrace", interrupt, facts["prey"], 0, 0)
    os.waitpid(facts["prey"], 0x40000000)
    call("ptrace", detach, facts["prey"], 0, 0)
    return "attached"


@way_out("writes a line into another function's log", "logged")
def log_of_another(facts: Facts) -> str:
    with open(f"/proc/{facts['prey']}/fd/1", "w") as pipe:
        pipe.write(f"{facts['mark']} was here\n")
    return facts["mark"]


@way_out("stops another function's process", "stopped")
def stopping_another(facts: Facts) -> str:
    os.kill(facts["prey"], signal.SIGSTOP)
    return "sent"


@way_out("ends another function's process", "ended")
def ending_another(facts: Facts) -> str:
    os.kill(facts["prey"], signal.SIGKILL)
    return "sent"


@way_out("sends a signal to the fork server")
def signal_to_the_fork_server(facts: Facts) -> str:
    os.kill(facts["fork_server"], signal.SIGCONT)
    return "sent"


@way_out("sends a signal to the platform")
def signal_to_the_platform(facts: Facts) -> str:
    os.kill(facts["serve"], signal.SIGCONT)
    return "sent"


@way_out("sends a signal to the platform by a descriptor of its process")
def signal_by_descriptor(facts: Facts) -> str:
    signal.pidfd_send_signal(os.pidfd_open(facts["serve"]), signal.SIGCONT)
    return "sent"


@way_out("chooses the processors of another function")
def processors_of_another(facts: Facts) -> str:
    os.sched_setaffinity(facts["prey"], os.sched_getaffinity(facts["prey"]))
    return "set"


@way_out("changes the priority of another function")
def priority_of_another(facts: Facts) -> str:
    os.setpriority(os.PRIO_PROCESS, facts["prey"], os.getpriority(os.PRIO_PROCESS, facts["prey"]))
    return "set"


@way_out("changes how soon another function's files are read")
def reading_of_another(facts: Facts) -> str:
    call("ioprio_set", 1, facts["prey"], 2 << 13 | 4)
    return "set"


@way_out("changes the limits of another function")
def limits_of_another(facts: Facts) -> str:
    resource.prlimit(facts["prey"], resource.RLIMIT_CORE, resource.prlimit(facts["prey"], resource.RLIMIT_CORE))
    return "set"


@way_out("changes the limits of the platform")
def limits_of_the_platform(facts: Facts) -> str:
    resource.prlimit(facts["serve"], resource.RLIMIT_CORE, resource.prlimit(facts["serve"], resource.RLIMIT_CORE))
    return "set"


# --- descriptors of others ---


def _taken(pid: int) -> str:
    process = os.pidfd_open(pid)
    found, failed = "", OSError("none")
    for number in range(3, 64):
        try:
            taken = call("pidfd_getfd", process, number, 0)
        except OSError as exc:
            failed = exc
            continue
        found += os.readlink(f"/proc/self/fd/{taken}") + " "
        os.close(taken)
    if not found:
        raise failed
    return found


@way_out("takes descriptors of the platform: the database's, its doors'", "database")
def descriptors_of_the_platform(facts: Facts) -> str:
    return _taken(facts["serve"])


@way_out("takes descriptors of the fork server")
def descriptors_of_the_fork_server(facts: Facts) -> str:
    return _taken(facts["fork_server"])


@way_out("takes descriptors of another function")
def descriptors_taken_of_another(facts: Facts) -> str:
    return _taken(facts["prey"])


@way_out("opens the database through the platform's descriptors in /proc", "same_file")
def database_by_descriptor(facts: Facts) -> str:
    folder = f"/proc/{facts['serve']}/fd"
    for name in os.listdir(folder):
        if os.readlink(f"{folder}/{name}").endswith("/gpufaas.db"):
            return opened(f"{folder}/{name}", os.O_RDWR)
    return ""


# --- what holds it ---


@way_out("leaves its control group", alone=True)
def control_group(_: Facts) -> str:
    failed: OSError | None = None
    for line in content("/proc/self/mountinfo").splitlines():
        fields, kind = line.split(" - ", 1)
        if kind.startswith("cgroup") and re.search(r"\b(pids|cgroup2)\b", kind):
            try:
                with open(fields.split()[4] + "/cgroup.procs", "w") as members:
                    members.write(str(os.getpid()))
            except OSError as exc:
                failed = exc
            else:
                return content("/proc/self/cgroup")
    raise failed or OSError("no control groups are to be seen")


@way_out("opens the limit of its memory to write")
def limit_of_its_memory(_: Facts) -> str:
    groups = content("/proc/self/cgroup").splitlines()
    group = next(line.split(":")[2] for line in groups if re.match(r"\d+:memory:|0::/.", line))
    for path in (f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes", f"/sys/fs/cgroup{group}/memory.max"):
        with contextlib.suppress(FileNotFoundError):
            return opened(path, os.O_WRONLY)
    return ""


@way_out("raises the limits that it was started with", alone=True)
def its_own_limits(_: Facts) -> str:
    raised = ""
    for name in ("DATA", "NOFILE", "NPROC", "CORE", "FSIZE"):
        limit = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            with contextlib.suppress(ValueError):
                resource.setrlimit(limit, (hard, hard + 1))
                raised += f"{name} "
    return raised


@way_out("has more than 5,000 threads and processes")
def threads_without_end(_: Facts) -> str:
    over = threading.Event()
    threading.stack_size(64 * 1024)
    try:
        for _number in range(5000):
            _thread.start_new_thread(over.wait, ())
        return "5000 threads"
    finally:
        threading.stack_size(0)
        over.set()


@way_out("leaves a process that outlives its function", "outlived")
def outliving_process(_: Facts) -> str:
    read, write = os.pipe()
    if not os.fork():
        os.setsid()
        if daemon := os.fork():
            os.write(write, str(daemon).encode())
            os._exit(0)
        for each in range(3):
            os.close(each)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _forget_parent()
        time.sleep(60)
        os._exit(0)
    return os.read(read, 20).decode()


@way_out("leaves a process that is the fork server's child, and outlives its function", "outlived")
def sibling_that_outlives(_: Facts) -> str:
    parents_child = 0x8000
    # The lock of Python is kept: the child has no thread that would give it back.
    number = number_of("clone")
    pid = ctypes.PyDLL(None).syscall(number, parents_child | signal.SIGCHLD, None, None, None, None)
    if not pid:
        script = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        os.execv(sys.executable, [sys.executable, "-ISc", script])
    return str(pid)


def _forget_parent() -> None:
    """Undo "ends with its parent", which a process sets for itself."""
    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)


# --- more rights ---


@way_out("becomes root, or is it", "is_root", alone=True)
def root(_: Facts) -> str:
    os.setresuid(0, 0, 0)
    return content("/proc/self/uid_map") + content("/proc/self/status")


@way_out("becomes root by a program with SUID, or is it", "is_root")
def root_by_a_program(_: Facts) -> str:
    command = ["su", "root", "-s", "/bin/sh", "-c", "cat /proc/self/uid_map /proc/self/status"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20).stdout
