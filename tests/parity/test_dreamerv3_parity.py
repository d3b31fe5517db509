"""The DreamerV3 golden files pass; with one altered number of any kind they do not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.parity import dreamerv3, dreamerv3_blocks, dreamerv3_nets, dreamerv3_update
from tests.parity.__main__ import main
from tests.parity.fixture import Fixture, Refused, arrays, load
from tests.parity.report import compare

GOLDEN = Path(__file__).parents[1] / "golden"
LATEST, PAPER = GOLDEN / "dreamerv3", GOLDEN / "dreamerv3_paper"
CASES = ("vec_cont", "vec_disc", "img_cont", "dict_mixed")
FILES = [
    *(LATEST / f"{name}.npz" for name in ("blocks", "replay_trace", "clock")),
    *(LATEST / f"net_{case}.npz" for case in (*CASES, "img_strided")),
    *(LATEST / f"train_{case}.npz" for case in CASES),
    *(PAPER / f"train_{case}.npz" for case in ("vec_cont", "vec_disc")),
]


def altered(value: np.ndarray) -> np.ndarray:
    """One number in the middle moved by a hundredth of the largest; a flag or an index by one."""
    value = value.copy()
    middle = tuple(n // 2 for n in value.shape)
    if value.dtype.kind in "biu":
        value[middle] = value[middle] ^ 1
    else:
        value[middle] += 0.01 * max(np.abs(value).max(), 1e-2)
    return value


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden_files_agree_and_nothing_in_them_is_left_out(path, capsys):
    assert main([str(path)]) == 0
    assert "unsupported" not in capsys.readouterr().out


def lines(contents: dict[str, np.ndarray], scheme) -> dict[str, bool]:
    """{quantity: whether it passed}."""
    return {line.name: line.passed for line in scheme.check(Fixture(Path("altered.npz"), contents))}


def first_update(path: Path) -> dict[str, np.ndarray]:
    """A file as if it had ended after its first update."""
    later = ("2", "3", "u2", "u3")
    return {key: x for key, x in load(path).items() if not any(part in later for part in key.split("/")[1:2])}


def test_every_altered_block_fails_its_own_line():
    contents = dict(load(LATEST / "blocks.npz"))
    names = lines(contents, dreamerv3_blocks)
    wrong = {key: altered(contents[key]) for key in (name.replace("*", "d/kernel") for name in names)}
    assert len(names) == 63
    assert [name for name, passed in lines(contents | wrong, dreamerv3_blocks).items() if passed] == []


def test_every_altered_output_of_the_networks_fails_its_own_line():
    contents = dict(load(LATEST / "net_vec_disc.npz"))
    outputs = [key for key in contents if key.startswith("out/")]
    checked = lines(contents | {key: altered(contents[key]) for key in outputs}, dreamerv3_nets)
    # the one-hot latents' middle element moves by too little to be another class
    assert {name for name, passed in checked.items() if passed} == {key for key in outputs if key.endswith("stoch")}
    flipped = {key: 1 - contents[key] for key in outputs if key.endswith("stoch")}
    assert not any(passed for name, passed in lines(contents | flipped, dreamerv3_nets).items() if name in flipped)


def test_every_altered_input_of_the_networks_fails():
    contents = dict(load(LATEST / "net_vec_disc.npz"))
    inputs = [key for key in contents if key.startswith("in/") and key not in ("in/obs/is_last",)]
    inputs += ["param/dyn/dyngru/kernel", "param/slowval/head/logits/bias"]
    for key in inputs:
        x = contents[key]
        wrong = 1 - x if x.dtype.kind == "f" and "stoch" in key else -x if x.dtype.kind == "f" else x ^ 1
        assert not all(lines(contents | {key: wrong}, dreamerv3_nets).values()), key


@pytest.mark.parametrize("path", [LATEST / "train_vec_disc.npz", PAPER / "train_vec_disc.npz"], ids=("latest", "paper"))
def test_every_altered_result_of_an_update_fails_its_own_line(path):
    contents = first_update(path)
    results = [key for key in contents if key.startswith(("loss/", "metric/", "inter/", "writeback/", "count/1/"))]
    results += [key for key in contents if key.startswith(("norm/1/", "opt/1/", "grad/u1/", "param/1/", "slow/1/"))]
    classes = {key: (x + 1) % 4 for key, x in contents.items() if key.endswith("stoch") and x.dtype.kind == "i"}
    one_hot = {key: 1 - x for key, x in contents.items() if key.endswith("stoch") and x.dtype.kind == "f"}
    flipped = {key: x for key, x in (classes | one_hot).items() if key in results}
    if contents["inter/prevact/action"].dtype.kind == "f":
        flipped["inter/prevact/action"] = 1 - contents["inter/prevact/action"]
    checked = lines(contents | {key: altered(contents[key]) for key in results} | flipped, dreamerv3_update)
    passed = {name for name, passed in checked.items() if passed}
    # one element of each tensor is within the share that may be elsewhere after a step of our own
    assert passed == {"count/0", "slow/1/*, running freely"}


def test_every_altered_input_of_an_update_fails():
    contents = first_update(LATEST / "train_vec_disc.npz")
    inputs = [key for key in contents if key.startswith(("data/", "noise/u1/", "norm/0/"))]
    inputs += [next(key for key in contents if key.startswith(prefix)) for prefix in ("param/0/", "slow/0/slow")]
    unused = {"data/stepid", "data/consec"}
    for key in inputs:
        x = contents[key]
        wrong = x ^ 1 if x.dtype.kind in "biu" else 1 - x
        assert all(lines(contents | {key: wrong}, dreamerv3_update).values()) == (key in unused), key


def test_moments_alone_are_refused_and_found_beside_their_updates(capsys):
    path = LATEST / "train_vec_disc_opt.npz"
    assert main([str(path)]) == 2
    refusal = capsys.readouterr().err
    assert refusal.startswith(
        f"refused: {path} holds moments alone, which are checked with their updates: pass train_vec_disc.npz"
    )
    assert refusal.count("\n") == 1


def settings(**changed: object) -> Fixture:
    recorded = {key: x for key, x in arrays(LATEST / "train_img_cont.npz").items() if key.startswith("config/")}
    return Fixture(
        Path("f.npz"), recorded | {f"config/{name.replace('__', '.')}": np.asarray(x) for name, x in changed.items()}
    )


def test_every_setting_comes_from_the_file():
    recorded = [key.removeprefix("config/") for key in settings()]
    for name, pattern in dreamerv3.SETTINGS.items():
        assert any(re.fullmatch(pattern, key) for key in recorded), name
    config = dreamerv3.config(settings(opt__lr=2e-3, opt__warmup=7, horizon=50, imag_loss__lam=0.5, repl_loss__lam=0.5))
    assert (config.lr, config.warmup, config.horizon, config.lam) == (2e-3, 7, 50, 0.5)
    assert (config.recipe, config.mults, config.strided, config.loss_scales.rep) == ("latest", (2, 4), False, 0.1)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"imag_loss__slowtar": 1.0}, r"has config/imag_loss\.slowtar=1\.0, and only 0 is offered"),
        ({"value__units": 8.0}, r"but agent\.units is one setting for all of them"),
    ],
)
def test_a_setting_that_is_not_offered_is_refused(changed, sentence):
    with pytest.raises(Refused, match=sentence):
        dreamerv3.config(settings(**changed))


def test_an_unknown_array_is_mentioned(tmp_path, capsys):
    few = {key: x for key, x in load(LATEST / "blocks.npz").items() if key.startswith("dictconcat/")}
    np.savez(tmp_path / "f.npz", **few, **{"config/new": np.ones(2)})
    assert main([str(tmp_path / "f.npz")]) == 0
    assert "config/new" in capsys.readouterr().out


def test_comparisons_of_the_maximum_and_of_shares():
    recorded = np.array([0.0, 100.0])
    assert compare("x", "forward", recorded + 9e-4, recorded).passed
    assert not compare("x", "forward", recorded + 2e-3, recorded).passed
    many = np.zeros(1000)
    off = lambda count: np.where(np.arange(1000) < count, 1.0, 0.0)
    assert compare("x", "moved", off(5), many).passed
    assert not compare("x", "moved", off(6), many).passed
    assert not compare("x", "moved", np.full(1000, np.nan), many).passed
    assert not compare("x", "forward", np.full(1000, np.nan), many).passed
