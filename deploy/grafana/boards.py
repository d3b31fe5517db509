"""What the dashboards show: tables of panels. `generate` makes Grafana's JSON of them.

An expression is of the run that the reader has chosen: `$run`. Rates over what Grafana says is enough of a range are
written `[$__rate_interval]`; what alerts ask for too is recorded (deploy/prometheus/rules.yml).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "stacked", "number", "word", "heat"]
"""Curves; curves upon each other; the newest value; the newest value's legend; a histogram over time."""


@dataclass(frozen=True)
class Panel:
    """One picture, or number."""

    title: str
    text: str
    """What the reader should know: what it is, what is good, what to do."""
    unit: str
    """An identifier of Grafana's: `s`, `bytes`, `percentunit`, `none`, `count:WORDS`, ..."""
    lines: Mapping[str, str]
    """Legend (Grafana's template over labels) -> PromQL."""
    kind: Kind = "lines"
    width: int = 8
    """Of 24 columns."""
    height: int = 8


@dataclass(frozen=True)
class Board:
    """A dashboard."""

    uid: str
    title: str
    text: str
    rows: Mapping[str, tuple[Panel, ...]]
    """By the question that they answer."""
    several: bool = False
    """Whether more than one run can be chosen: then expressions say `run=~"$run"`."""


def number(title: str, text: str, unit: str, legend: str, expr: str) -> Panel:
    """A small panel of one number."""
    return Panel(title, text, unit, {legend: expr}, kind="number", width=4, height=4)


def _sum(by: str) -> str:
    return f"sum by ({by})" if by else "sum"


def per_second(counter: str, by: str = "") -> str:
    """PromQL: how fast a counter rises, by a label or altogether."""
    return f'{_sum(by)} (rate({counter}{{run="$run"}}[$__rate_interval]))'


def in_ten_minutes(counter: str, by: str = "") -> str:
    """PromQL: by how much a counter has risen, by a label or altogether."""
    return f'{_sum(by)} (increase({counter}{{run="$run"}}[10m]))'


def counts(histogram: str) -> str:
    """PromQL: the buckets of a histogram, of all parts."""
    return f'sum by (le) (increase({histogram}_bucket{{run="$run"}}[$__rate_interval]))'


def word(title: str, text: str, legend: str, expr: str) -> Panel:
    """A small panel that shows a label's value."""
    return Panel(title, text, "none", {legend: expr}, kind="word", width=4, height=4)


RETURNS = Panel(
    "Return",
    "Mean return of the training episodes that ended within 15 minutes, and of the last evaluation. It should rise; "
    "against environment steps, with other runs and published curves, `telamon view` draws it.",
    "none",
    {
        "training": 'run:telamon_actor_episode_return:mean15m{run="$run"}',
        "evaluation": 'telamon_driver_return{run="$run", of="eval"}',
    },
    width=12,
)
RATIO = Panel(
    "Train ratio",
    "Rows trained per row inserted, over five minutes, and what was asked for. It is above while the learner makes "
    "what the fill of the replay owes; then they should lie on each other.",
    "none",
    {
        "kept": 'run:telamon_train_ratio_kept:ratio5m{run="$run"}',
        "asked": 'run:telamon_train_ratio_asked:max{run="$run"}',
    },
)
LEARNERS_TIME = Panel(
    "What the learner's time goes to",
    "Shares of its loop's time. compute is what should be large. rows: it waits for the actors, so more of them help. "
    "batch: there are rows, but sampling and copying do not keep up, so more shards help.",
    "percentunit",
    {"{{doing}}": 'run_doing:telamon_learner_seconds:ratio1m{run="$run"}'},
    kind="stacked",
    width=12,
)
ACTORS_TIME = Panel(
    "What the actors' time goes to",
    "Shares of all actors' time. replay: they wait for the learner, or the replay for them. snapshot: they wait for "
    "parameters. environment and acting are their own work.",
    "percentunit",
    {"{{doing}}": 'run_doing:telamon_actor_seconds:ratio1m{run="$run"}'},
    kind="stacked",
    width=12,
)
LAG = Panel(
    "Lag of parameters",
    "Versions by which an actor's snapshot is older than the newest one that it was offered, the largest of all "
    "actors. It should stay at a few.",
    "count:versions",
    {"largest": 'run:telamon_actor_snapshot_lag_versions:max{run="$run"}'},
)
MEMORY = Panel(
    "Memory by role",
    "Resident memory of all processes of a role. Shared pages, as the rings of a shard, count in each.",
    "bytes",
    {"{{role}}": 'run_role:process_resident_memory_bytes:sum{run="$run"}'},
)

OVERVIEW = Board(
    "telamon-overview",
    "Telamon: overview",
    "Does it learn, how fast, who waits for whom, is it well.",
    {
        "Does it learn?": (
            word(
                "State",
                "What the run does. No data: its driver does not answer.",
                "{{state}}",
                'telamon_driver_state{run="$run"} == 1',
            ),
            word(
                "Learner",
                "What the learner does. `waiting for rows` is normal until the replay has filled.",
                "{{stage}}",
                'telamon_learner_stage{run="$run"} == 1',
            ),
            number(
                "Last evaluation",
                "Mean return of the last evaluation.",
                "none",
                "return",
                'telamon_driver_return{run="$run", of="eval"}',
            ),
            number(
                "Training episodes",
                "Mean return of those that ended within 15 minutes.",
                "none",
                "return",
                'run:telamon_actor_episode_return:mean15m{run="$run"}',
            ),
            number(
                "Done",
                "Share of the environment steps that were asked for.",
                "percentunit",
                "done",
                'run:telamon_driver_progress:ratio{run="$run"}',
            ),
            number(
                "Left",
                "Until all steps are done, at the speed of the last five minutes.",
                "s",
                "time",
                'run:telamon_driver_remaining_seconds:estimate5m{run="$run"}',
            ),
            RETURNS,
            Panel(
                "Losses",
                "Of the newest update. A jump with skipped updates beside it: something was not finite.",
                "none",
                {"{{name}}": 'telamon_learner_metric{run="$run", name=~".*loss"}'},
                width=12,
            ),
        ),
        "How fast?": (
            Panel(
                "Environment steps",
                "Per second, of all actors.",
                "count:steps/s",
                {"steps": 'run:telamon_actor_env_steps:rate1m{run="$run"}'},
            ),
            Panel(
                "Updates",
                "Per second.",
                "count:updates/s",
                {"updates": 'run:telamon_learner_updates:rate1m{run="$run"}'},
            ),
            RATIO,
        ),
        "Who waits for whom?": (
            word(
                "Waits now",
                "The side that the rate limiter holds back: learner (for rows), writers (for the learner), none.",
                "{{side}}",
                'telamon_learner_limiter_waiting{run="$run"} == 1',
            ),
            number(
                "Learner waits",
                "Share of the last minute in which it had no batch.",
                "percentunit",
                "waiting",
                'run:telamon_learner_waiting:ratio1m{run="$run"}',
            ),
            number(
                "Actors wait",
                "Share of the last minute in which they waited for the replay or for parameters.",
                "percentunit",
                "waiting",
                'run:telamon_actor_waiting:ratio1m{run="$run"}',
            ),
            number(
                "Batches late",
                "Share of the time waiting for batches although there were rows, since the learner began. Above 5 %: "
                "the replay is what holds the learner up.",
                "percentunit",
                "late",
                'telamon_learner_batch_wait_ratio{run="$run"}',
            ),
            number(
                "Lag",
                "Versions by which the slowest actor's parameters are old.",
                "count:versions",
                "lag",
                'run:telamon_actor_snapshot_lag_versions:max{run="$run"}',
            ),
            number(
                "Replay full",
                "Share of the rings that holds rows.",
                "percentunit",
                "full",
                'run:telamon_replay_held:ratio{run="$run"}',
            ),
            LEARNERS_TIME,
            ACTORS_TIME,
        ),
        "Is it well?": (
            Panel(
                "Alerts",
                "That fire now. deploy/runbook.md says of each what to do.",
                "count:alerts",
                {"firing": 'count(ALERTS{run="$run", alertstate="firing"}) or vector(0)'},
                kind="number",
                width=4,
                height=8,
            ),
            Panel(
                "Parts",
                "That do their work, and that there should be.",
                "count:parts",
                {
                    "{{kind}} running": 'telamon_driver_parts{run="$run", state="running"}',
                    "{{kind}} wanted": 'telamon_driver_parts{run="$run", state="wanted"}',
                },
            ),
            Panel(
                "Restarts",
                "Deaths of parts within ten minutes; all are started again.",
                "count:restarts",
                {"{{kind}}": 'increase(telamon_driver_restarts_total{run="$run"}[10m])'},
            ),
            Panel(
                "Last turn of the driver",
                "Seconds since the loop that leads the run came round. Of a run of one process it stands while it "
                "evaluates or compiles.",
                "s",
                {"age": 'telamon_driver_turn_age_seconds{run="$run"}'},
                width=4,
            ),
            MEMORY,
            Panel(
                "Processors by role",
                "Cores that all processes of a role keep busy.",
                "count:cores",
                {"{{role}}": 'run_role:process_cpu_seconds:rate1m{run="$run"}'},
            ),
            Panel(
                "Age of the checkpoint",
                "How much training a crash would cost.",
                "s",
                {"age": 'telamon_learner_checkpoint_age_seconds{run="$run"}'},
                width=4,
            ),
            Panel(
                "Disk free",
                "Share that is free of the fullest disk that the run writes to.",
                "percentunit",
                {"free": 'run:telamon_disk_free:ratio{run="$run"}'},
                width=4,
            ),
        ),
    },
)

LEARNER = Board(
    "telamon-learner",
    "Telamon: learner",
    "What an update costs, how snapshots, latents and checkpoints leave, what the devices hold.",
    {
        "Updates": (
            LEARNERS_TIME,
            Panel(
                "An update's seconds",
                "Time of the loop per update, by what it went to or waited for.",
                "s",
                {"{{doing}}": 'run_doing:telamon_learner_update_seconds:mean1m{run="$run"}'},
                kind="stacked",
                width=12,
            ),
            Panel(
                "Beside the loop",
                "Share of their time that the loop's threads are at work. copy: from the host to the devices.",
                "percentunit",
                {"{{doing}}": per_second("telamon_learner_beside_seconds_total", by="doing")},
            ),
            Panel(
                "Updates",
                "Per second, and of these skipped, because something was not finite.",
                "count:updates/s",
                {
                    "made": per_second("telamon_learner_updates_total"),
                    "skipped": per_second("telamon_learner_skipped_updates_total"),
                },
            ),
            Panel(
                "Rows trained",
                "Per second; a row counts as often as it is replayed.",
                "count:rows/s",
                {"rows": 'run:telamon_learner_trained_rows:rate1m{run="$run"}'},
            ),
        ),
        "Rate limiter": (
            RATIO,
            Panel(
                "Lead",
                "Inserted rows by which the learner is ahead of the train ratio (negative: behind), and the band that "
                "it stays in.",
                "count:rows",
                {
                    "lead": 'telamon_learner_limiter_lead_rows{run="$run"}',
                    "band": 'telamon_learner_limiter_band_rows{run="$run"}',
                    "-band": '-telamon_learner_limiter_band_rows{run="$run"}',
                },
            ),
            Panel(
                "Held back",
                "Share of the time in which a side waited for the other.",
                "percentunit",
                {"{{side}}": per_second("telamon_learner_limiter_wait_seconds_total", by="side")},
            ),
            Panel(
                "Credit",
                "Rows that each shard may still take.",
                "count:rows",
                {"{{shard}}": 'telamon_learner_limiter_credit_rows{run="$run"}'},
            ),
            Panel(
                "Shards that came back",
                "Within ten minutes. The train ratio's clock begins anew for them.",
                "count:shards",
                {"rebases": in_ten_minutes("telamon_learner_limiter_rebases_total")},
            ),
            Panel(
                "Train ratio of the run",
                "Kept since the run began: rows of the fill are not trained on, and restarts repeat nothing.",
                "none",
                {"{{over}}": 'telamon_learner_replayed_rows_per_inserted_row{run="$run"}'},
            ),
        ),
        "Snapshots and latents": (
            Panel(
                "Snapshots pushed",
                "Per second, to all actors. skipped: an actor that had not taken the one before. failed: it was away.",
                "count:pushes/s",
                {
                    "answered": per_second("telamon_learner_pushes_total"),
                    "skipped": per_second("telamon_learner_skipped_pushes_total"),
                    "failed": per_second("telamon_learner_failed_pushes_total"),
                },
            ),
            Panel(
                "A push",
                "From the taking of a snapshot to an actor's answer that it has it.",
                "s",
                {"mean": 'run:telamon_learner_push_seconds:mean5m{run="$run"}'},
            ),
            Panel(
                "Size of a snapshot",
                "Of the newest.",
                "bytes",
                {"snapshot": 'telamon_learner_snapshot_bytes{run="$run"}'},
            ),
            Panel(
                "Latents written back",
                "Rows per second. stale: the row was overwritten first. dropped: its shard was away. All zero for "
                "agents that keep no latents.",
                "count:rows/s",
                {"{{to}}": per_second("telamon_learner_write_back_rows_total", by="to")},
                width=12,
            ),
            Panel(
                "Latents too late",
                "Share that is stale or dropped. Small rings and slow learners make it large.",
                "percentunit",
                {"too late": 'run:telamon_learner_write_back_stale:ratio5m{run="$run"}'},
                width=12,
            ),
        ),
        "Checkpoints, devices": (
            Panel(
                "Age of the checkpoint",
                "What a crash would cost. A saw: each tooth ends with a new one.",
                "s",
                {"age": 'telamon_learner_checkpoint_age_seconds{run="$run"}'},
            ),
            Panel(
                "A checkpoint",
                "Seconds from the wish for one until it is whole, on average since the learner began. Updates go on "
                "meanwhile.",
                "s",
                {
                    "mean": 'telamon_learner_checkpoint_seconds_sum{run="$run"} '
                    '/ (telamon_learner_checkpoint_seconds_count{run="$run"} > 0)'
                },
            ),
            Panel(
                "Memory of the devices",
                "live: arrays of this process. in_use and limit: of the whole device, where it tells; CPUs do not.",
                "bytes",
                {"{{device}} {{kind}}": 'telamon_learner_device_bytes{run="$run"}'},
            ),
            Panel(
                "Programs compiled",
                "Since the learner began, and those of them that were compiled again while it trained: these should be "
                "none.",
                "count:programs",
                {
                    "all": 'telamon_learner_compilations_total{run="$run"}',
                    "again": 'telamon_learner_recompilations_total{run="$run"}',
                },
            ),
            Panel(
                "Processors",
                "Cores that its process keeps busy.",
                "count:cores",
                {"{{part}}": 'rate(process_cpu_seconds_total{run="$run", role=~"learner|train"}[$__rate_interval])'},
            ),
            Panel(
                "Memory",
                "Resident, of its process.",
                "bytes",
                {"{{part}}": 'process_resident_memory_bytes{run="$run", role=~"learner|train"}'},
            ),
        ),
    },
)

REPLAY = Board(
    "telamon-replay",
    "Telamon: replay",
    "What the shards take, hold and serve, and how fast they answer.",
    {
        "Rows": (
            Panel(
                "Rows appended",
                "Per second and shard. Shards that get fewer have fewer actors, or slower ones.",
                "count:rows/s",
                {"{{part}}": per_second("telamon_replay_appended_rows_total", by="part")},
            ),
            Panel(
                "Windows served",
                "Per second, by purpose. Those for reports are not trained on.",
                "count:windows/s",
                {"{{purpose}}": per_second("telamon_replay_sampled_windows_total", by="purpose")},
            ),
            Panel(
                "Bytes in and out",
                "Per second, of all shards.",
                "Bps",
                {
                    "appended": 'run:telamon_replay_appended_bytes:rate1m{run="$run"}',
                    "served": 'run:telamon_replay_sampled_bytes:rate1m{run="$run"}',
                },
            ),
            Panel(
                "Rows held",
                "By shard. The curve is flat once the rings are full.",
                "count:rows",
                {"{{part}}": 'sum by (part) (telamon_replay_held_rows{run="$run"})'},
            ),
            Panel(
                "Full",
                "Share of the rings that holds rows.",
                "percentunit",
                {
                    "{{part}}": 'sum by (part) (telamon_replay_held_bytes{run="$run"}) '
                    '/ sum by (part) (telamon_replay_full_bytes{run="$run"})'
                },
            ),
            Panel(
                "What a draw chooses among",
                "Windows, or closed episodes; a shard's part of each batch follows from it.",
                "count:items",
                {"{{part}}": 'sum by (part) (telamon_replay_items{run="$run"})'},
            ),
            Panel(
                "Age of what is sampled",
                "Rows appended to its environment since a sampled window's first row. Wide for uniform replay.",
                "count:rows",
                {"{{le}}": counts("telamon_replay_sampled_age_rows")},
                kind="heat",
            ),
            Panel(
                "Latents",
                "Rows per second whose latents were replaced, and which no longer were there.",
                "count:rows/s",
                {
                    "replaced": per_second("telamon_replay_written_back_rows_total"),
                    "stale": per_second("telamon_replay_stale_rows_total"),
                },
            ),
            Panel(
                "Fresh windows",
                "That wait to be served for the first time. A queue that grows: the learner takes fewer than come.",
                "count:windows",
                {"{{part}}": 'sum by (part) (telamon_replay_online_queue_windows{run="$run"})'},
            ),
        ),
        "Answers": (
            Panel(
                "Slowest requests",
                "Of a hundred, 99 take less, from a request to its answer; waiting for credit counts.",
                "s",
                {"{{method}}": 'run_method:telamon_replay_request_seconds:p99_5m{run="$run"}'},
            ),
            Panel(
                "Requests",
                "Per second, by method.",
                "reqps",
                {"{{method}}": per_second("telamon_replay_request_seconds_count", by="method")},
            ),
            Panel(
                "Requests in progress",
                "The queue, by method. Appends that wait for credit are among them.",
                "count:requests",
                {"{{method}}": 'sum by (method) (telamon_replay_busy_requests{run="$run"})'},
            ),
            Panel(
                "Calls ended",
                "Per second, by status code. CANCELLED: the client of a stream went away. INTERNAL: see the log.",
                "count:calls/s",
                {"{{code}}": per_second("telamon_replay_calls_total", by="code")},
            ),
            Panel(
                "Connections",
                "With calls in progress.",
                "count:connections",
                {"{{part}}": 'telamon_replay_connections{run="$run"}'},
            ),
            Panel(
                "Refused",
                "Within ten minutes: rows that were sent and not stored, by status code, and calls without the token.",
                "count:refused",
                {
                    "rows: {{reason}}": in_ten_minutes("telamon_replay_refused_rows_total", by="reason"),
                    "calls without the token": in_ten_minutes("telamon_replay_unauthenticated_calls_total"),
                },
            ),
        ),
        "Machine": (
            Panel(
                "Waiting for credit",
                "Seconds per second that appends wait for the learner, of all streams of a shard.",
                "none",
                {"{{part}}": per_second("telamon_replay_credit_wait_seconds_total", by="part")},
                width=6,
            ),
            Panel(
                "Disk free",
                "Bytes, where each shard keeps its rows.",
                "bytes",
                {"{{part}}": 'telamon_replay_disk_free_bytes{run="$run"}'},
                width=6,
            ),
            Panel(
                "Memory",
                "Resident, of each shard; its rings are among it.",
                "bytes",
                {"{{part}}": 'process_resident_memory_bytes{run="$run", role=~"replay|train"}'},
                width=6,
            ),
            Panel(
                "Processors",
                "Cores that each shard keeps busy.",
                "count:cores",
                {"{{part}}": 'rate(process_cpu_seconds_total{run="$run", role=~"replay|train"}[$__rate_interval])'},
                width=6,
            ),
        ),
    },
)

ACTORS = Board(
    "telamon-actors",
    "Telamon: actors",
    "What each worker does, what a tick costs, how old its parameters are, what its episodes earn.",
    {
        "Ticks": (
            ACTORS_TIME,
            Panel(
                "A tick's seconds",
                "Time of an actor per tick, by what it went to or waited for.",
                "s",
                {"{{doing}}": 'run_doing:telamon_actor_tick_seconds:mean1m{run="$run"}'},
                kind="stacked",
                width=12,
            ),
            Panel(
                "Environment steps",
                "Per second and actor. One below the others: a slow machine, or an environment that hangs.",
                "count:steps/s",
                {"{{part}}": 'rate(telamon_actor_env_steps_total{run="$run"}[$__rate_interval])'},
            ),
            Panel(
                "Waiting",
                "Share of each actor's time that it waits for the replay or for parameters.",
                "percentunit",
                {
                    "{{part}}": "sum by (part) "
                    '(rate(telamon_actor_seconds_total{run="$run", doing=~"replay|snapshot"}[$__rate_interval]))'
                    ' / sum by (part) (rate(telamon_actor_seconds_total{run="$run"}[$__rate_interval]))'
                },
            ),
            Panel(
                "Rows, transitions",
                "Per second, of all actors. A row that begins an episode is no transition.",
                "count:rows/s",
                {
                    "rows": 'run:telamon_actor_rows:rate1m{run="$run"}',
                    "transitions": per_second("telamon_actor_transitions_total"),
                },
            ),
        ),
        "Parameters": (
            LAG,
            Panel(
                "Version",
                "Of the snapshot that each acts with. A flat line below the others: it takes none.",
                "none",
                {
                    "{{part}}": 'telamon_actor_snapshot_version{run="$run"}',
                    "newest": 'telamon_learner_snapshot_version{run="$run"}',
                },
            ),
            Panel(
                "From the offer to the use",
                "Of a snapshot; 95 of a hundred take less. An actor takes a new one between two unrolls.",
                "s",
                {"95 %": 'run:telamon_actor_snapshot_delay_seconds:p95_5m{run="$run"}'},
            ),
        ),
        "Episodes": (
            Panel(
                "Returns",
                "Of the training episodes that have ended, of all actors.",
                "none",
                {"{{le}}": counts("telamon_actor_episode_return")},
                kind="heat",
            ),
            Panel(
                "Length",
                "Mean of the episodes that ended within 15 minutes, in agent steps.",
                "count:steps",
                {"mean": 'run:telamon_actor_episode_length_steps:mean15m{run="$run"}'},
            ),
            Panel(
                "Episodes",
                "Ended per second, over five minutes.",
                "count:episodes/s",
                {"episodes": 'run:telamon_actor_episodes:rate5m{run="$run"}'},
            ),
            Panel(
                "Rows lost and refused",
                "Within ten minutes. lost: their table was lost. refused: an environment broke; each cost its episode.",
                "count:rows",
                {
                    "lost": in_ten_minutes("telamon_actor_lost_rows_total"),
                    "refused": in_ten_minutes("telamon_actor_refused_rows_total"),
                },
            ),
            Panel(
                "Evaluations",
                "Mean return of the last one, of evaluations beside the training.",
                "none",
                {"return": 'telamon_evaluator_return{run="$run"}'},
            ),
            Panel(
                "An evaluation",
                "Its seconds, on average since the evaluator began.",
                "s",
                {
                    "mean": 'telamon_evaluator_evaluation_seconds_sum{run="$run"} '
                    '/ (telamon_evaluator_evaluation_seconds_count{run="$run"} > 0)'
                },
            ),
        ),
        "Machine": (
            Panel(
                "Environments",
                "Of all actors.",
                "count:environments",
                {"environments": 'sum(telamon_actor_environments{run="$run"})'},
            ),
            Panel(
                "Memory",
                "Resident, of each actor. One that only grows: an environment that leaks.",
                "bytes",
                {"{{part}}": 'process_resident_memory_bytes{run="$run", role=~"actor|train"}'},
            ),
            Panel(
                "Processors",
                "Cores that each actor keeps busy; it was given one.",
                "count:cores",
                {"{{part}}": 'rate(process_cpu_seconds_total{run="$run", role=~"actor|train"}[$__rate_interval])'},
            ),
        ),
    },
)

LEARNING = Board(
    "telamon-learning",
    "Telamon: learning",
    "Returns, losses and norms of one run or of several beside each other.",
    {
        "Returns": (
            Panel(
                "Training",
                "Mean return of the episodes that ended within 15 minutes.",
                "none",
                {"{{run}}": 'run:telamon_actor_episode_return:mean15m{run=~"$run"}'},
                width=12,
            ),
            Panel(
                "Evaluation",
                "Mean return of the last one. Curves against environment steps: `telamon view`.",
                "none",
                {"{{run}}": 'telamon_driver_return{run=~"$run", of="eval"}'},
                width=12,
            ),
            Panel(
                "Environment steps",
                "Of the run, those of earlier drivers included.",
                "count:steps",
                {"{{run}}": 'telamon_driver_env_steps_total{run=~"$run"}'},
            ),
            Panel(
                "Updates",
                "Of the run. It falls where a learner goes on from its checkpoint.",
                "count:updates",
                {"{{run}}": 'telamon_learner_run_updates{run=~"$run"}'},
            ),
            Panel(
                "What is run",
                "Always 1; the legend says what: algorithm, environment, seed, version.",
                "none",
                {"{{run}}: {{algorithm}}, {{task}}, {{seed}}, {{version}}": 'telamon_driver_run_info{run=~"$run"}'},
            ),
        ),
        "The newest update": (
            Panel(
                "Losses",
                "Each is of its own size; what matters is where it goes.",
                "none",
                {"{{run}} {{name}}": 'telamon_learner_metric{run=~"$run", name=~".*loss"}'},
                width=12,
            ),
            Panel(
                "Norms",
                "Of gradients, steps and parameters. Gradients that grow without end come before losses that do.",
                "none",
                {"{{run}} {{name}}": 'telamon_learner_metric{run=~"$run", name=~".*norm"}'},
                width=12,
            ),
            Panel(
                "All else",
                "What the agent tells besides: scales, entropies, statistics of its predictions.",
                "none",
                {"{{run}} {{name}}": 'telamon_learner_metric{run=~"$run", name!~".*loss|.*norm"}'},
                width=12,
            ),
            Panel(
                "Skipped updates",
                "Within ten minutes, because something was not finite.",
                "count:updates",
                {"{{run}}": 'sum by (run) (increase(telamon_learner_skipped_updates_total{run=~"$run"}[10m]))'},
                width=12,
            ),
        ),
    },
    several=True,
)

BOARDS = (OVERVIEW, LEARNER, REPLAY, ACTORS, LEARNING)
