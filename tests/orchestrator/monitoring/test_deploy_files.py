"""The files in deploy/ for Prometheus and Grafana are well formed and name only metrics that exist."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from paths import ROOT
from promtool import promtool

from pentad.orchestrator.monitoring.exporter import METRICS

DEPLOY = ROOT / "deploy"
ALERTS, SCRAPES = DEPLOY / "prometheus" / "alerts.yml", DEPLOY / "prometheus" / "prometheus.yml"
BOARD = json.loads((DEPLOY / "grafana" / "pentad.json").read_text())
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
JOB = '{job="a"}'


def expressions() -> Iterator[tuple[str, str]]:
    """(location, text) of each PromQL expression."""
    yield from ((rule["alert"], rule["expr"]) for rule in RULES)
    yield from ((note["name"], note["expr"]) for note in BOARD["annotations"]["list"])
    for panel in BOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])


def described(name: str) -> bool:
    """Whether the exporter has a metric of this name; parts of a histogram have a suffix."""
    base = re.sub(r"_(bucket|count|sum)$", "", name)
    return name in METRICS or (base in METRICS and METRICS[base].kind == "histogram")


def test_every_metric_named_is_one_the_exporter_has() -> None:
    named = {(where, name) for where, text in expressions() for name in re.findall(r"\bpentad_\w+", text)}
    assert [found for found in sorted(named) if not described(found[1])] == []
    assert len(named) > 40


def test_every_label_named_belongs_to_its_metric() -> None:
    wrong = []
    for where, text in expressions():
        for name, labels in re.findall(r"\b(pentad_\w+)\{([^}]*)\}", text):
            metric = METRICS.get(name) or METRICS[re.sub(r"_(bucket|count|sum)$", "", name)]
            used = set(re.findall(r"(\w+)\s*(?:=|!)", labels))
            wrong += [(where, name, label) for label in used - {*metric.labels, "job"}]
    assert not wrong


def test_every_metric_except_build_info_is_on_the_dashboard() -> None:
    text = " ".join(expression for _, expression in expressions())
    missing = [name for name in METRICS if not re.search(rf"\b{name}(_bucket|_count|_sum)?\b", text)]
    assert missing == ["pentad_build_info"]


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", ALERTS)


def test_promtool_accepts_the_scrape_configs_with_and_without_ray(tmp_path: Path) -> None:
    promtool("check", "config", "--syntax-only", SCRAPES)
    head, _, tail = SCRAPES.read_text().partition("  # - job_name")
    everything = f"{head}  - job_name{tail}".replace("\n  #   ", "\n    ")
    assert len(yaml.safe_load(everything)["scrape_configs"]) == 2
    (tmp_path / "prometheus.yml").write_text(everything)
    promtool("check", "config", "--syntax-only", tmp_path / "prometheus.yml")


def test_the_job_of_a_metric_is_the_run() -> None:
    (scrape,) = yaml.safe_load(SCRAPES.read_text())["scrape_configs"]
    assert scrape["honor_labels"] is True


def test_prometheus_parses_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = []
    for number, (_, text) in enumerate(expressions()):
        for variable, substitute in {"$__rate_interval": "1m", "$__range": "1h", "$job": "a"}.items():
            text = text.replace(variable, substitute)
        assert "$" not in text
        rules.append({"record": f"r{number}", "expr": text})
    path = tmp_path / "board.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", path)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_severity_and_a_summary(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert re.search(r"\$labels\.(job|rank)", rule["annotations"]["summary"])
    assert len({each["alert"] for each in RULES}) == len(RULES)


def case(name: str, minute: int, series: dict[str, str], fires: bool) -> dict[str, Any]:
    """One case of `promtool test rules`: series by name with one value per minute, and whether the alert fires at
    `minute`."""
    assert name in {rule["alert"] for rule in RULES}
    return {
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": int(fires)}],
            }
        ],
    }


STEPS, TOKENS = f"pentad_step_duration_seconds_count{JOB}", f"pentad_tokens_total{JOB}"
STATE = 'pentad_run_state{job="a", state="%s"}'
BEAT = 'pentad_heartbeat_timestamp_seconds{job="a", rank="1", node="n"}'
LOST = 'pentad_failures_total{job="a", fault="killed", detector="ray"}'


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    running, paused = STATE % "running", STATE % "paused"
    cases = [
        case("PentadNoProgress", 30, {STEPS: "0+10x10 100x30", running: "1x40"}, True),
        case("PentadNoProgress", 30, {STEPS: "0+10x40", running: "1x40"}, False),
        case("PentadNoProgress", 30, {STEPS: "0+10x10 100x30", running: "0x40", paused: "1x40"}, False),
        case("PentadThroughputDrop", 80, {TOKENS: "0+1000x60 60000+500x40", running: "1x100"}, True),
        case("PentadThroughputDrop", 80, {TOKENS: "0+1000x100", running: "1x100"}, False),
        case("PentadHeartbeatStale", 5, {BEAT: "0x10", running: "1x10"}, True),
        case("PentadHeartbeatStale", 5, {BEAT: "0+60x10", running: "1x10"}, False),
        case("PentadRankLost", 10, {LOST: "0x5 1x10"}, True),
        case("PentadRankLost", 10, {LOST: "1x15"}, False),
        case("PentadMeshSmaller", 30, {f"pentad_world_size{JOB}": "4x10 3x30"}, True),
        case("PentadMeshSmaller", 30, {f"pentad_world_size{JOB}": "4x10 3x2 4x30"}, False),
        case("PentadRecoveriesFrequent", 30, {f"pentad_generation{JOB}": "1+1x5 6x40"}, True),
        case("PentadRecoveriesFrequent", 30, {f"pentad_generation{JOB}": "1x10 2x40"}, False),
    ]
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}))
    promtool("test", "rules", path)


def test_panels_have_unique_ids_and_positions() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        {(x, y) for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])}
        for p in (panel["gridPos"] for panel in panels)
    ]
    assert all(0 <= x < 24 for cell in cells for x, _ in cell)
    assert not any(a & b for a, b in combinations(cells, 2))


def test_the_dashboard_works_with_any_datasource_and_run() -> None:
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource", "job"]
    for part in [*BOARD["panels"], *BOARD["annotations"]["list"]]:
        assert part["datasource"]["uid"] == "${datasource}"
    texts = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    assert all(text.count("pentad_") == text.count('job="$job"') for text in texts)


def test_the_provider_points_at_a_folder() -> None:
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "provisioning.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"].startswith("/")
