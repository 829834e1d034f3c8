"""`gpufaas`, but that its gateway keeps grants for 50 times as long: on a busy machine, the next call comes late."""

from gpufaas_cli.main import main
from gpufaas_cluster import kept_grants
from gpufaas_cluster.kept_grants import KeptGrants
from gpufaas_core.messages import Grant
from gpufaas_core.model import CallId, Seconds

TIMES = 50
_granted = KeptGrants.granted


def granted(kept: KeptGrants, grant: Grant, call: CallId, keep_s: Seconds, deadline: float) -> None:
    _granted(kept, grant, call, TIMES * keep_s, deadline)


if __name__ == "__main__":
    kept_grants._TICK_S *= TIMES  # type: ignore[misc]
    KeptGrants.granted = granted  # type: ignore[method-assign]
    main()
