"""Whether dashboards, rules and alerts have something to show: `python -m deploy.grafana.check http://127.0.0.1:9090`.

Asks a Prometheus that scrapes a run of `telamon launch` which is under way. Every expression of every panel and every
recording rule must give a number; no answer is a failure, and so is one that is not a number. An alert is rightly
silent, so each series that it looks at must be there instead. The exit code is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

DASHBOARDS = Path(__file__).parent / "dashboards"
RULES = Path(__file__).parents[1] / "prometheus"
RATE_INTERVAL = "1m"
"""What Grafana makes of `$__rate_interval` for scrapes every 15 seconds: four of them."""
TIMEOUT = 30.0

SELECTOR = re.compile(r"\b((?:run\w*:)?telamon_[\w:]+|up)\b(\{[^}]*\})?")
"""A metric in PromQL, with its matchers."""
EMPTY: Mapping[str, tuple[str, ...]] = {
    "run:telamon_learner_write_back_stale:ratio5m": ("tdmpc2",),  # keeps no latents in the replay
    "telamon_replay_refused_rows_total": ("tdmpc2", "dreamerv3"),  # begins with the first row that is refused
    "telamon_replay_credit_wait_seconds_total": ("tdmpc2", "dreamerv3"),  # and with the first append that waits
}
"""Metric -> agents whose runs need not have it. Nothing else may be missing."""


class Sample(NamedTuple):
    """One series of an answer."""

    labels: Mapping[str, str]
    value: float


class Shown(NamedTuple):
    """An expression that has to answer."""

    where: str
    expr: str
    labels: tuple[str, ...] = ()
    """Which the answer needs: its legend names them."""


class BadQuery(Exception):
    """Prometheus has refused an expression, and said why."""


def ask(url: str, expr: str) -> list[Sample]:
    """What an expression gives now. Raises BadQuery, and OSError where nobody answers at `url`."""
    try:
        with urlopen(f"{url}/api/v1/query?{urlencode({'query': expr})}", timeout=TIMEOUT) as reply:
            found = json.load(reply)["data"]
    except HTTPError as error:
        raise BadQuery(json.load(error)["error"]) from error
    if found["resultType"] == "scalar":
        return [Sample({}, float(found["result"][1]))]
    return [Sample(one["metric"], float(one["value"][1])) for one in found["result"]]


def panels(run: str) -> Iterator[Shown]:
    """Every expression of every dashboard, with the variables as Grafana would fill them in."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                labels = tuple(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
                yield Shown(f"{path.name}, {panel['title']!r}", filled_in(target["expr"], run), labels)


def filled_in(expr: str, run: str) -> str:
    """An expression without variables."""
    expr = expr.replace("$__rate_interval", RATE_INTERVAL).replace('=~"$run"', f"=~{_quoted(re.escape(run))}")
    return expr.replace('"$run"', _quoted(run))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # strings of PromQL have Go's escapes, among them JSON's


def rules(kind: str, name: str) -> Iterator[tuple[str, str]]:
    """(name, expression) of every rule of a file; kind: `record` or `alert`."""
    for group in yaml.safe_load((RULES / name).read_text())["groups"]:
        for rule in group["rules"]:
            yield rule[kind], rule["expr"]


def recorded(run: str) -> Iterator[Shown]:
    """Every recording rule, by what it has recorded."""
    for name, _ in rules("record", "rules.yml"):
        yield Shown(f"rules.yml, {name}", f"{name}{{run={_quoted(run)}}}")


def looked_at() -> Iterator[Shown]:
    """Every alert, by the series that it looks at."""
    for name, expr in rules("alert", "alerts.yml"):
        for selector in sorted({match[0] for match in SELECTOR.finditer(expr)}):
            yield Shown(f"alerts.yml, {name}", f"count({selector})")


def may_be_empty(expr: str, agent: str) -> bool:
    """Whether a run of `agent` need not have what is asked for."""
    return any(agent in EMPTY.get(match[1], ()) for match in SELECTOR.finditer(expr))


def failing(url: str, shown: Shown, agent: str) -> str | None:
    """What is wrong with an answer."""
    try:
        found = ask(url, shown.expr)
    except BadQuery as error:
        return f"{shown.where}: {error}: {shown.expr}"
    if not found:
        return None if may_be_empty(shown.expr, agent) else f"{shown.where}: no data: {shown.expr}"
    if all(math.isnan(sample.value) for sample in found):
        return f"{shown.where}: not a number: {shown.expr}"
    missing = {label for label in shown.labels if not all(label in sample.labels for sample in found)}
    return f"{shown.where}: no label {', '.join(sorted(missing))}: {shown.expr}" if missing else None


def check(url: str, run: str | None = None) -> tuple[int, list[str]]:
    """How many expressions were asked for, and a line for each that failed.

    run: the label of the run that the dashboards are to show; None: one that is under way.
    Raises ValueError where there is none, OSError where no Prometheus answers.
    """
    found = ask(url, "telamon_driver_run_info and on (run) run:telamon_driver_running:max == 1")
    agents = {sample.labels["run"]: sample.labels["algorithm"] for sample in found}
    if not agents or (run is not None and run not in agents):
        raise ValueError(f"Prometheus at {url} knows of no run under way{'' if run is None else f' called {run}'}")
    run = run or min(agents)
    bad = [
        f"alerts.yml, {name}: {error}" for name, expr in rules("alert", "alerts.yml") if (error := refused(url, expr))
    ]
    asked: Sequence[Shown] = [*panels(run), *recorded(run), *looked_at()]
    answers = [failing(url, shown, agents[run]) for shown in asked]
    return len(asked), [*bad, *(line for line in answers if line)]


def refused(url: str, expr: str) -> str | None:
    """Why Prometheus does not take an expression."""
    try:
        ask(url, expr)
    except BadQuery as error:
        return str(error)
    return None


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.grafana.check", description=__doc__)
    parser.add_argument("url", help="of Prometheus, http://HOST:PORT")
    parser.add_argument("--run", help="path of the run; by default one that is under way")
    given: Any = parser.parse_args(words)
    asked, failures = check(given.url.rstrip("/"), given.run)
    sys.stdout.writelines(f"{line}\n" for line in failures)
    sys.stdout.write(f"{asked} expressions, {len(failures)} failed\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
