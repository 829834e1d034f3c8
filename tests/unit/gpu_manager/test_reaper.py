"""The end of a worker is reported when all its processes are gone. Real processes, started by one of their own."""

import subprocess
import sys
import textwrap

PRELUDE = """
    import os, signal, sys, time
    from gpufaas_gpu_manager.confine import inherit_orphans
    from gpufaas_gpu_manager.proc import children_of
    from gpufaas_gpu_manager.reaper import Reaper

    inherit_orphans()
    reaper = Reaper()
    lives, is_alive = os.pipe()  # each process of a worker that a test waits for writes a byte
    may_end, end = os.pipe()  # a worker that ends at the test's word reads one

    def begun(count):
        while count:
            count -= len(os.read(lives, count))

    def sleeps():
        os.write(is_alive, b"x")
        time.sleep(60)

    def worker(number, does):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            does()
            os._exit(0)
        reaper.workers[pid] = number
        return pid

    def until_told(count=1):
        told = []
        end = time.monotonic() + 20
        while len(told) < count and time.monotonic() < end:
            told += reaper.reap()
            time.sleep(0.001)
        return told
"""


def run(code: str) -> str:
    program = textwrap.dedent(PRELUDE) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_worker_s_daemons_are_gone_when_its_end_is_told() -> None:
    assert run("""
        def leaves_daemons():
            for _ in range(20):
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        sleeps()
                    os._exit(0)
            os.read(may_end, 1)
            os._exit(7)

        worker(1, leaves_daemons)
        begun(20)
        os.write(end, b"x")
        print(until_told(), children_of(os.getpid()))
    """) == "[(1, 7)] []\n"  # fmt: skip


def test_a_chain_of_children_that_each_lose_their_parent_is_followed_to_its_end() -> None:
    assert run("""
        def chain(depth=6):
            os.setpgid(0, 0) if os.getsid(0) != os.getpid() else None
            if depth and os.fork() == 0:
                chain(depth - 1)
            sleeps()

        pid = worker(1, chain)
        begun(7)
        os.kill(pid, signal.SIGKILL)
        print(until_told(), children_of(os.getpid()))
    """) == "[(1, -9)] []\n"  # fmt: skip


def test_an_orphan_that_was_there_before_its_worker_was_reaped_is_waited_for_all_the_same() -> None:
    assert run("""
        def disowns():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    sleeps()
                os._exit(0)
            os.wait()
            os.read(may_end, 1)

        worker(1, disowns)
        begun(1)
        while len(children_of(os.getpid())) < 2:
            time.sleep(0.001)
        reaper.workers[-1] = 2  # what is seen, and killed, while another worker's end is looked after
        reaper.reap()
        os.write(end, b"x")
        (told,) = until_told()
        print(told[0], children_of(os.getpid()))
    """) == "1 []\n"  # fmt: skip


def test_a_living_worker_is_left_alone() -> None:
    assert run("""
        first, second = worker(1, lambda: None), worker(2, lambda: time.sleep(60))
        print(until_told(), children_of(os.getpid()) == [second])
        os.kill(second, signal.SIGKILL)
        print(until_told())
    """) == "[(1, 0)] True\n[(2, -9)]\n"  # fmt: skip
