"""Dashboards: what Grafana gets, and that every panel asks for what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import dashboards
import pytest

from tests.helm.chart import CHART, of_kind, render
from tests.helm.promql import Exposed, missing

Json = dict[str, Any]

FILES = sorted((CHART / "dashboards").glob("*.json"))
NAMES = [path.stem for path in FILES]

_VALUES = {"$__rate_interval": "5m", "$__range": "1h"}
_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


def read(name: str) -> Json:
    content: Json = json.loads((CHART / "dashboards" / f"{name}.json").read_text())
    return content


def panels(dashboard: Json) -> list[Json]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: Json) -> Iterator[str]:
    """Return all queries as Grafana would send them with everything chosen, those of the variables too."""
    variables = [variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    for variable in variables:
        match = _LABEL_VALUES.fullmatch(variable["query"]["query"])
        assert match is not None
        yield f"group by ({match[2]}) ({match[1]})"
    yield from (target["expr"] for panel in panels(dashboard) for target in panel["targets"])


def filled_in(query: str, dashboard: Json) -> str:
    values = _VALUES | {f"${each['name']}": each.get("allValue", "") for each in dashboard["templating"]["list"]}
    return re.sub(r"\$\w+", lambda match: values[match[0]], query)


def test_files_are_what_their_sources_give() -> None:
    assert [path.name for path, text in dashboards.files() if path.read_text() != text] == []
    assert NAMES == ["engine", "overview", "routing", "services"]


@pytest.mark.parametrize("name", NAMES)
def test_panel_asks_for_what_a_live_set_exposes(name: str, exposed: Exposed) -> None:
    """H06."""
    dashboard = read(name)
    assert [what for query in queries(dashboard) for what in missing(filled_in(query, dashboard), exposed)] == []


@pytest.mark.parametrize("name", NAMES)
def test_panel_says_what_it_shows(name: str) -> None:
    for panel in panels(read(name)):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]


@pytest.mark.parametrize("name", NAMES)
def test_legend_names_labels_that_its_query_keeps(name: str) -> None:
    for panel in panels(read(name)):
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), (panel["title"], label)


@pytest.mark.parametrize("name", NAMES)
def test_panels_do_not_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in read(name)["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_dashboards_know_each_other_apart() -> None:
    all_of_them = [read(name) for name in NAMES]
    assert len({dashboard["uid"] for dashboard in all_of_them}) == len({each["title"] for each in all_of_them}) == 4
    for dashboard in all_of_them:
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)


def test_each_dashboard_is_a_config_map_that_grafana_finds() -> None:
    values = {"enabled": True, "labels": {"grafana_dashboard": "yes"}, "annotations": {"grafana_folder": "Models"}}
    maps = [each for each in of_kind(render({"dashboards": values}), "ConfigMap") if "dashboard" in str(each["data"])]
    assert {key: json.loads(text) for each in maps for key, text in each["data"].items()} == {
        f"kvern-{name}.json": read(name) for name in NAMES
    }
    for each in maps:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "yes"
        assert each["metadata"]["annotations"] == {"grafana_folder": "Models"}


def test_dashboards_are_not_rendered_unless_asked_for() -> None:
    assert "panels" not in str(render({}))
