"""Write the chart's Grafana dashboards from helm/dashboards/*.yaml, which says only what differs between panels.

`python tools/dashboards.py` writes them, `--check` says whether they are as they would be written.

In the sources `@all`, `@model`, `@process` and `@engine` stand for label matchers of what was chosen at the top of the
dashboard, `@client_codes` for the statuses that say nothing of the service, `@client_sheds` for the reasons of
RESOURCE_EXHAUSTED that do not either, and `[@]` for the interval of a rate.
`quantiles` names rates of a histogram's buckets, of which the median and the 99th percentile are shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HELM = Path(__file__).resolve().parent.parent / "helm"
SOURCES, DASHBOARDS = HELM / "dashboards", HELM / "kvern" / "dashboards"

_ALL = 'namespace=~"$namespace", job=~"$job"'
_SHORT = {
    "@all": _ALL,
    "@model": f'{_ALL}, model=~"$model"',
    "@process": f'{_ALL}, instance=~"$instance"',
    "@engine": f'{_ALL}, instance=~"$instance", model=~"$model"',
    "@client_codes": "CANCELLED|INVALID_ARGUMENT|NOT_FOUND|ALREADY_EXISTS|UNIMPLEMENTED",
    "@client_sheds": "SLOW_READER|TENANT_CONCURRENCY|TENANT_TOKENS",
    "[@]": "[$__rate_interval]",
}
_QUANTILES = {"p50": 0.5, "p99": 0.99}

_WIDTH = 24
_PER_LINE = {"stat": 6, "timeseries": 3}
_HEIGHT = {"stat": 4, "timeseries": 8, "row": 1}
_SCHEMA_VERSION = 39  # Grafana 11 and later import it
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(uid: str, source: dict[str, Any]) -> dict[str, Any]:
    """Return what Grafana imports."""
    variables = [_variable(name, _written_out(series)) for name, series in source["variables"].items()]
    chosen = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": source["title"],
        "description": source["description"],
        "tags": ["kvern"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "links": [{"title": "Kvern", "type": "dashboards", "tags": ["kvern"], "asDropdown": True, "includeVars": True}],
        "templating": {"list": [chosen, *variables]},
        "panels": list(_panels(source["rows"])),
    }


def _written_out(text: str) -> str:
    for short, long in _SHORT.items():
        text = text.replace(short, long)
    return text


def _variable(name: str, series: str) -> dict[str, Any]:
    query = f"label_values({series}, {name})"
    return {
        "name": name,
        "label": "Release" if name == "job" else name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        # Matches what has no such label too: only in Kubernetes there is a namespace.
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels(rows: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Place panels from top to bottom, those of a row in lines as even as can be."""
    panel_id, top = 0, 0
    for title, sources in rows.items():
        row = {"type": "row", "title": title, "collapsed": False, "panels": []}
        for line in [[row], *_lines([_panel(source) for source in sources])]:
            width = _WIDTH // len(line)
            height = _HEIGHT[line[0]["type"]]
            for place, panel in enumerate(line):
                panel_id += 1
                yield {"id": panel_id, "gridPos": {"x": place * width, "y": top, "w": width, "h": height}, **panel}
            top += height


def _lines(panels: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    for kind, most in _PER_LINE.items():
        same = [panel for panel in panels if panel["type"] == kind]
        num_lines = -(-len(same) // most)
        for line in range(num_lines):
            yield same[line * len(same) // num_lines : (line + 1) * len(same) // num_lines]


def _panel(source: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": source["title"],
        "description": source["description"],
        "datasource": _DATASOURCE,
        "targets": list(_targets(source)),
        **(_stat(source) if source.get("kind") == "stat" else _timeseries(source)),
    }


def _targets(source: dict[str, Any]) -> Iterator[dict[str, Any]]:
    queries = dict(source.get("queries", {}))
    for legend, rate in source.get("quantiles", {}).items():
        for name, quantile in _QUANTILES.items():
            queries[f"{legend} {name}".strip()] = f"histogram_quantile({quantile}, {rate})"
    for place, (legend, expr) in enumerate(queries.items()):
        ref_id = chr(ord("A") + place)
        # What covers all that is shown is asked once, not for every point.
        instant = {"instant": True, "range": False} if "$__range" in expr else {}
        target = {"refId": ref_id, "datasource": _DATASOURCE, "expr": _written_out(expr), "legendFormat": legend}
        yield target | instant


def _timeseries(source: dict[str, Any]) -> dict[str, Any]:
    stacked = source.get("stacked", False)
    custom = {
        "fillOpacity": 30 if stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if "limit" in source else "off"},
    }
    return {
        "type": "timeseries",
        "fieldConfig": _field_config(source, custom),
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"], "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _stat(source: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "stat",
        "fieldConfig": _field_config(source, {}),
        "options": {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}},
    }


def _field_config(source: dict[str, Any], custom: dict[str, Any]) -> dict[str, Any]:
    """Green turns to red at `limit`, or red to green with `more_is_better`. `most` is the end of the axis."""
    below, above = ("red", "green") if source.get("more_is_better") else ("green", "red")
    steps = [{"color": below, "value": None}]
    if "limit" in source:
        steps.append({"color": above, "value": source["limit"]})
    defaults = {
        "unit": source.get("unit", "short"),
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": custom,
    }
    optional = {"max": source.get("most"), "decimals": source.get("decimals")}
    defaults |= {name: value for name, value in optional.items() if value is not None}
    return {"defaults": defaults, "overrides": []}


def files() -> Iterator[tuple[Path, str]]:
    """Return what the chart's files should hold."""
    for source in sorted(SOURCES.glob("*.yaml")):
        body = dashboard(f"kvern-{source.stem}", yaml.safe_load(source.read_text()))
        yield DASHBOARDS / f"{source.stem}.json", json.dumps(body, indent=1) + "\n"


def main() -> int:
    wrong = {path: text for path, text in files() if not path.exists() or path.read_text() != text}
    if "--check" in sys.argv[1:]:
        for path in wrong:
            print(f"{path} differs from its source in helm/dashboards: python tools/dashboards.py", file=sys.stderr)
        return 1 if wrong else 0
    for path, text in wrong.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
