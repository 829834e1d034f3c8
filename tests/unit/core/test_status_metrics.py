"""What the scheduler knows, as metrics: by function, whichever of its revisions it is of."""

from gpufaas_core.model import EngineStatus, Failing, FunctionId
from gpufaas_core.status_metrics import status_metrics


def test_two_revisions_of_a_function_are_one_row_of_each_metric() -> None:
    old, new = FunctionId("f.ns@1"), FunctionId("f.ns@2")
    status = EngineStatus(
        "lb", (), {old: 2, new: 3}, {}, failing={old: Failing("no", 4, 0.0, 0.0), new: Failing("no", 1, 0.0, 0.0)}
    )

    found = {each.name: [(row.labels, row.value) for row in each.samples] for each in status_metrics(status)}

    assert found["gpufaas_queue_length"] == [({"function_name": "f.ns"}, 5)]
    assert found["gpufaas_function_failed_loads"] == [({"function_name": "f.ns"}, 4)]
