"""`gpufaas`, but that its gateway keeps grants for 50 times as long: on a busy machine, the next call comes late."""

from msgspec.structs import replace

from gpufaas_cli.main import main
from gpufaas_cluster import control, kept_grants
from gpufaas_cluster.remote_scheduler import RemoteScheduler

TIMES = 50
_heard = RemoteScheduler.heard


def heard(scheduler: RemoteScheduler, message: object) -> None:
    if isinstance(message, control.Granted):
        message = replace(message, keep_s=TIMES * message.keep_s)
    _heard(scheduler, message)


if __name__ == "__main__":
    kept_grants._TICK_S *= TIMES  # type: ignore[misc]
    RemoteScheduler.heard = heard  # type: ignore[method-assign]
    main()
