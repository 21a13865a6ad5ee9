"""Alert rules: what Prometheus gets, that they ask for what is there, and that they fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from kvern.services.router.limits.verdict import Limit
from kvern.services.router.metrics import SHED_REASONS
from kvern.services.runtime.interceptors import _STATUS
from kvern.services.runtime.metrics import LATENCY_BUCKETS_S
from kvern.services.runtime.slow_reader import SLOW_READER
from tests.helm.chart import CHART, NAMESPACE, load, of_kind, render
from tests.helm.promql import Exposed, is_condition, matchers, missing, parse, selectors, series

Rule = dict[str, Any]

_RELEASE = "mill"
_EXTERNAL_REDIS = {
    "mode": "external",
    "external": {"url": "rediss://redis:6380", "ca": {"name": "redis-ca"}},
}
_TWO_POOLS = {
    "a": {"model": {"name": "big"}, "replicas": 3},
    "b": {"model": {"name": "big"}, "autoscaling": {"kind": "keda", "minReplicas": 2}},
    "c": {"model": {"name": "rare"}, "replicas": 0},
}
ALERTS = yaml.safe_load((CHART / "alerts" / "alerts.yaml").read_text())
NAMES = [alert["alert"] for kind in ("objectives", "alerts") for alert in ALERTS[kind]]


def rules(values: dict[str, Any] | None = None, **alerts: Any) -> list[Rule]:
    documents = render({"alerts": {"enabled": True, **alerts}, **(values or {})}, release=_RELEASE)
    [document] = of_kind(documents, "PrometheusRule")
    return [rule for group in document["spec"]["groups"] for rule in group["rules"]]


_TOKENS = {"jwt": {"issuer": "https://issuer", "audience": "kvern", "jwks": "https://issuer/keys"}}
ALL = rules({"redis": _EXTERNAL_REDIS, "pools": _TWO_POOLS, "auth": _TOKENS})
FIRING = [rule for rule in ALL if "alert" in rule and rule["alert"] != "KvernNoData"]
BLIND = [rule for rule in ALL if rule.get("alert") == "KvernNoData"]
RECORDED = {rule["record"]: [{**rule["labels"], "model": "big"}] for rule in ALL if "record" in rule}


def test_rules_ask_for_what_a_live_set_exposes(exposed: Exposed) -> None:
    known = {**exposed, **RECORDED}
    named = ("model", "release")
    assert [what for rule in ALL for what in missing(rule["expr"], known, of_any_value=named)] == []


def test_every_series_is_asked_for_by_namespace_and_release() -> None:
    for rule in ALL:
        for selector in selectors(parse(rule["expr"])):
            given = {matcher.name: matcher.value for matcher in matchers(selector)}
            assert given["namespace"] == NAMESPACE
            assert given["release" if selector.name in RECORDED else "job"] == _RELEASE


@pytest.mark.parametrize("name", NAMES)
def test_alert_says_what_is_wrong_and_what_to_do(name: str) -> None:
    documented = re.findall(r"^### (\w+)$", (CHART.parent.parent / "docs" / "operations.md").read_text(), re.MULTILINE)
    alerts = [rule for rule in FIRING if rule["alert"] == name]
    assert alerts
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} < rule["annotations"].keys()
        assert rule["for"]
        address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert address.endswith("docs/operations.md")
        assert anchor in [title.lower() for title in documented]


@pytest.mark.parametrize("name", NAMES)
def test_alert_has_a_twin_for_when_its_series_are_absent(name: str) -> None:
    asked: set[str] = set()
    for rule in FIRING:
        if rule["alert"] == name:
            asked |= series(parse(rule["expr"]))
    for rule in ALL:
        if rule.get("record") in asked:
            asked = asked - {rule["record"]} | series(parse(rule["expr"]))
    [twin] = [rule for rule in BLIND if rule["labels"]["blind"] == name]
    assert series(parse(twin["expr"])) == asked
    assert twin["expr"].count("absent(") == len(asked)


@pytest.mark.parametrize("rule", [*FIRING, *BLIND], ids=lambda rule: f"{rule['alert']}-{rule['labels'].get('blind')}")
def test_alert_is_silent_by_construction_while_all_is_well(rule: Rule) -> None:
    assert is_condition(parse(rule["expr"]))


def test_label_in_a_text_is_one_that_the_alert_has() -> None:
    for rule in FIRING:
        for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
            grouped = re.search(rf"by \([^)]*\b{label}\b", rule["expr"]) or (
                label == "model" and "on (model)" in rule["expr"]
            )
            assert grouped, (rule["alert"], label)


def test_objectives_are_bounds_of_buckets() -> None:
    definition = (load().schema or {})["$defs"]["latencyBucket"]["enum"]
    assert [float(bound) for bound in definition] == list(LATENCY_BUCKETS_S)
    for bound in LATENCY_BUCKETS_S:
        text = str([rule["expr"] for rule in rules(objectives={"firstTokenSeconds": bound}) if "record" in rule])
        assert f'le="{bound}"' in text


def test_codes_that_count_as_failures_are_the_service_s_own() -> None:
    [expression] = [rule["expr"] for rule in ALL if rule.get("record") == "kvern_availability:failed_ratio:rate5m"]
    ignored = set(re.findall(r'code!~"OK\|([^"]*)"', expression)[0].split("|"))
    clients = {code.name for error, code in _STATUS.items() if error.__name__ in _CLIENTS} | {"CANCELLED"}
    assert ignored == clients
    assert ignored <= {code.name for code in grpc.StatusCode}


_CLIENTS = {"InvalidArgument", "Unsupported", "NotFound", "AlreadyExists"}
"""Errors that are the client's doing."""


def test_sheds_that_do_not_count_are_readers_and_tenants_limits_wherever_they_are_named() -> None:
    assert {SLOW_READER, *Limit} < set(SHED_REASONS)
    for text in (str(ALL), (CHART / "dashboards" / "overview.json").read_text()):
        named = re.findall(r'reason[!=]~\\?"([A-Z_|]+)', text)
        assert {frozenset(each.split("|")) for each in named} == {frozenset((SLOW_READER, *Limit))}


def test_wanted_replicas_are_those_of_all_pools_of_a_model() -> None:
    missing_ones = {rule["labels"]["model"]: rule["expr"] for rule in FIRING if rule["alert"] == "KvernReplicasMissing"}
    assert missing_ones.keys() == {"big"}, "what is scaled to nothing is not missed"
    assert missing_ones["big"].endswith("< 5")


def test_alerts_of_what_a_release_has_not_are_left_out() -> None:
    with_all = {rule["alert"] for rule in FIRING}
    own_redis = {rule["alert"] for rule in rules() if "alert" in rule}
    no_redis = {rule["alert"] for rule in rules({"redis": {"mode": "none"}}) if "alert" in rule}
    tls = {"enabled": True, "router": {"secret": "r"}, "replica": {"secret": "s"}}
    secure = {rule["alert"] for rule in rules({"tls": tls}) if "alert" in rule}
    tokens = {rule["alert"] for rule in rules({"auth": _TOKENS}) if "alert" in rule}
    assert secure - own_redis == {"KvernCertificateExpires"}
    assert tokens - own_redis == {"KvernIssuerKeysOld"}
    assert with_all - own_redis == {"KvernCertificateExpires", "KvernIssuerKeysOld"}
    assert own_redis - no_redis == {"KvernRedisDown", "KvernIndexLookupsFail", "KvernPredictionsOff"}
    assert not any("redis" in rule["expr"] for rule in rules({"redis": {"mode": "none"}}))


def test_values_reach_the_rules() -> None:
    given = rules(
        labels={"release": "prometheus"},
        alertLabels={"team": "mills"},
        selector='cluster="x"',
        runbookUrl="https://wiki/kvern",
        objectives={"availability": 0.9, "minRequests": 7},
    )
    [critical] = [r for r in given if r.get("alert") == NAMES[0] and r["labels"]["window"] == "1h"]
    assert critical["labels"]["team"] == "mills"
    assert critical["annotations"]["runbook_url"] == f"https://wiki/kvern#{NAMES[0].lower()}"
    assert "> 14.4 * (1 - 0.9)" in critical["expr"]
    assert critical["expr"].endswith("* 3600 >= 7")
    assert 'kvern_router_requests_total{cluster="x"' in critical["expr"]


_JOB = f'namespace="{NAMESPACE}", job="{_RELEASE}"'
_POD = f'{_JOB}, pod="p", container="c", instance="10.0.0.1:9400"'
_REQUESTS = f"kvern_router_requests_total{{{_POD}, model"
_FIRST, _INTER = (f"kvern_router_{name}_seconds" for name in ("time_to_first_token", "inter_token_latency"))
_LOOKUPS, _PREDICTIONS = (f"kvern_router_{name}_total{{{_POD}" for name in ("index_lookups", "predictions"))
_READY = f'kvern_router_replicas{{{_POD}, model="big", state="ready"}}'
_ROUTER = {f"kvern_router_max_streams{{{_POD}}}": "100x2000"}


def requests(good: str, bad: str, code: str = "UNAVAILABLE") -> dict[str, str]:
    of_model = {f'{_REQUESTS}="big", code="OK"}}': good, f'{_REQUESTS}="big", code="{code}"}}': bad}
    return of_model | sheds("TENANT_TOKENS", "0x200")


def latencies(name: str, within: str, in_all: str, bound: str) -> dict[str, str]:
    return {
        f'{name}_bucket{{{_POD}, model="big", le="{bound}"}}': within,
        f'{name}_count{{{_POD}, model="big"}}': in_all,
    }


def of(metric: str, values: str, labels: str = "") -> dict[str, str]:
    return {f"{metric}{{{_POD}{labels}}}": values}


def sheds(reason: str, values: str = "0+1x60") -> dict[str, str]:
    return of("kvern_router_sheds_total", values, f', model="big", reason="{reason}"')


def refused(in_all: str, by_limits: str) -> dict[str, str]:
    return requests("0+98x200", in_all, "RESOURCE_EXHAUSTED") | sheds("TENANT_TOKENS", by_limits)


CASES: list[tuple[str, str, dict[str, str], bool]] = [
    ("KvernAvailabilityBudgetBurn", "90m", requests("0+98x200", "0+2x200"), True),
    ("KvernAvailabilityBudgetBurn", "90m", requests("0x200", "0+2x200"), True),
    ("KvernAvailabilityBudgetBurn", "90m", requests("0+9999x200", "0+1x200"), False),
    ("KvernAvailabilityBudgetBurn", "90m", requests("0+98x200", "0+2x200", "CANCELLED"), False),
    ("KvernAvailabilityBudgetBurn", "90m", requests("0x200", "0x60 1x200"), False),
    ("KvernAvailabilityBudgetBurn", "90m", refused("0+2x200", "0+2x200"), False),
    ("KvernAvailabilityBudgetBurn", "90m", refused("0+4x200", "0+2x200"), True),
    ("KvernFirstTokenBudgetBurn", "90m", latencies(_FIRST, "0+80x200", "0+100x200", "2.0"), True),
    ("KvernFirstTokenBudgetBurn", "90m", latencies(_FIRST, "0+995x200", "0+1000x200", "2.0"), False),
    ("KvernInterTokenBudgetBurn", "90m", latencies(_INTER, "0+80x200", "0+100x200", "0.2"), True),
    ("KvernInterTokenBudgetBurn", "90m", latencies(_INTER, "0+995x200", "0+1000x200", "0.2"), False),
    ("KvernNoReplicaReady", "10m", {_READY: "0x20", **_ROUTER}, True),
    ("KvernNoReplicaReady", "10m", _ROUTER, True),
    ("KvernNoReplicaReady", "10m", {_READY: "1x20", **_ROUTER}, False),
    ("KvernReplicasMissing", "30m", {_READY: "4x60", **_ROUTER}, True),
    ("KvernReplicasMissing", "30m", {_READY: "5x60", **_ROUTER}, False),
    ("KvernEngineStuck", "10m", of("kvern_engine_step_age_seconds", "0x6 40 0x20"), True),
    ("KvernEngineStuck", "10m", of("kvern_engine_step_age_seconds", "2x20"), False),
    ("KvernTokenizerDown", "10m", of("kvern_router_tokenizer_up", "0x20"), True),
    ("KvernTokenizerDown", "10m", of("kvern_router_tokenizer_up", "1x20"), False),
    ("KvernShedding", "40m", requests("0+9x60", "0x60") | sheds("X"), True),
    ("KvernShedding", "40m", requests("0+9x60", "0x60") | sheds("SLOW_READER"), False),
    ("KvernShedding", "40m", requests("0+9x60", "0x60") | sheds("TENANT_CONCURRENCY"), False),
    ("KvernStreamsNearLimit", "10m", of("kvern_router_streams", "95x20") | _ROUTER, True),
    ("KvernStreamsNearLimit", "10m", of("kvern_router_streams", "80x20") | _ROUTER, False),
    (
        "KvernKvCacheFull",
        "30m",
        of("kvern_engine_kv_usage_ratio", "0.99x60", ', model="big"')
        | of("kvern_engine_preemptions_total", "0+1x60", ', model="big"'),
        True,
    ),
    (
        "KvernKvCacheFull",
        "30m",
        of("kvern_engine_kv_usage_ratio", "0.99x60", ', model="big"')
        | of("kvern_engine_preemptions_total", "7x60", ', model="big"'),
        False,
    ),
    ("KvernRestarts", "30m", of("process_start_time_seconds", "100x9 200x9 300x20"), True),
    ("KvernRestarts", "30m", of("process_start_time_seconds", "100x9 200x30"), False),
    ("KvernEngineRestarts", "30m", of("kvern_engine_start_time_seconds", "100x9 200x30"), True),
    ("KvernEngineRestarts", "30m", of("kvern_engine_start_time_seconds", "100x60"), False),
    ("KvernCorruptedRequests", "30m", of("kvern_engine_corrupted_requests_total", "0x9 1x60"), True),
    ("KvernCorruptedRequests", "30m", of("kvern_engine_corrupted_requests_total", "1x60"), False),
    ("KvernPoisonedRequests", "30m", of("kvern_router_poisoned_total", "0x9 1x60"), True),
    ("KvernPoisonedRequests", "30m", of("kvern_router_poisoned_total", "1x60"), False),
    (
        "KvernEventLoopLag",
        "30m",
        of("kvern_event_loop_lag_seconds_bucket", "0+9x60", ', le="0.2"')
        | of("kvern_event_loop_lag_seconds_bucket", "0+10x60", ', le="0.5"')
        | of("kvern_event_loop_lag_seconds_bucket", "0+10x60", ', le="+Inf"'),
        True,
    ),
    (
        "KvernEventLoopLag",
        "30m",
        of("kvern_event_loop_lag_seconds_bucket", "0+10x60", ', le="0.2"')
        | of("kvern_event_loop_lag_seconds_bucket", "0+10x60", ', le="+Inf"'),
        False,
    ),
    (
        "KvernPredictionsOff",
        "90m",
        {
            f'{_PREDICTIONS}, model="big", result="exact"}}': "0+5x100",
            f'{_PREDICTIONS}, model="big", result="over"}}': "0+5x100",
        },
        True,
    ),
    ("KvernPredictionsOff", "90m", {f'{_PREDICTIONS}, model="big", result="exact"}}': "0+5x100"}, False),
    (
        "KvernIndexLookupsFail",
        "30m",
        {f'{_LOOKUPS}, result="ok"}}': "0+5x100", f'{_LOOKUPS}, result="timeout"}}': "0+5x100"},
        True,
    ),
    ("KvernIndexLookupsFail", "30m", {f'{_LOOKUPS}, result="ok"}}': "0+5x100"}, False),
    ("KvernRedisDown", "10m", of("kvern_engine_redis_up", "0x20"), True),
    ("KvernRedisDown", "10m", of("kvern_router_redis_up", "1x20") | of("kvern_engine_redis_up", "1x20"), False),
    (
        "KvernCertificateExpires",
        "10m",
        of("kvern_certificate_expiry_timestamp_seconds", "864000x20", ', file="f"'),
        True,
    ),
    (
        "KvernCertificateExpires",
        "10m",
        of("kvern_certificate_expiry_timestamp_seconds", "8640000x20", ', file="f"'),
        False,
    ),
    ("KvernIssuerKeysOld", "45m", of("kvern_router_issuer_keys_fetched_timestamp_seconds", "0x60"), True),
    ("KvernIssuerKeysOld", "45m", of("kvern_router_issuer_keys_fetched_timestamp_seconds", "0+60x60"), False),
    ("KvernNoData", "30m", {}, True),
]


def test_every_alert_has_a_case_that_fires_it_and_one_that_does_not() -> None:
    assert {name for name, _, _, fires in CASES if fires} == {*NAMES, "KvernNoData"}
    assert {name for name, _, _, fires in CASES if not fires} == set(NAMES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, Prometheus' own judge, is not installed")
def test_alert_fires_when_it_should(tmp_path: Path) -> None:
    for alert in (*NAMES, "KvernNoData"):
        alerts = [rule for rule in ALL if rule.get("alert") == alert]
        read = {name for rule in alerts for name in series(parse(rule["expr"]))}
        asked = [*(rule for rule in ALL if rule.get("record") in read), *alerts]
        (tmp_path / f"{alert}-rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "kvern", "rules": asked}]}))
        tests = [_promtool_test(*case) for case in CASES if case[0] == alert]
        content = {"rule_files": [f"{alert}-rules.yaml"], "evaluation_interval": "1m", "tests": tests}
        (tmp_path / f"{alert}.yaml").write_text(yaml.safe_dump(content))
    files = [f"{alert}.yaml" for alert in (*NAMES, "KvernNoData")]
    done = subprocess.run(
        ["promtool", "test", "rules", *files], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _promtool_test(alert: str, at: str, given: dict[str, str], fires: bool) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in given.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) > bool 0',
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }
