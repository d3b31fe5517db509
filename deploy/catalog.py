"""Every metric of every page, as docs/metrics.md lists them: `python -m deploy.catalog > docs/metrics.md`.

What a page shows is asked of the collectors that make it, over statuses as a run has them: a metric that is not here is
on no page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from actors.collector import Doing as ActorDoing
from actors.metrics import ActorMetrics, EvalFigures, EvaluatorMetrics, Figures
from deploy.discovery import ROLES
from deploy.metrics import DriverMetrics, RunFigures
from learner import limiter
from learner.background import Beside
from learner.loop import Doing as LearnerDoing
from learner.loop import LoopStatus
from learner.metrics import LearnerMetrics, LimiterMetrics
from learner.publish import Published
from replay_server.metrics import DiskMetrics, Metrics
from telamon.data import ArraySpec, LimiterConfig, RowSpec, WindowSpec
from telamon.replay import ReplayStats, TableSpec
from telamon.telemetry import pages

UNITS: Mapping[str, str] = {
    **{word: word for word in (
        "seconds", "bytes", "rows", "steps", "ticks", "transitions", "episodes", "updates", "evaluations", "pushes",
        "compilations", "recompilations", "rebases", "devices", "environments", "versions", "calls", "connections",
        "requests", "windows", "items", "targets", "parts", "restarts", "lines",
    )},
    "fds": "open files", "ratio": "share, 0 to 1", "row": "rows per row", "version": "number of a snapshot",
    "return": "reward", "returned": "reward", "metric": "of what `name` says", "info": "1",
    "stage": "1 or 0", "state": "1 or 0", "waiting": "1 or 0",
}  # fmt: skip
"""Last word of a name, `_total` aside -> what is counted or measured."""

INTRODUCTION = """\
# Metrics

Made by `python -m deploy.catalog > docs/metrics.md` from what the pages show; a test keeps it true.

**Where.** Every process of a run serves a page, `http://HOST:PORT/metrics`, on a free port unless it was told another:
`--metrics-port` of `telamon launch` (the driver's), of `telamon train` (which has a page only with it) and of
`telamon replay`. A port that is taken is refused with the name of its owner.
Prometheus finds the pages of a run in `RUN/prometheus/targets.json` (`file_sd_configs`), or asks the driver's page for
`/targets` (`http_sd_configs`); both say the same, and follow what is started again elsewhere.

**Labels of every series** come from there, not from the pages: `run` (the path of the run directory), `role` (a heading
below), `part` (`learner`, `actor-3`, `shard-0`, `driver`, `evaluator`) and `instance`, which is the part once more and
no address: a part that is started again, on another port, adds no series. The labels in the tables have few values:
the words listed there, or names of tables, shards and devices and of an agent's own losses. A run of one process has
the one role `train`; its page shows the families of actor, learner, replay and driver as far as it has them.

**Counters** (`_total`), and what summaries (`_sum`, `_count`) and histograms (`_bucket`, `_sum`, `_count`) count, only
rise while their process lives, and begin at 0 with the next one. `rate` and `increase` know that: ask for them, and sum
afterwards. What was counted between the last scrape and the death of a process is lost. Only `telamon_driver_*` goes on
where it was: it is of the run and not of one driver. `telamon_learner_run_updates` is of the run, too: a gauge, as it
goes back with the checkpoint that a learner goes on from. What a replay server says of a table begins at 0 as well,
though the table goes on. Returns may be negative, and a sum that falls would look like a new beginning: their histogram
has `_bucket` alone, and their sum is the difference of `telamon_actor_returned_total` by `sign`.

**Seconds by what they went to** (`doing`) of an actor and a learner are all that their loop has: at each scrape they
add up to its life, what it is in the middle of included. `rate` makes shares of them. What threads did meanwhile is in
`telamon_learner_beside_seconds_total`.

**NaN** is shown as it is: a loss that was not finite, a ratio of nothing. A comparison with it is false, so alerts ask
for counts (`telamon_learner_skipped_updates_total`).

**Names stay.** One that is here keeps its meaning; what replaces it gets another name, and the CHANGELOG says so.
"""


@dataclass(frozen=True)
class Family:
    """A metric of a page."""

    name: str
    """As it is asked for; a counter's with `_total`."""
    kind: str
    """`counter`, `gauge`, `summary` or `histogram`."""
    help: str
    labels: Mapping[str, tuple[str, ...]]
    """Name -> its values in a run as they were seen, in their order."""
    samples: frozenset[str]
    """What may be asked for: of a summary `_sum` and `_count`."""

    @property
    def unit(self) -> str:
        """What it counts or measures. Raises ValueError where the last word of its name does not say so."""
        word = self.name.removesuffix("_total").rpartition("_")[2]
        if word not in UNITS:
            raise ValueError(f"{self.name} ends in {word!r}, which is no unit; deploy.catalog.UNITS has those that are")
        return UNITS[word]


def families(register: Callable[[Any], object]) -> Iterator[Family]:
    """What a registry shows that `register` was given."""
    registry = pages.new_registry()
    own = {family.name for family in registry.collect()}
    register(registry)
    for family in registry.collect():
        if family.name not in own:
            yield _family(family)


def common() -> list[Family]:
    """What every page shows."""
    return [_family(family) for family in pages.new_registry().collect()]


def catalogue() -> dict[str, list[Family]]:
    """Role -> what its page shows, by name."""
    return {role: sorted(families(SAMPLES[role]), key=lambda f: f.name) for role in ROLES if role in SAMPLES}


def names() -> frozenset[str]:
    """All that may be asked for, on any page."""
    return frozenset().union(*(f.samples for found in (*catalogue().values(), common()) for f in found))


def render() -> str:
    """The text of docs/metrics.md."""
    sections = [INTRODUCTION, _section("Every page", common())]
    sections += [_section(f"Role `{role}`", found) for role, found in catalogue().items()]
    return "\n".join(sections)


def _family(family: Any) -> Family:
    labels: dict[str, dict[str, None]] = {}
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    for sample in samples:
        for label, value in sample.labels.items():
            if label != "le":
                labels.setdefault(label, {})[value] = None
    name = f"{family.name}_total" if family.type == "counter" else family.name
    found = {label: tuple(values) for label, values in labels.items()}
    return Family(name, family.type, family.documentation, found, frozenset(s.name for s in samples))


def _section(title: str, found: Iterable[Family]) -> str:
    rows = "".join(
        f"| `{f.name}` | {f.kind} | {_labels(f.labels)} | {f.unit} | {f.help} |\n" for f in found
    )  # fmt: skip
    return f"## {title}\n\n| name | type | labels | unit | what |\n|---|---|---|---|---|\n{rows}"


def _labels(labels: Mapping[str, tuple[str, ...]]) -> str:
    """Words that are all a label's values are listed; of names, as a device's, one was seen."""
    return "; ".join(
        f"`{label}`: {', '.join(values)}" if len(values) > 1 else f"`{label}`" for label, values in labels.items()
    )


# a page of each role, of a part that works


class _Table:
    """A replay server's."""

    spec = TableSpec(RowSpec((), ArraySpec((1,), "float32")), WindowSpec(1), 100, 1)
    credit = num_envs = 1

    def stats(self) -> ReplayStats:
        return ReplayStats(1, 1, 1, 1, 1, 1, 1, 1, 1)


def _driver(registry: Any) -> None:
    roles = {role: 1 for role in ROLES if role not in ("driver", "train")}
    figures = RunFigures(
        "tdmpc2", "dmc:walker-walk", 0, "0.0.0", Path.cwd(), 1, returns={"train": 1.0, "eval": 1.0}, wanted=roles,
        running=roles,
    )  # fmt: skip
    DriverMetrics(lambda: figures, lambda: {"driver": 1, **roles}, registry)


def _learner(registry: Any) -> None:
    loop = LoopStatus("training", metrics={"loss": 0.0}, seconds=dict.fromkeys(get_args(LearnerDoing), 0.0),
                      beside=Beside())  # fmt: skip
    published = Published(0, 0, 0, 0, 0, (0.0, 0.0), {})
    LearnerMetrics(lambda: loop, lambda: {"cuda:0": {"live": 0, "in_use": 0, "limit": 0}}, lambda: published, registry)
    status = limiter.Status(limiter.Waits(0.0, 0.0, "none"), 0.0, {"shard-0": 0}, 1.0, 1.0, 0)
    LimiterMetrics(lambda: status, LimiterConfig(1.0, 1, 1, capacity=100, band=10), registry)


def _actor(registry: Any) -> None:
    figures = Figures(seconds=dict.fromkeys(get_args(ActorDoing), 0.0))
    ActorMetrics(lambda: figures, registry)


def _evaluator(registry: Any) -> None:
    figures = EvalFigures(mean_return=0.0)
    EvaluatorMetrics(lambda: figures, registry)


def _replay(registry: Any) -> None:
    DiskMetrics(Path.cwd(), registry)
    counts = Metrics(registry, lambda: [("run", _Table())])
    with counts.call("Append", "peer", lambda: "OK"), counts.request("Append"):
        counts.waited_for_credit("run", 0.0)
        counts.refused("run", "INVALID_ARGUMENT", 0)
        for purpose in ("train", "report"):
            counts.sampled("run", purpose, 0, np.zeros(0, np.int64))


SAMPLES: Mapping[str, Callable[[Any], None]] = {
    "driver": _driver, "learner": _learner, "actor": _actor, "evaluator": _evaluator, "replay": _replay,
}  # fmt: skip
"""Role -> puts into a registry what its page shows."""


if __name__ == "__main__":
    sys.stdout.write(render())
