"""The loop of one run: who is due when, with which parameters, and what of it is written down."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console

from deploy import local
from deploy.config import EnvConfig, EvalConfig, ReportConfig, RunConfig, make_agent
from replay_server.store import Store
from telamon.agents.tdmpc2.agent import TDMPC2
from telamon.data import ActionSpec, ArraySpec, EnvSpec, Schedule, TrainRatio, Window
from telamon.envs import counting
from telamon.keys import Stream, stream
from tests.harness import TINY, lines, probing, rows
from tests.probe import Probe, Remembering, acted, position

UNEVEN = (3, 7, 5)
SHORT = {"learns_terminations": True}
"""Lets the replay hold a whole run whose episodes are shorter than the environment's limit."""


def tdmpc2_schedule(num_envs: int, seed_steps: int, episode: int) -> Schedule:
    spec = EnvSpec("x:y", (("obs", ArraySpec((3,))),), ActionSpec((2,)), episode)
    return TDMPC2(replace(TINY, seed_steps=seed_steps), spec).schedule(num_envs)


def test_schedule_of_one_environment(monkeypatch, tmp_path):
    # S = 20: 21 random actions, a burst of 20 updates, then one update per transition
    harness = probing(monkeypatch, lengths=(7,), agent={"plan": tdmpc2_schedule(1, 20, 7)})
    log: list[tuple[str, int, int]] = []
    update, tick = local.Run.update, local.Run.tick

    def logged(name, function):
        def call(self):
            log.append((name, self.counters.transitions, self.counters.updates))
            return function(self)

        return call

    monkeypatch.setattr(local.Run, "update", logged("update", update))
    monkeypatch.setattr(local.Run, "tick", logged("tick", tick))
    run = harness.run(tmp_path / "run")
    assert run.counters.updates == 59
    # the burst is made at once, when 21 transitions are there
    assert [at for what, at, _ in log if what == "update"] == [21] * 20 + list(range(22, 61))
    # Row by row: `seen` transitions lie behind an observation, its action has the parameters after `seen` - 1 updates.
    (held,) = rows(run)
    updates, place, carry = acted(held["action"])
    seen = np.cumsum(~held["is_first"])
    random = (seen <= 20) & ~held["is_last"]
    # a random action is no multiple of 1 / SCALE in all three elements
    exact = (np.abs(held["action"][:, :3] * 1024 - np.stack([updates, place, carry], -1)) < 1e-3).all(1)
    np.testing.assert_array_equal(exact, ~random)
    # of the 21 transitions before the first update each came from a random action
    assert (random & (seen < 21)).sum() == 21
    learned = ~random & ~held["is_last"]
    np.testing.assert_array_equal(updates[learned], seen[learned] - 1)
    np.testing.assert_array_equal(place[learned], position(held["obs/where"])[learned])
    assert (held["action"][held["is_last"]] == 0).all()


@pytest.mark.parametrize("lengths", [(7,), UNEVEN])
def test_schedule_of_many_environments(monkeypatch, tmp_path, lengths):
    # three environments, S = 10: the random phase lasts until every environment has closed an episode (21 transitions)
    plan = tdmpc2_schedule(3, 10, 7)
    assert plan == Schedule("transitions", start=21, lead=3)
    harness = probing(monkeypatch, num_envs=3, lengths=lengths, steps=120, agent={"plan": plan, **SHORT})
    made: list[tuple[int, int]] = []  # at each tick: transitions so far, updates so far
    tick = local.Run.tick
    monkeypatch.setattr(
        local.Run, "tick", lambda self: (made.append((self.counters.transitions, self.counters.updates)), tick(self))[1]
    )
    run = harness.run(tmp_path / "run")
    for transitions, updates in made:
        assert updates == (0 if transitions <= 21 else transitions - 3)
    held = rows(run)
    # tick k gives row k of every environment; its transitions are those of all environments up to there
    seen = np.cumsum(sum((~h["is_first"]).astype(int) for h in held))
    for h in held:
        updates, place, _ = acted(h["action"])
        learned = (seen > 21) & ~h["is_last"]
        np.testing.assert_array_equal(updates[learned], seen[learned] - 3)
        np.testing.assert_array_equal(place[learned], position(h["obs/where"])[learned])
        assert (h["action"][h["is_last"]] == 0).all()
    if lengths == (7,):  # in lockstep: three updates a tick, none in a tick that only reset
        assert set(np.diff([updates for _, updates in made if updates])) == {0, 3}


def test_replay_holds_what_the_environments_gave(monkeypatch, tmp_path):
    run = probing(monkeypatch, num_envs=3, lengths=UNEVEN, steps=200, agent=SHORT).run(tmp_path / "run")
    twin = counting.make("continuous", 3, 0, lengths=UNEVEN, action_size=4)
    step = twin.reset()
    held = rows(run)
    for k in range(len(held[0]["reward"])):
        for e, h in enumerate(held):
            for name in ("reward", "is_first", "is_last", "is_terminal"):
                assert h[name][k] == getattr(step, name)[e]
            for key in step.obs:
                np.testing.assert_array_equal(h[f"obs/{key}"][k], step.obs[key][e])
        # the action of a reset tick is ignored: any other gives the same rows
        action = np.stack([h["action"][k] for h in held])
        step = twin.step(np.where(step.is_last[:, None], np.float32(0.7), action))
    assert lines(tmp_path / "run")[-1]["learner/torn"] == 0


def test_counters(monkeypatch, tmp_path):
    run = probing(monkeypatch, num_envs=3, lengths=UNEVEN, steps=200, agent=SHORT).run(tmp_path / "run")
    held = rows(run)
    ticks = len(held[0]["reward"])
    assert run.counters.rows == 3 * ticks
    # by walking: the rows appended, and the observations that stand
    pending = run.collector._step
    firsts = sum(int(h["is_first"].sum()) for h in held) + int(pending.is_first.sum())
    lasts = sum(int(h["is_last"].sum()) for h in held) + int(pending.is_last.sum())
    assert run.counters.transitions == 3 * (ticks + 1) - firsts
    assert run.counters.episodes == lasts
    logged = lines(tmp_path / "run")
    assert sum("train/return" in line for line in logged) == lasts
    last = logged[-1]
    assert last["counters/rows"] == run.counters.rows
    assert last["counters/transitions"] == run.counters.transitions >= 200
    assert last["counters/updates"] == run.counters.updates == run.counters.transitions - 3
    assert last["replay/rows_held"] == 3 * ticks
    assert last["replay/episodes"] == sum(int(h["is_last"].sum()) for h in held)


def test_returns_and_lengths_of_training_episodes(monkeypatch, tmp_path):
    run = probing(monkeypatch, lengths=UNEVEN, agent=SHORT).run(tmp_path / "run")
    (held,) = rows(run)
    episodes = np.cumsum(held["is_first"]) - 1
    logged = [line for line in lines(tmp_path / "run") if "train/return" in line]
    assert [line["train/length"] for line in logged] == [UNEVEN[i % 3] for i in range(len(logged))]
    for i, line in enumerate(logged[:-1]):
        assert line["train/return"] == pytest.approx(held["reward"][episodes == i].astype(float).sum())
    # one transition is one environment step here: an episode's line stands where it ended
    assert [line["step"] for line in logged] == np.cumsum([line["train/length"] for line in logged]).tolist()


def test_the_x_axis_counts_repeated_actions(monkeypatch, tmp_path):
    harness = probing(monkeypatch, lengths=(8,), env={"action_repeat": 2}, steps=100)
    run = harness.run(tmp_path / "run")
    assert run.env_steps == 100
    assert run.counters.transitions == 50
    assert [line["step"] for line in lines(tmp_path / "run") if "train/return" in line] == list(range(8, 101, 8))


def test_evaluation_touches_nothing_of_training(monkeypatch, tmp_path):
    harness = probing(monkeypatch, num_envs=2, lengths=UNEVEN, steps=120)
    harness.run(tmp_path / "without")
    without = lines(tmp_path / "without")
    for every, episodes in ((15, 3), (40, 1)):
        harness.run(tmp_path / str(every), eval=EvalConfig(every=every, episodes=episodes))
        both = lines(tmp_path / str(every))
        assert [line for line in both if "eval/return" not in line] == without
        evaluated = [line["step"] for line in both if "eval/return" in line]
        # from 0 on, at the first step at or behind each multiple
        assert len(evaluated) == 120 // every + 1
        assert all(0 <= step - k * every < 2 for k, step in enumerate(evaluated))


def test_films_of_the_newest_evaluations(monkeypatch, tmp_path):
    monkeypatch.setattr(counting.Counting, "render", lambda self: np.full((16, 16, 3), 10 * self._t, np.uint8))
    harness = probing(monkeypatch, lengths=(5,), steps=60)
    harness.run(tmp_path / "without")
    harness.run(tmp_path / "with", eval=EvalConfig(every=20, episodes=2, videos=2))
    films = sorted(path.name for path in (tmp_path / "with" / "videos").iterdir())
    assert films == ["eval-000000000040.mp4", "eval-000000000060.mp4"]
    assert not (tmp_path / "without" / "videos").exists()
    both = lines(tmp_path / "with")
    assert [line for line in both if "eval/return" not in line] == lines(tmp_path / "without")


def test_an_environment_without_pictures_cannot_be_filmed(monkeypatch, tmp_path):
    harness = probing(monkeypatch, eval=EvalConfig(every=20, episodes=1, videos=1))
    with pytest.raises(NotImplementedError, match="no picture"):
        harness.run(tmp_path / "run")


@pytest.mark.parametrize(
    ("task", "reason"),
    [("counting:continuous", "a counting environment has no picture"), ("gym:Pendulum-v1", "DependencyNotInstalled: ")],
)
def test_films_that_cannot_be_made_are_refused_before_anything_is_written(monkeypatch, tmp_path, task, reason):
    monkeypatch.setitem(sys.modules, "pygame", None)  # with which Gymnasium would draw
    config = RunConfig("tdmpc2", task, eval=EvalConfig(videos=1), agent=TINY)
    for _ in range(2):  # as the same command again
        with pytest.raises(ValueError, match=rf"no picture of {task} can be drawn \(.*{reason}.*\); --eval.videos 0"):
            local.train(config, tmp_path / "run", False, Console(file=io.StringIO()))
    assert not (tmp_path / "run").exists()


def test_an_evaluation_uses_the_parameters_of_its_moment(monkeypatch, tmp_path):
    harness = probing(monkeypatch, lengths=(5,), steps=60, eval=EvalConfig(every=20, episodes=3))
    harness.run(tmp_path / "run")
    for line in lines(tmp_path / "run"):
        if "eval/return" not in line:
            continue
        # In units of 1 / SCALE: five steps of updates + 2 * t + 3 * t for t = 0..4, and no noise in eval mode.
        updates = 0 if line["step"] <= 20 else line["step"] - 1
        assert line["eval/return"] == pytest.approx((5 * updates + 5 * 10) / 1024)
        assert line["eval/length"] == 5
        assert line["eval/return_min"] <= line["eval/return"] <= line["eval/return_max"]


def test_nothing_is_due_while_nothing_can_be_sampled(monkeypatch, tmp_path):
    # the environment was announced with episodes of 7 steps, and its first lasts 30
    harness = probing(monkeypatch, lengths=(30, 7), random=5)
    run = harness.run(tmp_path / "run")
    (held,) = rows(run)
    updates, _, _ = acted(held["action"])
    seen = np.cumsum(~held["is_first"])
    assert held["is_last"][30]
    # what was missed is made up for as soon as the episode is appended: at the next observation
    assert updates[31] == seen[31] - 1 == 29
    assert run.counters.updates == 59


# a train ratio, latents, reports


@pytest.mark.parametrize(("num_envs", "first"), [(1, 8), (3, 14)])
def test_a_train_ratio_owes_from_its_first_row_on(monkeypatch, tmp_path, num_envs, first):
    # Windows of 4 rows and 5 of them wanted: with three environments the fifth comes with row 5 of environment 1.
    plan = TrainRatio(0.5, start=5, window=4)
    harness = probing(monkeypatch, num_envs=num_envs, lengths=UNEVEN, kind=Remembering, agent={"plan": plan})
    made: list[int] = []
    tick = local.Run.tick
    monkeypatch.setattr(local.Run, "tick", lambda self: (made.append(self.counters.updates), tick(self))[1])
    run = harness.run(tmp_path / "run")
    due = [0 if rows < first else 1 + (rows - first) // 2 for rows in range(0, run.counters.rows + 1, num_envs)]
    assert made == due[: len(made)]
    assert run.counters.updates == due[-1]
    # by the policy from the first row on, with the parameters that the rows before it led to
    for held in rows(run):
        updates, place, _ = acted(held["action"])
        shown = ~held["is_last"]
        np.testing.assert_array_equal(updates[shown], np.array(made)[shown])
        np.testing.assert_array_equal(place[shown], position(held["obs/where"])[shown])
    assert lines(tmp_path / "run")[-1]["learner/torn"] == 0


@pytest.mark.parametrize("nan_share", [0.0, 0.4])
def test_fresh_latents_reach_their_rows(monkeypatch, tmp_path, nan_share):
    harness = probing(
        monkeypatch, num_envs=3, lengths=UNEVEN, steps=120, kind=Remembering, agent={"nan_share": nan_share}
    )  # fmt: skip
    windows = []
    sample = Store.sample
    monkeypatch.setattr(Store, "sample", lambda *args: (windows.append(sample(*args)), windows[-1])[1])
    run = harness.run(tmp_path / "run")
    key = stream(run.config.seed, Stream.UPDATE)
    held = rows(run)
    expected = [np.zeros(len(h["reward"])) for h in held]
    applied = 0
    for i, window in enumerate(windows):
        if float(run.agent.draw_update_noise(jax.random.fold_in(key, i))) < nan_share:
            continue
        applied += 1
        for env, first in zip(window.env_id, window.first_row, strict=True):
            expected[env][first + 1 : first + 4] = applied  # the context row keeps its own
    assert applied == run.counters.updates - run.counters.skipped
    assert (run.counters.skipped > 5) == (nan_share > 0)
    for h, made in zip(held, expected, strict=True):
        np.testing.assert_array_equal(h["latents/made"].astype(float), made)
        np.testing.assert_array_equal(h["latents/place"], position(h["obs/where"]))
        assert np.unique(made).size > 5
    for line in lines(tmp_path / "run"):
        assert line.get("learner/misplaced", 0) == 0


def test_fresh_latents_are_of_the_past_of_their_window():
    flags = np.zeros((2, 4), bool)
    window = Window(np.zeros(2, np.int32), np.arange(2), {}, flags, flags, flags, flags, flags, {}, incarnation=7)
    assert local.fresh_latents(window, 1, {"made": np.zeros((2, 3))}).incarnation == 7


@pytest.mark.parametrize("kind", [Probe, Remembering])
def test_a_report_touches_nothing_of_training(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(local.openloop, "show", lambda *args: set())
    harness = probing(monkeypatch, num_envs=2, lengths=UNEVEN, steps=120, kind=kind)
    without = harness.run(tmp_path / "without", report=ReportConfig(every=0))
    for every in (15, 40):
        run = harness.run(tmp_path / str(every), report=ReportConfig(every=every))
        both = lines(tmp_path / str(every))
        reports = [line for line in both if "report/torn" in line]
        assert [line for line in both if "report/torn" not in line] == lines(tmp_path / "without")
        assert all(line["report/torn"] == 0 for line in reports)
        # from the first update on, at the first step at or behind each multiple
        first = next(line["step"] for line in both if "loss/bad_loss" in line)
        assert len(reports) in (120 // every - first // every, 120 // every - first // every + 1)
        assert all(line["step"] % every < 2 for line in reports[1:])
        assert len({line["report/noise"] for line in reports}) == len(reports)
        for a, b in zip(jax.tree.leaves(run.state), jax.tree.leaves(without.state), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_report_leaves_pictures_and_says_once_what_it_cannot_draw(monkeypatch, tmp_path, caplog):
    harness = probing(monkeypatch, kind=Remembering, report=ReportConfig(every=20, keep=1))
    harness.run(tmp_path / "run")
    assert [p.name for p in (tmp_path / "run" / "report").iterdir()] == ["openloop-where-000000000060.png"]
    assert "report_incomplete" not in caplog.text
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = harness.run(tmp_path / "without")
    assert run.progress.reported == 60
    (said,) = [r.getMessage() for r in caplog.records if "event=report_incomplete" in r.getMessage()]
    assert "pip install 'telamon[plot]'" in said


def test_lines_of_losses_are_evenly_spaced(monkeypatch, tmp_path):
    harness = probing(monkeypatch, num_envs=3, random=4, steps=100, log_every=10)
    harness.run(tmp_path / "run")
    steps = [line["step"] for line in lines(tmp_path / "run") if "loss/bad_loss" in line]
    assert all(0 <= step - 10 * k < 3 for k, step in enumerate(steps, start=steps[0] // 10))
    assert steps[-1] >= 100


# what fits


def spec_of(length: int | None) -> EnvSpec:
    return EnvSpec("x:y", (("obs", ArraySpec((3,))),), ActionSpec((2,)), length, action_repeat=2)


@pytest.mark.parametrize(
    ("steps", "num_envs", "length", "episodic", "rows_per_env"),
    [
        (1000, 1, 50, False, 500 + 10 + 1),  # 500 transitions in 10 episodes
        (1001, 1, 50, False, 501 + 11 + 1),
        (1000, 4, 50, False, 125 + 3 + 1),
        (1000, 1, 50, True, 500 + 125 + 1),  # an episode may end after four transitions
        (2, 1, 50, False, 4),  # a window of 3 transitions at least
        (100_000_000, 1, 50, False, 51 * 20_000),  # the preset: a million transitions in whole episodes
    ],
)
def test_capacity_is_what_the_run_needs(steps, num_envs, length, episodic, rows_per_env):
    config = RunConfig("tdmpc2", "x:y", steps=steps, env=EnvConfig(num=num_envs))
    agent = TDMPC2(replace(config.agent, episodic=episodic), spec_of(length))
    assert local.capacity(config, agent, config.env.num) == rows_per_env


def test_a_whole_run_fits_its_capacity(monkeypatch, tmp_path):
    for num_envs in (1, 3):
        run = probing(monkeypatch, lengths=(7,), num_envs=num_envs).run(tmp_path / str(num_envs))
        assert run.replay.stats().rows_held == run.counters.rows


def test_memory_beyond_the_limit_is_refused_with_what_fits():
    config = RunConfig("tdmpc2", "x:y", steps=10_000_000, memory_limit=0.02, env=EnvConfig(num=3), agent=TINY)
    agent = make_agent(config, spec_of(50))
    with pytest.raises(ValueError) as caught:
        local.memory(config, agent, config.env.num)
    text = str(caught.value)
    # a million transitions over 3 environments in episodes of 50: 6667 x 51 rows of 27 bytes each
    assert text.startswith("a replay of 0.0256 GiB beside ")
    assert "exceeds the limit of 0.02 GiB; agent.buffer_size=" in text
    assert text.endswith(" is the largest that fits, or raise memory_limit")
    fits = int(text.partition("agent.buffer_size=")[2].split()[0])
    smaller = replace(config, agent=replace(TINY, buffer_size=fits))
    predicted = local.memory(smaller, make_agent(smaller, spec_of(50)), smaller.env.num)
    assert sum(predicted.values()) <= 0.02 * 2**30
    larger = replace(config, agent=replace(TINY, buffer_size=fits + 1))
    with pytest.raises(ValueError, match="exceeds the limit"):
        local.memory(larger, make_agent(larger, spec_of(50)), larger.env.num)


def test_memory_that_no_buffer_fits_is_refused():
    config = RunConfig("tdmpc2", "x:y", memory_limit=1e-6, agent=TINY)
    with pytest.raises(ValueError, match=r"no agent\.buffer_size fits, or raise memory_limit"):
        local.memory(config, make_agent(config, spec_of(50)), config.env.num)


def test_predicted_memory_is_what_is_taken(monkeypatch, tmp_path):
    harness = probing(monkeypatch, num_envs=2, steps=200)
    with harness.open(tmp_path / "run") as run:
        predicted = local.memory(run.config, run.agent, run.config.env.num)
        assert predicted["replay"] == sum(c.nbytes for c in run.replay._content.ring._columns.values())
        assert predicted["train state"] == sum(x.nbytes for x in jax.tree.leaves(run.state.train))
