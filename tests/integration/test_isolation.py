"""What libraries do goes on working within the walls."""

from tests.integration.conftest import HTTP, Platform

DOES = """
    import ctypes, getpass, multiprocessing, os, socket, subprocess, sys, tempfile
    from multiprocessing.shared_memory import SharedMemory

    COMPUTES = "int doubled(int value) { return 2 * value; }"

    def in_pools():
        found = []
        for way in ("spawn",):
            with multiprocessing.get_context(way).Pool(1) as pool:
                found.append(pool.map(abs, [-1]))
        return found

    def shared():
        memory = SharedMemory(create=True, size=4096)
        memory.buf[0] = 7
        again = SharedMemory(memory.name)
        value = again.buf[0]
        again.close(), memory.close(), memory.unlink()
        return value

    def compiled():
        path = os.path.join(tempfile.mkdtemp(), "own.so")
        subprocess.run(["cc", "-shared", "-o", path, "-x", "c", "-"], input=COMPUTES.encode(), check=True)
        return ctypes.CDLL(path).doubled(21)

    def listens():
        path = os.path.join(tempfile.gettempdir(), "socket")
        with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
            server.bind(path)
            server.listen()
            client.connect(path)
            return True

    def speaks():
        with open("/dev/stdout", "w") as output:
            return output.write("by its name\\n")

    def handle(event, context):
        import wave  # not before
        subprocess.run("test -w $HOME && pwd >/dev/null", shell=True, check=True)
        found = [in_pools(), shared(), compiled(), listens(), speaks(), getpass.getuser(),
                 bool(socket.getaddrinfo("localhost", 80)), sys.executable == subprocess.run(
                     [sys.executable, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True
                 ).stdout.strip()]
        return {"statusCode": 200, "body": found}
"""


def test_processes_shared_memory_compilers_sockets_and_names_work(platform: Platform) -> None:
    path = platform.deploy("does", DOES, HTTP, memory="190MiB")
    answer = platform.call(path)
    assert answer.status_code == 200, answer.text
    assert answer.json() == [[[1]], 7, 42, True, 12, "function", True, True]
