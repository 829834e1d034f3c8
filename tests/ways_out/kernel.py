"""Ways out by the kernel's rarer calls, namespaces, and what is shared by name."""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import signal
import socket

from tests.ways_out.ways import Facts, call, contents_below, descriptor_of, refused_with, way_out

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000

# --- mounts and namespaces ---


@way_out("mounts a file system", alone=True)
def mounting(_: Facts) -> str:
    with contextlib.suppress(OSError):
        call("unshare", NEW_MOUNTS)  # so that the machine keeps its mounts
        call("mount", b"none", b"/", None, 1 << 18 | 1 << 14, None)  # private, recursive
    call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
    return "mounted"


@way_out("has rights in a new user namespace: mounts there", alone=True)
def user_namespace(_: Facts) -> str:
    call("unshare", NEW_USER | NEW_MOUNTS)
    call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
    return "mounted"


@way_out("makes a user namespace by clone3", alone=True)
def user_namespace_by_clone3(_: Facts) -> str:
    arguments = (ctypes.c_uint64 * 11)(NEW_USER)
    arguments[4] = signal.SIGCHLD
    pid = call("clone3", ctypes.byref(arguments), ctypes.sizeof(arguments))
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return "made"


@way_out("changes its root directory", alone=True)
def root_directory(_: Facts) -> str:
    os.chroot("/tmp")
    return "changed"


@way_out("opens a tree of mounts to attach it elsewhere")
def tree_of_mounts(_: Facts) -> str:
    return descriptor_of("open_tree", -100, b"/", 1)


@way_out("makes a file system by the newer calls")
def newer_mount_calls(_: Facts) -> str:
    return descriptor_of("fsopen", b"tmpfs", 0)


@way_out("enters the platform's mount namespace", "secret", alone=True)
def namespace_of_the_platform(facts: Facts) -> str:
    call("setns", os.open(f"/proc/{facts['serve']}/ns/mnt", os.O_RDONLY), NEW_MOUNTS)
    return contents_below(f"{facts['data']}/secrets")


@way_out("enters another function's namespaces by a descriptor of its process", alone=True)
def namespaces_of_another(facts: Facts) -> str:
    call("setns", os.pidfd_open(facts["prey"]), NEW_MOUNTS)
    return "entered"


# --- rarer calls ---


@way_out("has an io_uring, whose operations no filter of system calls sees")
def ring(_: Facts) -> str:
    return descriptor_of("io_uring_setup", 4, ctypes.create_string_buffer(120))


@way_out("makes a map of the kernel's programs")
def program_in_the_kernel(_: Facts) -> str:
    return descriptor_of("bpf", 0, ctypes.byref((ctypes.c_uint32 * 32)(2, 4, 8, 1)), 128)


@way_out("measures another function's process")
def measuring_another(facts: Facts) -> str:
    event = (ctypes.c_uint32 * 32)(1, 128)  # a counter of software: the processor's clock
    return descriptor_of("perf_event_open", ctypes.byref(event), facts["prey"], -1, -1, 0)


@way_out("handles its own page faults, with which races in the kernel are won")
def page_faults(_: Facts) -> str:
    return descriptor_of("userfaultfd", 0)


@way_out("watches all files of a file system")
def watching_files(_: Facts) -> str:
    return descriptor_of("fanotify_init", 0, 0)


@way_out("puts a key into a ring that the kernel keeps for its user")
def key_ring(facts: Facts) -> str:
    return str(call("add_key", b"user", facts["mark"].encode(), b"x", 1, -2))


@way_out("may replace the kernel")
def another_kernel(_: Facts) -> str:
    return refused_with(errno.EBADF, "kexec_file_load", -1, -1, 0, None, 0)


@way_out("may load a module into the kernel")
def module_of_the_kernel(_: Facts) -> str:
    return refused_with(errno.EBADF, "finit_module", -1, b"", 0)


@way_out("may restart the machine")
def restart(_: Facts) -> str:
    return refused_with(errno.EINVAL, "reboot", 0, 0, 0, 0)


@way_out("may add swap to the machine")
def swap(_: Facts) -> str:
    return refused_with(errno.ENOENT, "swapon", b"/nothing/of/this/name", 0)


@way_out("reads the kernel's messages, with its addresses")
def messages_of_the_kernel(_: Facts) -> str:
    buffer = ctypes.create_string_buffer(4096)
    if ctypes.CDLL(None, use_errno=True).klogctl(3, buffer, 4096) < 0:
        raise OSError(ctypes.get_errno(), "klogctl")
    return "read"


@way_out("sets the machine's name")
def name_of_the_machine(_: Facts) -> str:
    socket.sethostname(socket.gethostname())  # to what it is
    return "set"


@way_out("may set the clock")
def clock(_: Facts) -> str:
    state = (ctypes.c_uint8 * 512)()
    call("adjtimex", ctypes.byref(state))
    ctypes.c_uint32.from_buffer(state).value = 0x10  # its state, to what it is
    return f"set {call('adjtimex', ctypes.byref(state))}"


@way_out("has data that are executed, as exploits need", alone=True)
def executed_data(_: Facts) -> str:
    call("personality", 0x0400000)
    return "chosen"


@way_out("makes a system call of 32 bits, whose numbers are others", alone=True)
def call_of_32_bits(_: Facts) -> str:
    if platform.machine() != "x86_64":
        return ""

    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3")  # push rbx; mov eax, getpid; int 0x80; pop rbx; ret
    at = ctypes.addressof(ctypes.c_char.from_buffer(code))
    found = ctypes.CFUNCTYPE(ctypes.c_int)(at)()
    return "called" if found == os.getpid() else ""


# --- shared by name ---


@way_out("reads another function's shared memory of System V", "system_v")
def shared_memory_of_another(facts: Facts) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    at = libc.shmat(facts["system_v_id"], None, 0o10000)
    if at in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "shmat")
    return ctypes.string_at(at, 36).decode("latin-1")


@way_out("removes another function's shared memory of System V")
def shared_memory_removed(facts: Facts) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.shmctl(facts["system_v_id"], 0, None):
        raise OSError(ctypes.get_errno(), "shmctl")
    return "removed"


@way_out("reads another function's message queue", "message")
def message_queue_of_another(facts: Facts) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    queue = libc.mq_open(facts["queue"].encode(), os.O_RDONLY | os.O_NONBLOCK)
    if queue < 0:
        raise OSError(ctypes.get_errno(), "mq_open")
    buffer = ctypes.create_string_buffer(8192)
    libc.mq_receive(queue, buffer, 8192, None)
    os.close(queue)
    return buffer.value.decode()
