"""The table in docs/metrics.md, the exported metrics, and the expressions in deploy/ agree."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from tests.unit.gateway.fakes import idle

from gpufaas_core.model import Device, DeviceId, EngineStatus, Failing, FunctionId, ResidentStatus
from gpufaas_core.scaling import ScalingRule
from gpufaas_gateway.metrics import Metrics
from gpufaas_gateway.usage import FunctionStats, QueueStatus

ROOT = Path(__file__).parents[3]
Exported = dict[str, tuple[str, frozenset[str]]]
"""Type and labels by name."""

_WORDS = frozenset({"and", "or", "unless", "by", "without", "on", "ignoring", "bool", "offset"})


@pytest.fixture(scope="module")
def exported() -> Exported:
    """Everything that there is to show is shown."""
    echo = FunctionId("echo.openfaas-fn@1")
    resident = ResidentStatus(echo, 100, 0, False, False, 0.0)
    device = replace(idle(Device(DeviceId("n1/cpu:0"), "cpu", 1000)), resident=(resident,))
    stats = FunctionStats("echo.openfaas-fn")
    metrics = Metrics(
        lambda: EngineStatus(
            "lalb", (device,), {echo: 1}, {echo: 1}, {echo: 2}, failing={echo: Failing("no weights", 3, 9.0, 1.0)}
        ),
        lambda: [(stats, 1, ScalingRule())],
        lambda: {echo: 3},
        lambda: {"reports": QueueStatus(4, 100, 3, 2, 1)},
    )
    stats.observe(200, 0.1, hit=True)
    stats.observe_batch(2)  # batch sizes are exported of functions that had a batch
    metrics._observe_request(("GET", "/system/info", "200"), 0.1)
    types: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            types[name] = kind
        elif not line.startswith("#"):
            sample, _, rest = line.rpartition(" ")[0].partition("{")
            name = sample if sample in types else sample.rpartition("_")[0]
            labels.setdefault(name, set()).update(set(re.findall(r'(\w+)="', rest)) - {"le"})
    return {name: (kind, frozenset(labels[name])) for name, kind in types.items()}


def table_in(text: str) -> Exported:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*?) ?\| [^|]+ \|$", text, re.MULTILINE)
    table = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(rows) == len(table), "a metric has two rows"
    return table


def test_the_table_in_the_docs_is_what_is_exported(exported: Exported) -> None:
    text = (ROOT / "docs/metrics.md").read_text().partition("### In a cluster")[0]

    assert table_in(text) == exported


def test_what_gateways_of_a_cluster_tell_for_sums_is_what_the_scheduler_does_not(exported: Exported) -> None:
    metrics = Metrics(lambda: EngineStatus("lalb", (idle(Device(DeviceId("n1/cpu:0"), "cpu", 1000)),), {}, {}))
    own = set(re.findall(rb"^# TYPE (\w+)", metrics.render_own(), re.MULTILINE))
    rest = set(re.findall(rb"^# TYPE (\w+)", metrics.render(), re.MULTILINE)) - own

    assert {each.decode() for each in rest} == {
        name
        for name in exported
        if name.startswith(("gpufaas_device_", "gpufaas_resident_", "gpufaas_queue_", "gpufaas_function_failed_"))
    }


def test_the_alert_rules_ask_for_exported_metrics(exported: Exported) -> None:
    document = yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    cluster = (ROOT / "docs/metrics.md").read_text().partition("### In a cluster")[2]
    exported = exported | table_in(cluster)

    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert_known(rule["expr"], exported)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: it comes with prometheus")
def test_the_alerts_of_a_cluster_fire_when_they_should_and_at_no_other_time() -> None:
    rules = Path(__file__).with_name("alerts_test.yml")

    done = subprocess.run(["promtool", "test", "rules", rules], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_of_a_cluster_has_a_row_that_says_what_to_do() -> None:
    groups = {
        each["name"]: each["rules"] for each in yaml.safe_load((ROOT / "deploy/alerts.yml").read_text())["groups"]
    }
    text = (ROOT / "docs/operations.md").read_text()

    assert {each["alert"] for each in groups["gpufaas-cluster"]} == set(
        re.findall(r"^\| `([A-Z]\w+)` \| ", text, re.MULTILINE)
    )


def test_the_dashboard_asks_for_exported_metrics(exported: Exported) -> None:
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(expressions) > 20
    for expression in expressions:
        assert_known(expression, exported)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            (name,) = re.findall(r"label_values\((\w+), function_name\)", variable["definition"])
            assert name in exported


def test_the_expressions_in_the_docs_ask_for_exported_metrics(exported: Exported) -> None:
    text = (ROOT / "docs/metrics.md").read_text().partition("## Useful questions")[2]
    expressions = re.findall(r"\| `([^`]+)` \|$", text, re.MULTILINE)

    assert expressions
    for expression in expressions:
        assert_known(expression, exported)


def test_a_metric_that_is_not_exported_would_be_found(exported: Exported) -> None:
    with pytest.raises(AssertionError, match="gateway_service_cuont"):
        assert_known("sum by (function_name) (gateway_service_cuont) > 0", exported)


def assert_known(expression: str, exported: Exported) -> None:
    assert expression.count("(") == expression.count(")")
    names = list(metrics_in(expression))
    assert names, f"no metric in {expression}"
    for name in names:
        base, _, suffix = name.rpartition("_")
        is_part = suffix in ("bucket", "sum", "count") and exported.get(base, ("",))[0] == "histogram"
        assert is_part or (name in exported and exported[name][0] != "histogram"), f"{name} is not exported"


def metrics_in(expression: str) -> Iterator[Any]:
    """Yield the identifiers that are neither functions, keywords, labels nor durations."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", expression)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    for found in re.finditer(r"[a-zA-Z_]\w*(?!\w)(?!\s*\()", bare):
        if found[0] not in _WORDS:
            yield found[0]
