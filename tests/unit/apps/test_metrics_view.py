"""The metrics of several processes as one text, as Prometheus reads it."""

from prometheus_client.parser import text_string_to_metric_families

from gpufaas_apps.metrics_view import joined, with_label

ONE = """\
# HELP calls_total Calls that ended
# TYPE calls_total counter
calls_total{code="200",name="a} b"} 3.0
# HELP waiting Calls that wait
# TYPE waiting gauge
waiting 2.0
"""
OTHER = ONE.replace("3.0", "5.0") + "# HELP more Something else\n# TYPE more gauge\nmore 1e-3\n"


def read(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    found = {(each.name, frozenset(each.labels.items())): each.value for each in samples}
    assert len(found) == len(samples), "no series is there twice"
    return found


def test_each_series_says_its_process_and_each_family_is_there_once() -> None:
    text = joined([with_label(ONE, "process", "g-1"), with_label(OTHER, "process", "g-2")])

    calls = {("code", "200"), ("name", "a} b")}
    assert read(text) == {
        ("calls_total", frozenset(calls | {("process", "g-1")})): 3,
        ("calls_total", frozenset(calls | {("process", "g-2")})): 5,
        ("waiting", frozenset({("process", "g-1")})): 2,
        ("waiting", frozenset({("process", "g-2")})): 2,
        ("more", frozenset({("process", "g-2")})): 0.001,
    }
    assert text.count("# TYPE calls_total") == 1
    assert [line for line in text.splitlines() if line.startswith("# TYPE")] == [
        "# TYPE calls_total counter", "# TYPE waiting gauge", "# TYPE more gauge",
    ]  # fmt: skip


def test_a_process_that_does_not_answer_is_left_out() -> None:
    assert joined([with_label("", "process", "g-1"), ONE]) == ONE
