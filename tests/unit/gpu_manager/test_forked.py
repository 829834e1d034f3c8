"""A standby between two turns of its node."""

import socket

import pytest

from gpufaas_gpu_manager import forked
from gpufaas_gpu_manager.confine import NOT_CONFINED
from gpufaas_gpu_manager.forked import Prepare


def test_a_standby_that_is_given_up_in_the_moment_it_is_taken_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended with a traceback in the log of a platform that stopped."""
    monkeypatch.setattr(forked, "mark_fork_point", lambda: None)
    node, door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    node.send(b"a worker")
    node.close()

    with door:
        assert forked._stand_by(Prepare(1), door) == 0


def test_a_worker_that_cannot_be_isolated_does_not_run_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_: object) -> None:
        raise OSError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(forked, "begin", refused)

    assert not forked._enter(NOT_CONFINED)
    said = "gpufaas: a worker ends, since it cannot be isolated: "
    assert capsys.readouterr().err.startswith(said)
    assert forked._enter(NOT_CONFINED, begun=True), "it has its root already"
