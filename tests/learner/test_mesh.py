"""Shardings, and that an update over many devices is the update of one. What needs many devices runs in other
processes (devices.py)."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from learner import checkpoint, mesh, update
from telamon.data import Window
from tests.learner.devices import AGENTS, UPDATES, numbers

SCRIPT = Path(__file__).with_name("devices.py")
LONG = 1200
"""Seconds after which processes that compile on a busy machine have failed."""


# devices


def test_what_a_device_holds_follows_its_arrays():
    name = str(jax.devices()[0])
    gc.collect()  # what other tests have left
    before = mesh.device_bytes()[name]["live"]
    array = jnp.zeros((4096, 4096), jnp.float32).block_until_ready()
    little = 1 << 20  # for what threads of other tests may still do
    assert mesh.device_bytes()[name]["live"] == pytest.approx(before + array.nbytes, abs=little)
    array.delete()
    assert mesh.device_bytes()[name]["live"] == pytest.approx(before, abs=little)


class Card:
    """A device that tells of its memory."""

    def __init__(self, told: dict[str, int] | None) -> None:
        self.told = told

    def memory_stats(self) -> dict[str, int] | None:
        return self.told

    def __str__(self) -> str:
        return "cuda:0"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"bytes_in_use": 5, "bytes_limit": 9, "num_allocs": 3}, {"live": 0, "in_use": 5, "limit": 9}),
        ({"bytes_in_use": 5}, {"live": 0, "in_use": 5}),
        (None, {"live": 0}),
    ],
)
def test_what_a_device_tells_is_passed_on(monkeypatch, told, expected):
    monkeypatch.setattr(jax, "local_devices", lambda: [Card(told)])
    assert mesh.device_bytes() == {"cuda:0": expected}


# shardings


@pytest.mark.parametrize(
    ("shape", "fsdp", "expected"),
    [
        ((128, 256), 4, (None, "fsdp")),  # the largest axis
        ((256, 256), 4, (None, "fsdp")),  # the last of equals
        ((5, 256, 255), 8, (None, "fsdp")),  # 255 does not divide
        ((131, 257, 3), 4, ()),  # none does
        ((128, 127), 4, ()),  # one element row too small
        ((128, 128), 4, (None, "fsdp")),  # just large enough
        ((128, 256), 1, ()),  # data parallel
        ((), 8, ()),
    ],
)
def test_where_an_array_is_cut(shape, fsdp, expected):
    assert mesh.partition(shape, 4, fsdp) == PartitionSpec(*expected)


def test_a_tree_is_cut_leaf_by_leaf():
    tree = {"large": jax.ShapeDtypeStruct((64, 512), jnp.float32), "small": jax.ShapeDtypeStruct((8,), jnp.float32)}
    placed = mesh.shardings(tree, AbstractMesh((2, 4), mesh.AXES))
    assert placed["large"].spec == PartitionSpec(None, "fsdp")
    assert placed["small"].spec == PartitionSpec()
    assert placed["large"].shard_shape((64, 512)) == (64, 128)


@pytest.mark.parametrize("fsdp", [0, -1, 4, 12])
def test_devices_that_do_not_divide_are_refused(fsdp):
    with pytest.raises(ValueError, match=rf"mesh.fsdp={fsdp} does not divide 6 devices; it may be 1, 2, 3, 6$"):
        mesh.make_mesh([None] * 6, fsdp)


@pytest.mark.parametrize(("size", "nearest"), [(100, "96 or 104"), (17, "16 or 24"), (5, "8"), (0, None), (64, None)])
def test_a_batch_that_does_not_divide_is_refused(size, nearest):
    devices = AbstractMesh((4, 2), mesh.AXES)
    if nearest is None:
        mesh.check_batch(size, devices)
        return
    message = f"agent.batch_size={size} cannot be split evenly over 8 devices; the nearest sizes that can are {nearest}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mesh.check_batch(size, devices)


def test_windows_go_to_the_devices_and_rows_come_back():
    one = mesh.make_mesh(jax.devices(), 1)
    flags = np.zeros((4, 3), bool)
    window = Window(
        env_id=np.arange(4, dtype=np.int32), first_row=np.arange(4), obs={"x": np.ones((4, 3, 2), np.float32)},
        reward=np.ones((4, 3), np.float32), is_first=flags, is_last=flags, is_terminal=flags,
        action=np.ones((4, 3, 1), np.float32), latents={"d": np.full((4, 1), 1.5, jnp.bfloat16)}, incarnation=7,
    )  # fmt: skip
    placed = mesh.place(window, one)
    assert placed.incarnation == 7
    assert placed.reward.sharding == mesh.split(one)
    assert placed.latents["d"].dtype == jnp.bfloat16
    back = mesh.local(placed)
    assert isinstance(back.reward, np.ndarray)
    np.testing.assert_array_equal(back.env_id, window.env_id)
    np.testing.assert_array_equal(back.latents["d"], window.latents["d"])


# one device and many


class Found(NamedTuple):
    numbers: Mapping[str, np.ndarray]
    facts: Mapping[str, object]


def command(out: Path, agent: str, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), str(out), agent, *arguments]


def environment(devices: int) -> dict[str, str]:
    flags = (
        f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false "
        "--xla_backend_optimization_level=0"  # compiled fast rather than to fast code
    )
    root = str(SCRIPT.parents[2])
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": root}


def read(out: Path, agent: str, plan: str, rank: int = 0) -> Found:
    file = out / f"{agent}-{plan.replace(':', '-')}-{rank}"
    with np.load(f"{file}.npz", allow_pickle=False) as arrays:
        return Found(dict(arrays), json.loads(Path(f"{file}.json").read_text()))


PLANS = ("8:1", "8:4", "8:8")


@pytest.fixture(scope="module", params=AGENTS)
def agent(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(agent, tmp_path_factory) -> dict[str, Found]:
    """By plan; `0` is the program of local mode."""
    out = tmp_path_factory.mktemp("devices")
    subprocess.run(command(out, agent, "0", *PLANS), env=environment(8), timeout=LONG, check=True)
    return {plan: read(out, agent, plan) for plan in ("0", *PLANS)}


def tolerance(name: str) -> float:
    """Of the array's largest number. Seen: 7e-7 in metrics, 2e-6 in states, 2e-5 in DreamerV3's momentum, whose steps
    are quotients of gradients by their roots of squares."""
    return 5e-4 if "/optim/2/ema/" in name else 2e-5


def distance(name: str, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """Largest difference, in units of the largest number."""
    largest = np.max(np.abs(theirs[name]), initial=0)
    return float(np.max(np.abs(ours[name] - theirs[name]), initial=0) / max(largest, 1e-30))


def agree(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    off = {name: distance(name, ours, theirs) for name in ours}
    assert {name: d for name, d in off.items() if not d <= tolerance(name)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_many_devices_make_the_updates_of_one(found, plan):
    agree(found[plan].numbers, found["0"].numbers)


@pytest.mark.slow
def test_devices_by_themselves_would_be_told_apart(found, agent):
    whole, parts = found["0"].numbers, found["0"].facts["apart"]
    names = {
        "tdmpc2": ("metrics/grad_norm", "metrics/pi_grad_norm", "metrics/pi_scale", "normaliser/"),
        "dreamerv3": ("metrics/grad_norm", "normaliser/low", "normaliser/high"),
    }[agent]
    for name in names:
        expected = whole[f"0/{name}"]
        assert abs(parts[name] - expected) > 20 * tolerance(name) * abs(expected), name


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_states_are_given_away_and_nothing_is_compiled_twice(found, plan):
    assert found[plan].facts["given_away"]
    assert found[plan].facts["compiled"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "fsdp"), [("8:1", 1), ("8:4", 4), ("8:8", 8)])
def test_large_arrays_are_cut_and_no_others(found, plan, fsdp):
    facts = found[plan].facts
    assert facts["cut"].keys() == ({"1", str(fsdp)} if fsdp > 1 else {"1"})
    assert facts["cut_share"] > 0.9 if fsdp > 1 else facts["cut_share"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_devices_exchange_gradients_and_parameters_once_and_no_batch(found, plan):
    facts = found[plan].facts
    exchanged = facts["exchanged"]
    assert not [e for e in exchanged if e["loop"]]
    total = lambda *kinds: sum(e["bytes"] for e in exchanged if e["kind"] in kinds)
    # every gradient once, or twice where two losses reach the same parameters
    assert facts["parameters"] <= total("all-reduce", "reduce-scatter") < 1.6 * facts["parameters"]
    if plan == "8:1":
        # the values whose percentiles are taken
        assert total("all-gather") < 0.001 * facts["parameters"]
        assert total("all-to-all", "collective-permute") == 0
    else:
        # what networks read, and rows that change devices where a cut kernel's parts were multiplied apart
        assert total("all-gather") < 1.5 * facts["read"]
        assert total("all-to-all", "collective-permute") < 0.5 * facts["read"]


@pytest.mark.slow
def test_one_bad_window_is_skipped_everywhere(found, agent):
    facts = found[PLANS[-1]].facts
    first = {"tdmpc2": "reward_loss", "dreamerv3": "rew_loss"}[agent]
    assert facts["bad"] == {"unchanged": True, "skipped": 1, "streak": 1, "first": first}
    assert facts["good"] == {"skipped": 1, "streak": 0}


@pytest.mark.slow
def test_a_snapshot_is_whole_and_outlives_its_state(found):
    assert found[PLANS[-1]].facts["snapshot"] is True


@pytest.mark.slow
def test_checkpoints_are_read_by_any_number_of_devices(found):
    for writer in ("0", *PLANS):
        assert [reader for reader in ("0", *PLANS) if not found[writer].facts[f"read by {reader}"]] == []


# two processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_processes_make_the_updates_of_one(found, agent, tmp_path):
    """Four devices each; the second one comes to most turns without a batch."""
    address = f"127.0.0.1:{free_port()}"
    parts = [
        subprocess.Popen(command(tmp_path, agent, "8:8", "--group", address, str(rank), "2"), env=environment(4))
        for rank in range(2)
    ]
    try:
        assert [p.wait(LONG) for p in parts] == [0, 0]
    finally:
        for p in parts:
            p.kill()
            p.wait()
    first, second = (read(tmp_path, agent, "8:8", rank) for rank in range(2))
    joined = {
        name: np.concatenate([value, second.numbers[name]]) if "/write_back/" in name else value
        for name, value in first.numbers.items()
    }
    agree(joined, found["0"].numbers)
    agree({**second.numbers, **{k: v for k, v in joined.items() if "/write_back/" in k}}, found["0"].numbers)
    # neither made an update before both could
    assert first.facts["waits"] == second.facts["waits"] == 2 * UPDATES
    assert first.facts["compiled"] == second.facts["compiled"] == 1
    # their common checkpoint, in this process, which has one device
    assert first.facts["read by 8:8"] is second.facts["read by 8:8"] is True
    like = jax.eval_shape(lambda key: update.fresh(AGENTS[agent], key), jax.random.key(0))
    state = checkpoint.load(tmp_path / f"checkpoints-{agent}", "0001", like).state
    for name, value in numbers(state).items():
        np.testing.assert_array_equal(value, first.numbers[f"state/{name}"])
