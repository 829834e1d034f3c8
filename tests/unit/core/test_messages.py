"""Messages of journals and other versions are still read, by their tags."""

import msgspec
import pytest

from gpufaas_core import messages as m
from gpufaas_core.model import CallId, DeviceId, FunctionId, Part

CALL, DEVICE, FUNCTION = CallId("c"), DeviceId("n/cpu:0"), FunctionId("f.ns@1")
GRANT = m.Grant(1, 2, (CALL,), FUNCTION, "d", (Part(DEVICE, 10),), False)


def test_each_call_of_a_grant_gets_it_with_itself_first() -> None:
    first, second, third = CallId("a"), CallId("b"), CallId("c")
    grant = m.Grant(1, 2, (first, second, third), FUNCTION, "d", (Part(DEVICE, 10),), False)

    assert grant.of(first) is grant
    assert grant.of(third).calls == (third, first, second)
    assert (grant.of(third).call, grant.of(third).number) == (third, 2)


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ('{"type":"Cancelled","call":"c"}', m.CallerLeft(CALL)),
        (
            '{"type":"LoadFailed","function":"f.ns@1","device":"n/cpu:0","reason":"r"}',
            m.CopyFailed(FUNCTION, DEVICE, "r"),
        ),
        ('{"type":"Refused","call":"c","device":"n/cpu:0","reason":"r"}', m.NodeRefused(CALL, DEVICE, "r")),
        (
            '{"type":"Start","grant":{"epoch":1,"number":2,"calls":["c"],"function":"f.ns@1","digest":"d",'
            '"parts":[{"device":"n/cpu:0","memory":10}],"cold":false}}',
            m.StartCall(GRANT),
        ),
        (
            '{"type":"Load","epoch":1,"number":2,"function":"f.ns@1","digest":"d",'
            '"parts":[{"device":"n/cpu:0","memory":10}]}',
            m.LoadCopy(1, 2, FUNCTION, "d", (Part(DEVICE, 10),)),
        ),
        (
            '{"type":"Abort","call":"c","device":"n/cpu:0","requeue":true}',
            m.Abort(CALL, DEVICE, take_back=True),
        ),
    ],
)
def test_a_message_has_the_tag_that_it_always_had(written: str, means: m.Event | m.Command) -> None:
    side = m.Command if isinstance(means, m.Command) else m.Event

    assert msgspec.json.decode(written, type=side) == means
    assert msgspec.json.decode(msgspec.json.encode(means))["type"] == msgspec.json.decode(written)["type"]
