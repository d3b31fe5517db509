"""Whether dashboards, rules and alerts have something to show: `python -m deploy.grafana.check http://127.0.0.1:9090`.

Asks a Prometheus that scrapes a run which is under way. Every expression of every panel and every
recording rule must give a number; no answer is a failure, and so is one that is not a number. An alert is rightly
silent, so each series that it looks at must be there instead. The exit code is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
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
NOT_OF_ONE_PROCESS = "|".join((
    # which alerts want of the roles `actor` and `learner`, and of those that a driver leads
    "telamon_actor_snapshot_version", "telamon_learner_limiter_band_rows", "up",
    r"(run:)?telamon_actor_snapshot_delay_seconds\S*",
    r"telamon_evaluator_\w+",
    r"(run:)?telamon_learner_(beside|limiter_credit|pushes|\w+_pushes|push_seconds|snapshot)\S*",
    r"(run_method:)?telamon_replay_(busy|calls|connections|request|sampled_age|unauthenticated)\S*",
))  # fmt: skip
EMPTY: Mapping[str, Sequence[str]] = {
    "run:telamon_learner_write_back_stale:ratio5m": ("tdmpc2",),  # keeps no latents in the replay
    "telamon_replay_refused_rows_total": ("driver", "train"),  # begins with the first row that is refused
    "telamon_replay_credit_wait_seconds_total": ("driver", "train"),  # and with the first append that waits
    NOT_OF_ONE_PROCESS: ("train",),  # which hands nothing to anybody
}
"""Pattern of metrics' names -> agents, and leading roles, whose runs may lack them. Nothing else may be missing."""


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


def looked_at(run: str) -> Iterator[Shown]:
    """Every alert, by the series of the run that it looks at."""
    for name, expr in rules("alert", "alerts.yml"):
        for metric, matchers in sorted({(match[1], match[2] or "{}") for match in SELECTOR.finditer(expr)}):
            given = ", ".join(part for part in (f"run={_quoted(run)}", matchers[1:-1]) if part)
            yield Shown(f"alerts.yml, {name}", f"count({metric}{{{given}}})")


def may_be_empty(expr: str, kinds: Collection[str]) -> bool:
    """Whether a run need not have what is asked for. kinds: its agent, and the role of the process that leads it."""
    names = [match[1] for match in SELECTOR.finditer(expr)]
    return any(
        re.fullmatch(pattern, name) and not set(kinds).isdisjoint(lacking)
        for name in names
        for pattern, lacking in EMPTY.items()
    )


def failing(url: str, shown: Shown, kinds: Collection[str]) -> str | None:
    """What is wrong with an answer. kinds: as in `may_be_empty`."""
    try:
        found = ask(url, shown.expr)
    except BadQuery as error:
        return f"{shown.where}: {error}: {shown.expr}"
    if all(math.isnan(sample.value) for sample in found):
        wrong = "not a number" if found else "no data"
        return None if may_be_empty(shown.expr, kinds) else f"{shown.where}: {wrong}: {shown.expr}"
    missing = {label for label in shown.labels if not all(label in sample.labels for sample in found)}
    return f"{shown.where}: no label {', '.join(sorted(missing))}: {shown.expr}" if missing else None


def check(url: str, run: str | None = None) -> tuple[int, list[str]]:
    """How many expressions were asked for, and a line for each that failed.

    run: the label of the run that the dashboards are to show; None: one that is under way.
    Raises ValueError where there is none, OSError where no Prometheus answers.
    """
    found = ask(url, "telamon_driver_run_info and on (run) run:telamon_driver_running:max == 1")
    runs = {sample.labels["run"]: (sample.labels["algorithm"], sample.labels["role"]) for sample in found}
    if not runs or (run is not None and run not in runs):
        raise ValueError(f"Prometheus knows of no run under way{'' if run is None else f' called {run}'}")
    run = run or min(runs)
    asked = [*panels(run), *recorded(run), *looked_at(run)]
    answers = [failing(url, shown, runs[run]) for shown in asked]
    alerts = [(name, refused(url, expr)) for name, expr in rules("alert", "alerts.yml")]
    bad = [f"alerts.yml, {name}: {reason}" for name, reason in alerts if reason is not None]
    return len(asked), [*(line for line in answers if line is not None), *bad]


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
    try:
        asked, failures = check(given.url.rstrip("/"), given.run)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {given.url}: {error}\n")
        return 1
    sys.stdout.writelines(f"{line}\n" for line in failures)
    sys.stdout.write(f"{asked} expressions, {len(failures)} failed\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
