"""The dashboards, the checker over an invented Prometheus, and that rules, runbook and documents name what there is."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.grafana import check, generate
from deploy.grafana.check import Sample, Shown

ASK = check.ask
ROOT = Path(__file__).parents[2]
PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"


def boards() -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(check.DASHBOARDS.glob("*.json"))}


def panels(board: Any) -> Iterator[Any]:
    yield from (panel for panel in board["panels"] if panel["type"] != "row")


def alerts() -> dict[str, Any]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


# the dashboards


def test_the_dashboards_are_those_that_the_tables_make():
    assert {path.name: path.read_text() for path in check.DASHBOARDS.glob("*.json")} == generate.files()


def test_grafanas_own_types_take_every_word_of_a_dashboard():
    register_default_plugins()
    for name, board in boards().items():
        assert json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder)) == board, name


def test_every_panel_says_what_it_is():
    for name, board in boards().items():
        for panel in panels(board):
            where = f"{name}, {panel['title']}"
            assert len(panel["description"]) > 5, where
            assert panel["fieldConfig"]["defaults"]["unit"], where
            assert panel["targets"], where
            assert all(target["legendFormat"] for target in panel["targets"]), where
            assert all("$run" in target["expr"] for target in panel["targets"]), where


def test_panels_do_not_overlap_and_fill_their_rows():
    for name, board in boards().items():
        taken: dict[tuple[int, int], str] = {}
        for panel in board["panels"]:
            at = panel["gridPos"]
            for x in range(at["x"], at["x"] + at["w"]):
                for y in range(at["y"], at["y"] + at["h"]):
                    assert x < 24, f"{name}, {panel['title']}"
                    assert (x, y) not in taken, f"{name}: {panel['title']} on {taken[x, y]}"
                    taken[x, y] = panel["title"]
        ids = [panel["id"] for panel in panels(board)]
        assert len(set(ids)) == len(ids)


def test_dashboards_are_told_apart_and_lead_to_each_other():
    found = boards()
    assert sorted(found) == ["actors.json", "learner.json", "learning.json", "overview.json", "replay.json"]
    assert len({board["uid"] for board in found.values()}) == len(found)
    for board in found.values():
        assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "run"]
        (link,) = board["links"]
        assert set(link["tags"]) <= set(board["tags"])
        assert link["includeVars"]


def test_grafana_finds_the_dashboards_where_it_is_told_to_look():
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/telamon.yaml").read_text())["providers"][0]
    path = provider["options"]["path"].replace("$GF_PATHS_PROVISIONING", str(GRAFANA / "provisioning"))
    assert Path(path).resolve() == check.DASHBOARDS.resolve()


# names


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of all that is shipped."""
    for name, board in boards().items():
        for panel in panels(board):
            yield from ((f"{name}, {panel['title']}", target["expr"]) for target in panel["targets"])
    for kind, file in (("record", "rules.yml"), ("alert", "alerts.yml")):
        yield from ((f"{file}, {name}", expr) for name, expr in check.rules(kind, file))


def test_every_recorded_name_is_recorded():
    recorded = {name for name, _ in check.rules("record", "rules.yml")}
    for where, expr in expressions():
        for name in re.findall(r"\brun\w*:[\w:]+", expr):
            assert name in recorded, f"{where}: {name}"


def test_no_rule_adds_up_what_two_runs_did():
    for name, _ in check.rules("record", "rules.yml"):
        assert name.startswith("run"), name
    shipped = [*check.rules("record", "rules.yml"), *check.rules("alert", "alerts.yml")]
    for name, expr in shipped:
        assert not re.search(r"\b(sum|min|max|avg|count) ?\((?!.*\bby\b)", expr), name
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr):
            assert "run" in labels.split(", "), name


def test_a_rule_looks_back_as_far_as_its_name_says():
    for name, expr in check.rules("record", "rules.yml"):
        said = re.findall(r"(?<=\D)\d+m$", name)
        assert set(re.findall(r"\[(\w+)\]", expr)) in (set(said), set()), name


def test_every_rule_is_tried_on_two_runs():
    tests = yaml.safe_load((PROMETHEUS / "tests.yml").read_text())["tests"]
    (tried,) = [test["promql_expr_test"] for test in tests if test.get("name", "").startswith("every recorded rule")]
    runs = {
        case["expr"]: {re.findall(r'run="([^"]*)"', one["labels"])[0] for one in case["exp_samples"]} for case in tried
    }
    for name, _ in check.rules("record", "rules.yml"):
        assert len(runs[f"round({name}, 2^-20)"]) >= 2, name


# alerts


def test_every_alert_has_a_section_of_the_runbook_and_tests_of_both_kinds():
    runbook = (ROOT / "deploy/runbook.md").read_text()
    headings = {heading.lower() for heading in re.findall(r"^#+ (\w+)$", runbook, re.MULTILINE)}
    tests = yaml.safe_load((PROMETHEUS / "tests.yml").read_text())["tests"]
    tried = [case for test in tests for case in test.get("alert_rule_test", ())]
    fires = {case["alertname"] for case in tried if case["exp_alerts"]}
    silent = {case["alertname"] for case in tried if not case["exp_alerts"]}
    assert set(alerts()) == fires == silent
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description", "runbook_url"} == set(rule["annotations"])
        file, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / file).samefile(ROOT / "deploy/runbook.md")
        assert anchor == name.lower()
        assert anchor in headings, name


# the checker


@pytest.fixture
def prometheus(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, list[Sample] | str]], None]:
    """Sets what Prometheus answers: to an expression its samples, or why it is refused; to all others one sample."""

    def set_answers(answers: Mapping[str, list[Sample] | str]) -> None:
        everything = Everything()

        def ask(url: str, expr: str) -> list[Sample]:
            found = next((answer for part, answer in answers.items() if part in expr), None)
            if isinstance(found, str):
                raise check.BadQuery(found)
            return [Sample(everything, 1.0)] if found is None else found

        monkeypatch.setattr(check, "ask", ask)

    return set_answers


class Everything(dict[str, str]):
    """Every label, with the value `tdmpc2`."""

    def __contains__(self, label: object) -> bool:
        return True

    def __missing__(self, label: str) -> str:
        return "tdmpc2"


def test_a_prometheus_that_answers_everything_passes(prometheus):
    prometheus({})
    asked, failures = check.check("http://prometheus")
    assert failures == []
    assert asked > 150


@pytest.mark.parametrize(
    ("answers", "failure"),
    [
        # of a panel, of a rule, of what an alert looks at
        ({"telamon_learner_snapshot_bytes": []}, "learner.json, 'Size of a snapshot': no data: "),
        ({"run:telamon_replay_held:ratio{": []}, "rules.yml, run:telamon_replay_held:ratio: no data: "),
        (
            {'count(telamon_learner_limiter_waiting{run="tdmpc2", side=': []},
            "alerts.yml, TelamonReplayNotGrowing: no data: ",
        ),
        ({"telamon_learner_snapshot_bytes": [Sample({}, float("nan"))]}, "'Size of a snapshot': not a number: "),
        ({"telamon_learner_snapshot_bytes": "parse error"}, "'Size of a snapshot': parse error: "),
        ({"telamon_learner_beside_seconds_total": [Sample({}, 1.0)]}, "'Beside the loop': no label doing: "),
        ({"> 7200": "parse error"}, "alerts.yml, TelamonCheckpointTooOld: parse error"),
    ],
)
def test_what_does_not_answer_is_told(prometheus, answers, failure):
    prometheus(answers)
    _, failures = check.check("http://prometheus")
    assert any(failure in line for line in failures), failures


@pytest.mark.parametrize(
    ("expr", "kinds", "may"),
    [
        ("run:telamon_learner_write_back_stale:ratio5m > 0.2", ("tdmpc2", "driver"), True),
        ("run:telamon_learner_write_back_stale:ratio5m > 0.2", ("dreamerv3", "driver"), False),
        ("sum(rate(telamon_learner_failed_pushes_total[1m]))", ("tdmpc2", "train"), True),
        ("sum(rate(telamon_learner_failed_pushes_total[1m]))", ("tdmpc2", "driver"), False),
        ("telamon_evaluator_return", ("dreamerv3", "train"), True),
        ("telamon_learner_updates_total", ("dreamerv3", "train"), False),
    ],
)
def test_only_some_runs_may_lack_something(prometheus, expr, kinds, may):
    prometheus({expr: []})
    assert check.failing("http://prometheus", Shown("a panel", expr), kinds) == (
        None if may else f"a panel: no data: {expr}"
    )


def test_a_run_that_is_not_there_is_told(prometheus):
    prometheus({})
    with pytest.raises(ValueError, match=r"knows of no run under way called /r/missing$"):
        check.check("http://prometheus", "/r/missing")
    prometheus({"telamon_driver_run_info": []})
    with pytest.raises(ValueError, match=r"knows of no run under way$"):
        check.check("http://prometheus")


def test_the_command_says_in_a_line_what_is_wrong(prometheus, capsys):
    prometheus({"telamon_learner_snapshot_bytes": []})
    assert check.main(["http://prometheus/"]) == 1
    bad, total = capsys.readouterr().out.splitlines()
    assert bad.startswith("learner.json, 'Size of a snapshot': no data: ")
    assert total.endswith(" expressions, 1 failed")
    prometheus({})
    assert check.main(["http://prometheus/"]) == 0
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check, "ask", ASK)
            assert check.main([url]) == 1
    assert re.fullmatch(rf"python -m deploy\.grafana\.check: {url}: .*refused.*\n", capsys.readouterr().err)


def test_variables_are_filled_in_as_grafana_does():
    assert check.filled_in('rate(a{run="$run"}[$__rate_interval])', '/r/a "b"') == 'rate(a{run="/r/a \\"b\\""}[1m])'
    assert check.filled_in('a{run=~"$run"}', "/r/a.b") == 'a{run=~"/r/a\\\\.b"}'


def test_selectors_are_found():
    expr = 'run:telamon_x:max == 1 unless on (run) max by (run) (telamon_y{side="a"}) > up{job="telamon"}'
    assert [match[0] for match in check.SELECTOR.finditer(expr)] == [
        "run:telamon_x:max",
        'telamon_y{side="a"}',
        'up{job="telamon"}',
    ]
