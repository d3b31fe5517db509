"""The golden files pass; and a file with one altered number of any kind does not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from tests.parity import plan, update
from tests.parity.__main__ import check, main
from tests.parity.fixture import Fixture, Refused, agent, load
from tests.parity.report import compare, compare_tree

GOLDEN = Path(__file__).parents[1] / "golden"
UPDATES = ("latest", "paper", "latest_clip", "paper_clip", "episodic")
PLANS = ("latest", "paper", "episodic", "nopi")


def arrays(name: str) -> dict[str, np.ndarray]:
    return {key: value.copy() for key, value in load(GOLDEN / name).items()}


def altered(value: np.ndarray, share: float = 0.01) -> np.ndarray:
    """One number in the middle moved by a share of the largest; a flag or an index by one."""
    value = value.copy()
    middle = tuple(n // 2 for n in value.shape)
    if value.dtype.kind in "bi":
        value[middle] = value[middle] ^ 1
    else:
        value[middle] += share * max(np.abs(value).max(), 1e-3)
    return value


def failures(contents: dict[str, np.ndarray], scheme) -> set[str]:
    return {line.name for line in scheme.check(Fixture(Path("altered.npz"), contents)) if not line.passed}


@pytest.mark.parametrize("name", [f"update_{n}.npz" for n in UPDATES] + [f"plan_{n}.npz" for n in PLANS])
def test_golden_files_agree_and_nothing_in_them_is_left_out(name, capsys):
    assert main([str(GOLDEN / name)]) == 0
    assert "unsupported" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["blocks_latest.npz", "blocks_paper.npz"])
def test_golden_blocks_agree_and_what_is_not_checked_is_listed(name, capsys):
    assert main([str(GOLDEN / name)]) == 0
    out = capsys.readouterr().out
    unsupported = [line.split()[0] for line in out.splitlines() if "unsupported" in line]
    assert unsupported == ["pi_mt/*", "rgb/*"]


def test_one_altered_result_of_an_update_fails_its_own_line():
    contents = {k: v for k, v in arrays("update_paper_clip.npz").items() if not k.startswith("u3/")}
    kinds = [f"u2/{name}" for name in update.KINDS if f"u2/{name}" in contents]
    trees = {f"u2/{group}": next(k for k in contents if k.startswith(f"u2/{group}")) for group in update.TREES}
    assert len(kinds) == 16
    for key in kinds + list(trees.values()):
        failed = failures(contents | {key: altered(contents[key])}, update)
        line = next((f"{group}*" for group, of_group in trees.items() if of_group == key), key)
        assert line in failed, key
    for key in ("cfg/discount", "cfg/bin_size", "u2/grad_wm/_pi.1.weight"):
        assert failures(contents | {key: altered(contents[key])}, update), key


def test_one_altered_input_of_an_update_fails():
    contents = {k: v for k, v in arrays("update_latest_clip.npz").items() if not k.startswith("u3/")}
    for key, expected in {
        "init/_dynamics.1.weight": "u1/mid/zs",
        "init_target/_Qs.1.ln.bias": "u1/after_target/*",
        "u2/batch/obs": "u2/mid/next_z",
        "u2/batch/action": "u2/mid/zs",
        "u2/batch/reward": "u2/mid/td_target",
        "u2/draw/td_pi_eps": "u2/mid/td_target",
        "u2/draw/td_q_pair": "u2/mid/td_target",
        "u2/draw/pi_eps": "u2/mid/pi_action",
        "u2/draw/pi_q_pair": "u2/mid/pi_q_scaled",
    }.items():
        assert expected in failures(contents | {key: altered(contents[key], share=1.0)}, update), key


def test_one_altered_number_of_a_plan_fails():
    contents = {k: v for k, v in arrays("plan_paper.npz").items() if not k.startswith(("c2/", "c3/"))}
    for key, expected in {
        **{f"c1/it1/{name}": f"c1/it1/{name}" for name in
           ("actions", "value", "elite_idxs", "elite_value", "score", "mean", "std")},
        **{f"c1/{name}": f"c1/{name}" for name in
           ("elite_pick", "action", "new_prev_mean", "nompc/z", "nompc/action_sample", "nompc/action_mean")},
    }.items():  # fmt: skip
        assert expected in failures(contents | {key: altered(contents[key])}, plan), key
    for key, expected in {
        "init/_reward.2.weight": "c0/it0/value",
        "c1/obs": "c1/it0/value",
        "c1/prev_mean": "c1/it0/actions",
        "c1/t0": "c1/it0/actions",
        "c1/eval_mode": "c1/action",
        "c1/draw/pi_traj_eps": "c1/it0/actions",
        "c1/it1/draw/noise": "c1/it1/actions",
        "c1/it1/draw/term_pi_eps": "c1/it1/value",
        "c1/it1/draw/q_pair": "c1/it1/value",
        "c1/draw/final_noise": "c1/action",
        "c1/nompc/pi_eps": "c1/nompc/action_sample",
    }.items():  # fmt: skip
        assert expected in failures(contents | {key: altered(contents[key], share=1.0)}, plan), key
    uniform = contents | {"c1/draw/uniform": np.asarray(1 - contents["c1/draw/uniform"])}
    assert "c1/elite_pick" in failures(uniform, plan)


def test_exit_status_tells_a_difference_from_a_file_that_cannot_be_checked(tmp_path, capsys):
    contents = arrays("blocks_latest.npz")
    groups = ("symlog", "symexp", "mish", "simnorm", "log_std", "discount", "scale", "term_stat")
    few = {k: v for k, v in contents.items() if k.split("/")[0] in groups}
    np.savez(tmp_path / "good.npz", **few)
    np.savez(tmp_path / "bad.npz", **few | {"mish/y": altered(few["mish/y"])})
    np.savez(tmp_path / "other.npz", **{"pi_mt/z": contents["pi_mt/z"]})
    run = lambda *names: main([str(tmp_path / name) for name in names])
    assert run("good.npz") == 0
    assert run("good.npz", "bad.npz") == 1
    assert "mish/y" in next(line for line in capsys.readouterr().out.splitlines() if "FAIL" in line)
    assert run("good.npz", "other.npz") == 2
    assert run("bad.npz", "other.npz", "good.npz") == 1


def test_every_altered_block_fails_its_own_line():
    contents = arrays("blocks_latest.npz")
    outputs = [
        k for k in contents
        if k.endswith(("/y", "_value", "_loss", "_grad_of_sum", "_grad_of_mean", "_s", "_scaled"))
        or k.startswith(("bins/", "two_hot/k", "q/all", "q/min", "q/avg", "term_stat/termination"))
        or k in ("pi/action", "pi/mean", "pi/log_std", "pi/entropy", "pi/scaled_entropy", "discount/gamma")
    ]  # fmt: skip
    outputs = [k for k in outputs if not k.endswith("_pair") and not k.startswith("pi_mt/")]
    everything = contents | {k: altered(contents[k]) for k in outputs}
    everything["pi/bonus_grad/_pi.1.weight"] = altered(contents["pi/bonus_grad/_pi.1.weight"])
    lines = check(Fixture(Path("altered.npz"), everything))
    passed = {line.name for line in lines if line.passed}
    assert len(lines) == 41
    assert passed == set(), passed


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        (None, "does not exist or is no file"),
        (b"text", "is no .npz file of plain numbers"),
        ({"a": np.array([{}], object)}, "is no .npz file of plain numbers"),
        ({}, "holds nothing that is supported: it is empty"),
        ({"sd/x": np.zeros(2), "sd/y": np.zeros(2), "fwd/obs": np.zeros(3)}, "nothing that is supported: fwd/*, sd/*"),
        ({"cfg/multitask": np.bool_(True), "u1/batch/obs": np.zeros(3)}, "is multi-task, which is not supported yet"),
        ({"u1/batch/obs": np.zeros(3)}, "holds no 'cfg/obs_dim', without which"),
    ],
)
def test_a_file_that_cannot_be_checked_is_refused_with_one_sentence(contents, sentence, tmp_path, capsys):
    path = tmp_path / "file.npz"
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents is not None:
        np.savez(path, **contents)
    assert main([str(path)]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"refused: {path}")
    assert sentence in refusal
    assert refusal.count("\n") == 1


def test_every_hyperparameter_comes_from_the_file():
    recorded = {k: v for k, v in arrays("update_latest.npz").items() if k.startswith("cfg/")}
    other = {
        "horizon": 5, "num_q": 3, "num_bins": 15, "vmin": -4, "vmax": 6, "rho": 0.7, "grad_clip_norm": 0.5, "tau": 0.02,
        "latent_dim": 12, "simnorm_dim": 4, "num_enc_layers": 4, "lr": 1e-3, "enc_lr_scale": 0.5, "entropy_coef": 0.1,
        "consistency_coef": 2, "reward_coef": 3, "value_coef": 4, "termination_coef": 5, "episodic": True,
        "min_std": 0.1, "max_std": 1, "temperature": 2, "log_std_min": -5, "log_std_max": 1, "num_samples": 12,
        "num_elites": 3, "num_pi_trajs": 0, "iterations": 2, "discount_denom": 10, "discount_min": 0.5,
        "discount_max": 0.9,
    }  # fmt: skip
    file = recorded | {f"cfg/{k}": np.asarray(v) for k, v in other.items()}
    built = agent(Fixture(Path("f.npz"), file), "latest")
    assert other.items() <= asdict(built.config).items()
    assert (built.networks.obs_dim, built.action_dim, built.episode_length) == (5, 2, 500)


def test_a_file_made_with_dropout_is_refused():
    recorded = {k: v for k, v in arrays("update_latest.npz").items() if k.startswith("cfg/")}
    with pytest.raises(Refused, match=r"cfg/dropout=0\.01: masks are not recorded"):
        agent(Fixture(Path("f.npz"), recorded | {"cfg/dropout": np.asarray(0.01)}), "latest")


def test_comparison_fails_on_shapes_names_and_nan():
    assert not compare("x", "loss", np.zeros((2, 1)), np.zeros(2)).passed
    assert not compare("x", "loss", np.array([np.nan]), np.array([0.0])).passed
    assert not compare("x", "loss", np.array([0.0]), np.array([np.nan])).passed
    assert not compare_tree("x", "parameter", {"a": np.zeros(2)}, {"b": np.zeros(2)}).passed
    assert not compare_tree("x", "parameter", {"a": np.array([np.nan])}, {"a": np.zeros(1)}).passed
    assert compare_tree("x", "parameter", {"a": np.zeros(2)}, {"a": np.full(2, 1e-6)}).passed
