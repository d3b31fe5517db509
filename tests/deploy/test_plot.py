"""Plots compare like with like; published curves are what the package ships."""

import dataclasses
import importlib.util
import sys

import numpy as np
import pytest

from deploy import presets
from deploy.config import RunConfig, save
from deploy.curves import REFERENCES, align, binned, game_name, published, task_name
from deploy.plot import draw, plot_runs, read_run
from telamon.telemetry.writer import MetricsWriter


@pytest.fixture
def make_run(tmp_path):
    def make(
        name, seed=1, task="dmc:cartpole-swingup", preset=1, steps=50_000, metrics=("train/return", "eval/return")
    ):
        run_dir = tmp_path / name
        run_dir.mkdir()
        save(presets.apply(RunConfig("tdmpc2", task, seed=seed, steps=steps), [str(preset)]), run_dir)
        with MetricsWriter(run_dir) as writer:
            for step in range(0, 50_001, 10_000):
                writer.write(step, {metric: step / 100 + seed for metric in metrics})
        return run_dir

    return make


def lines(axes):
    """{label: [(x, y)]} of the legend's lines."""
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()}


def test_published_tdmpc2_cartpole_swingup():
    curve = published("tdmpc2", "dmc:cartpole-swingup")
    np.testing.assert_array_equal(curve.steps[:3], [0, 100_000, 200_000])
    assert curve.values.shape == (3, len(curve.steps))
    np.testing.assert_allclose(np.sort(curve.values[:, 1]), [789.8, 860.5, 867.9])
    assert curve.metric == "eval/return"


def test_published_dreamerv3_and_the_official_run_are_training_returns():
    curve = published("dreamerv3", "dmc:walker-walk")
    assert (curve.metric, curve.steps[0], curve.steps[-1]) == ("train/return", 10_000, 490_000)
    official = published("tdmpc2-size1", "dmc:cartpole-swingup")
    assert (official.metric, official.values.shape) == ("train/return", (1, 21))
    assert official.values[0, -1] == 645.5


@pytest.mark.parametrize("reference", REFERENCES)
def test_every_shipped_curve_loads(reference):
    """Each file is there, and each of its tasks that dm_control has is found under dm_control's own name."""
    tasks = ("ball_in_cup-catch", "cup-catch", "cartpole-swingup_sparse", "finger-turn_easy")
    envs = {
        "tdmpc2-size1": ["dmc:cartpole-swingup"],
        "dreamerv3-vision": [f"dmcpixels:{task}" for task in tasks],
        "dreamerv3-atari100k": ["atari:pong", "envpool:Pong-v5", "atari:ms_pacman", "envpool:MsPacman-v5"],
    }
    for env in envs.get(reference, [f"dmc:{task}" for task in tasks]):
        curve = published(reference, env)
        assert curve.values.ndim == 2
        if reference != "tdmpc2-size1":
            assert len(curve.values) >= 3
        assert np.isfinite(np.nanmean(curve.values, axis=0)).all()
        assert (np.diff(curve.steps) > 0).all()


@pytest.mark.parametrize(
    ("env", "task"),
    [
        ("dmc:cartpole-swingup", "cartpole-swingup"),
        ("dmc:ball_in_cup-catch", "cup-catch"),
        ("dmc:point_mass-easy", "pointmass-easy"),
        ("envpool:CartpoleSwingupSparse-v1", "cartpole-swingup-sparse"),
        ("envpool:BallInCupCatch-v1", "cup-catch"),
        ("gym:Pendulum-v1", None),
        ("my_pkg.my_env:make_env", None),
    ],
)
def test_task_names(env, task):
    assert task_name(env, ("dmc", "envpool")) == task


@pytest.mark.parametrize("env", ["dmc:pong", "gym:Pong-v5", "my_pkg.my_env:make_env"])
def test_what_is_no_game_has_no_games_name(env):
    assert game_name(env) is None


def test_published_pixels_are_binned():
    curve = published("dreamerv3-vision", "dmcpixels:walker-walk")
    assert (curve.metric, curve.values.shape) == ("train/return", (10, 100))
    np.testing.assert_array_equal(curve.steps, np.arange(10_000, 1_000_001, 10_000))
    assert 940 < np.nanmean(curve.values[:, -5:]) < 980
    with pytest.raises(ValueError, match="no curve for dmc:walker-walk"):
        published("dreamerv3-vision", "dmc:walker-walk")


def test_bins_end_where_their_last_point_may_be():
    steps, values = binned([1, 10, 11, 20, 21], [1, 2, 3, 4, 5], 10)
    assert steps.tolist() == [10, 10, 20, 20, 30]
    assert values == [1, 2, 3, 4, 5]


def test_align_interpolates_inside_and_never_outside():
    steps, values = align([([0, 10, 20], [0.0, 1.0, 2.0]), ([5, 5, 15], [1.0, 3.0, 4.0])])
    np.testing.assert_array_equal(steps, [0, 5, 10, 15, 20])
    np.testing.assert_allclose(values, [[0, 0.5, 1, 1.5, 2], [np.nan, 2, 3, 4, np.nan]])


def test_evaluations_are_drawn_over_published_evaluations(make_run):
    axes = draw([read_run(make_run("a"))], "tdmpc2").axes[0]
    found = lines(axes)
    ours = found["tdmpc2: evaluation, one seed"]
    assert (ours[0], ours[-1]) == ((0, 1), (50_000, 501))
    assert "tdmpc2: training episodes" in found
    theirs = found["published TD-MPC2, 5M parameters: evaluation, mean and range of 3 seeds, a point every 100k"]
    # only up to the first published point that our data has not passed
    np.testing.assert_allclose(theirs, [(0, (2.0 + 4.8 + 1.5) / 3), (100_000, (789.8 + 867.9 + 860.5) / 3)])
    assert axes.get_xlim() == (0, 100_000)
    assert axes.get_title() == "tdmpc2 on dmc:cartpole-swingup"
    assert axes.get_xlabel() == "environment steps"


def test_training_returns_are_drawn_over_published_training_returns(make_run):
    found = lines(draw([read_run(make_run("a"))], "dreamerv3").axes[0])
    assert "tdmpc2: training episodes, one seed" in found
    assert "tdmpc2: evaluation" in found


def test_the_axis_ends_with_our_data_beyond_the_reference(make_run):
    axes = draw([read_run(make_run("a"))], "tdmpc2-size1").axes[0]
    assert axes.get_xlim() == (0, 50_000)


def test_a_run_that_has_just_begun_can_be_plotted(make_run):
    run = read_run(make_run("a"))
    begun = dataclasses.replace(run, rows=run.rows[:1])
    assert draw([begun], None).axes[0].get_xlim() == (0, 1)
    assert draw([begun], "tdmpc2").axes[0].get_xlim() == (0, 100_000)


def test_seeds_become_one_mean_and_other_settings_another(make_run):
    runs = [
        read_run(make_run(*run)) for run in (("a", 1), ("b", 3, "dmc:cartpole-swingup", 1, 60_000))
    ]  # planned to run longer
    runs.append(read_run(make_run("c", 2, preset=5)))
    axes = draw(runs, None).axes[0]
    found = lines(axes)
    assert found["tdmpc2 (a, b): evaluation, mean and range of 2 seeds"][1] == (10_000, 102)
    assert found["tdmpc2 (c): evaluation, one seed"][1] == (10_000, 102)
    (band,) = axes.collections
    low, high = band.get_datalim(axes.transData).intervaly
    assert (low, high) == (1, 503)


def test_each_task_has_axes_of_its_own(make_run):
    runs = [read_run(make_run("a")), read_run(make_run("b", task="dmc:walker-walk"))]
    assert [axes.get_title() for axes in draw(runs, "tdmpc2").axes] == [
        "tdmpc2 on dmc:cartpole-swingup",
        "tdmpc2 on dmc:walker-walk",
    ]


def test_plot_runs_writes_a_png(make_run, tmp_path):
    out = tmp_path / "pictures" / "a.png"
    plot_runs([make_run("a", metrics=("train/return",))], out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_refusals_are_one_sentence(make_run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"it holds no config\.yaml"):
        plot_runs([tmp_path], tmp_path / "x.png")
    with pytest.raises(ValueError, match="has logged no return yet"):
        plot_runs([make_run("losses", metrics=("loss/total_loss",))], tmp_path / "x.png")
    run = make_run("a")
    with pytest.raises(ValueError, match="no reference 'sac'; known references are tdmpc2, tdmpc2-size1, dreamerv3,"):
        plot_runs([run], tmp_path / "x.png", "sac")
    with pytest.raises(ValueError, match=r"no curve for dmc:walker-wlak; it has walker-walk"):
        plot_runs([make_run("typo", task="dmc:walker-wlak")], tmp_path / "x.png", "tdmpc2")
    with pytest.raises(ValueError, match=r"no curve for gym:Pendulum-v1; its \d+ tasks are acrobot-swingup, "):
        plot_runs([make_run("gym", task="gym:Pendulum-v1")], tmp_path / "x.png", "tdmpc2")
    with pytest.raises(ValueError, match="holds no eval/return, which the curve of published TD-MPC2"):
        plot_runs([make_run("unevaluated", metrics=("train/return",))], tmp_path / "x.png", "tdmpc2")
    with pytest.raises(ValueError, match="there is no run to plot"):
        plot_runs([], tmp_path / "x.png")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no metrics\.jsonl"):
        plot_runs([run], tmp_path / "x.png")


def test_a_missing_matplotlib_names_the_extra(make_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'telamon\[plot\]'"):
        plot_runs([make_run("a")], tmp_path / "x.png")


def test_the_data_folder_does_not_hide_the_module():
    """deploy/curves/ lies beside deploy/curves.py; the folder must never become a package."""
    assert importlib.util.find_spec("deploy.curves").origin.endswith("curves.py")
