"""Checkpoints on disk: what comes back, what is refused, and what a kill or a full disk leaves."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from learner import checkpoint


class Tree(NamedTuple):
    params: dict
    count: jax.Array


def tree(seed: int = 0) -> Tree:
    a, b = jax.random.split(jax.random.key(seed))
    params = {
        "w": jax.random.normal(a, (3, 5)),
        "half": jax.random.normal(b, (4,)).astype(jnp.bfloat16),
        "edge": jnp.array([jnp.nan, jnp.inf, -0.0, 1e-45]),
    }
    return Tree(params, jnp.int32(seed))


ARRAYS = {"tick": np.int64(7), "env/0/physics": np.linspace(0, 1, 7), "flags": np.array([True, False])}
META = {"counters": {"rows": 12}, "metrics_length": 345, "config": {"lr": 3e-4}}


def save(directory: Path, name: str, seed: int = 0) -> Path:
    return checkpoint.save(directory, name, tree(seed), {**ARRAYS, "seed": np.array(seed)}, META)


def load(directory: Path, name: str) -> checkpoint.Checkpoint:
    return checkpoint.load(directory, name, jax.eval_shape(tree))


def test_everything_comes_back_bit_for_bit(tmp_path):
    path = save(tmp_path / "checkpoints", "0001", seed=3)
    assert path == tmp_path / "checkpoints" / "0001"
    found = load(tmp_path / "checkpoints", "0001")
    assert isinstance(found.state, Tree)
    for ours, theirs in zip(jax.tree.leaves(found.state), jax.tree.leaves(tree(3)), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert found.arrays.keys() == {*ARRAYS, "seed"}
    for key, value in ARRAYS.items():
        assert found.arrays[key].dtype == value.dtype
        np.testing.assert_array_equal(found.arrays[key], value)
    assert {k: found.meta[k] for k in META} == META


def test_nothing_is_pickled(tmp_path):
    save(tmp_path, "0001")
    with np.load(tmp_path / "0001" / "loop.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays)


def test_names_are_newest_first_and_whole(tmp_path):
    assert checkpoint.names(tmp_path / "none") == []
    for name in ("0003", "0001", "0002"):
        save(tmp_path, name)
    (tmp_path / f"{checkpoint.TEMPORARY}0004").mkdir()
    (tmp_path / "README").write_text("not ours")
    (tmp_path / "best").mkdir()  # a copy that a user keeps
    (tmp_path / "0003 copy").mkdir()
    assert checkpoint.names(tmp_path) == ["0003", "0002", "0001"]
    checkpoint.remove(tmp_path, "0002")
    assert checkpoint.names(tmp_path) == ["0003", "0001"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".partial-0004",
        "0001",
        "0003",
        "0003 copy",
        "README",
        "best",
    ]


def test_a_save_replaces_and_clears_away(tmp_path):
    save(tmp_path, "0001", seed=1)
    (tmp_path / f"{checkpoint.TEMPORARY}0007").mkdir()
    (tmp_path / f"{checkpoint.TEMPORARY}0007" / "loop.npz").write_bytes(b"half a fi")
    save(tmp_path, "0001", seed=2)
    assert [p.name for p in tmp_path.iterdir()] == ["0001"]
    assert load(tmp_path, "0001").arrays["seed"] == 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=["truncate", "flip", "remove"])
def test_a_damaged_file_is_named(tmp_path, damage):
    save(tmp_path, "0001")
    files = [p for p in sorted((tmp_path / "0001").rglob("*")) if p.is_file() and p.name != "meta.json"]
    assert len(files) > 3
    for file in files:
        if file.stat().st_size == 0 and damage is not Path.unlink:
            continue
        content = file.read_bytes()
        damage(file)
        with pytest.raises(ValueError) as caught:
            load(tmp_path, "0001")
        assert str(caught.value) == f"{file} is missing or damaged: its checksum does not match meta.json"
        file.write_bytes(content)
    load(tmp_path, "0001")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing or damaged: .*No such file"),
        (b"", "is missing or damaged: Expecting value"),
        (b'{"counters": {"ro', "is missing or damaged: Unterminated string"),
        (b"\xff\xfe", "is missing or damaged: .*codec can't decode"),
        (b"[]", "is damaged: it lists no checksums"),
        (b"{}", "is damaged: it lists no checksums"),
    ],
)
def test_a_damaged_meta_file_is_named(tmp_path, content, message):
    path = save(tmp_path, "0001") / "meta.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"0001/meta\.json {message}"):
        load(tmp_path, "0001")


class Killed(BaseException):
    pass


CHANGES = [
    (ocp.StandardCheckpointer, "save"),
    (np, "savez"),
    (Path, "write_text"),
    (Path, "rename"),
    (shutil, "rmtree"),
]
"""What changes anything on disk; Orbax's own steps happen in a directory that has no name yet."""


@pytest.mark.parametrize("name", ["0001", "0002"], ids=["over the old one", "beside the old one"])
def test_killed_at_every_step(monkeypatch, tmp_path, name):
    deaths = 0
    while True:
        directory = tmp_path / str(deaths)
        save(directory, "0001", seed=1)
        with monkeypatch.context() as patch:
            left = iter(range(deaths))

            def dying(function):
                def run(*args, **kwargs):
                    if next(left, None) is None:  # noqa: B023  # called in this round of the loop
                        raise Killed
                    return function(*args, **kwargs)

                return run

            for owner, attribute in CHANGES:
                patch.setattr(owner, attribute, dying(getattr(owner, attribute)))
            try:
                save(directory, name, seed=2)
                break
            except Killed:
                deaths += 1
        for found in checkpoint.names(directory):
            seed = int(load(directory, found).arrays["seed"])
            assert seed == 1 or found == name
        # what was there is still there, unless it is just being replaced
        assert "0001" in checkpoint.names(directory) or (name == "0001" and deaths > 4)
        save(directory, "0003", seed=3)
        assert not list(directory.glob(f"{checkpoint.TEMPORARY}*"))
    assert deaths == (6 if name == "0001" else 4)
    assert int(load(directory, name).arrays["seed"]) == 2


def test_a_full_disk_is_named_and_harms_nothing(monkeypatch, tmp_path):
    save(tmp_path, "0001", seed=1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(OSError, match=r"checkpoint .*/0002 could not be written after \d+ bytes: No space left"):
            save(tmp_path, "0002", seed=2)
    assert checkpoint.names(tmp_path) == ["0001"]
    assert load(tmp_path, "0001").arrays["seed"] == 1
    save(tmp_path, "0002", seed=2)
    assert load(tmp_path, "0002").arrays["seed"] == 2


def test_everything_is_on_disk_before_it_has_its_name(monkeypatch, tmp_path):
    synced: set[tuple[int, int]] = set()
    sync, rename = os.fsync, Path.rename

    def noted(descriptor):
        status = os.fstat(descriptor)
        synced.add((status.st_dev, status.st_ino))
        sync(descriptor)

    def checked(self, target):
        if self.name.startswith(checkpoint.TEMPORARY) and Path(target).name == "0001":
            for path in (self, *self.rglob("*")):
                status = path.stat()
                assert (status.st_dev, status.st_ino) in synced, path
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", checked)
    save(tmp_path, "0001")
    status = tmp_path.stat()
    assert (status.st_dev, status.st_ino) in synced


# written while training goes on

LONG = 120
"""Seconds after which a test that waits has failed."""


class Gate:
    """Stands before the disk."""

    def __init__(self, monkeypatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        write = np.savez

        def savez(*args, **kwargs):
            self.reached.set()
            assert self.opened.wait(LONG)
            write(*args, **kwargs)

        monkeypatch.setattr(np, "savez", savez)


@pytest.fixture
def saver():
    saver = checkpoint.Saver()
    yield saver
    saver.close()


def test_training_goes_on_while_the_disk_blocks(monkeypatch, tmp_path, saver):
    gate = Gate(monkeypatch)
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    state = jax.device_put(tree(3))
    assert saver.idle
    saver.save(tmp_path, "0001", state, ARRAYS, META)
    assert gate.reached.wait(LONG)
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    assert not saver.idle
    assert checkpoint.names(tmp_path) == []
    gate.opened.set()
    saver.wait()
    assert saver.idle
    found = load(tmp_path, "0001").state
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(tree(3)), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()  # what it was, not what became of it


def test_a_save_waits_for_the_one_before(monkeypatch, tmp_path, saver):
    gate = Gate(monkeypatch)
    saver.save(tmp_path, "0001", tree(1), ARRAYS, META)
    second = threading.Thread(target=saver.save, args=(tmp_path, "0002", tree(2), ARRAYS, META))
    second.start()
    assert gate.reached.wait(LONG)
    assert second.is_alive()
    gate.opened.set()
    second.join(LONG)
    saver.wait()
    assert checkpoint.names(tmp_path) == ["0002", "0001"]
    assert [int(load(tmp_path, name).state.count) for name in ("0001", "0002")] == [1, 2]


def test_what_was_written_is_counted_from_the_wish_to_the_whole_checkpoint(monkeypatch, tmp_path):
    now = [100.0]
    saver = checkpoint.Saver(clock=lambda: now[0])
    assert saver.saved == checkpoint.Saved(0, 0.0, None)
    gate = Gate(monkeypatch)
    saver.save(tmp_path, "0001", tree(1), ARRAYS, META)
    assert gate.reached.wait(LONG)
    assert saver.saved.checkpoints == 0
    now[0] = 103.0
    gate.opened.set()
    saver.wait()
    assert saver.saved == checkpoint.Saved(1, 3.0, 103.0)
    now[0] = 110.0
    saver.save(tmp_path, "0002", tree(2), ARRAYS, META)
    saver.close()
    assert saver.saved == checkpoint.Saved(2, 3.0, 110.0)


@pytest.mark.parametrize("again", ["save", "wait"])
def test_an_error_arrives_with_the_next_call_and_once(monkeypatch, tmp_path, saver, again):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        saver.save(tmp_path, "0001", tree(1), ARRAYS, META)
        with pytest.raises(OSError, match=r"0001 could not be written .*: No space left"):
            saver.wait() if again == "wait" else saver.save(tmp_path, "0002", tree(2), ARRAYS, META)
    assert saver.saved.checkpoints == 0
    saver.save(tmp_path, "0003", tree(3), ARRAYS, META)
    saver.wait()
    assert checkpoint.names(tmp_path) == ["0003"]


def test_an_error_at_the_end_is_logged(monkeypatch, tmp_path, caplog):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    saver = checkpoint.Saver()
    saver.save(tmp_path, "0001", tree(1), ARRAYS, META)
    saver.close()
    assert "event=checkpoint_failed" in caplog.text
    assert "No space left" in caplog.text


def test_what_is_saved_is_what_the_arrays_were(monkeypatch, tmp_path, saver):
    gate = Gate(monkeypatch)
    meta = {"counters": {"rows": 1}}
    saver.save(tmp_path, "0001", tree(), {"a": np.array(1)}, meta)
    meta["counters"] = {"rows": 2}
    gate.opened.set()
    saver.wait()
    assert load(tmp_path, "0001").meta["counters"] == {"rows": 1}


DYING = """
import os, signal, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from learner import checkpoint
saver, directory = checkpoint.Saver(), Path(sys.argv[1])
saver.save(directory, "0001", {"x": jnp.ones(3)}, {}, {})
saver.wait()
np.savez = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
saver.save(directory, "0002", {"x": jnp.zeros(3)}, {}, {})
saver.wait()
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_leaves_the_one_before(tmp_path):
    done = subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], timeout=LONG, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / f"{checkpoint.TEMPORARY}0002" / "state").is_dir()
    assert checkpoint.names(tmp_path) == ["0001"]
    like = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    np.testing.assert_array_equal(checkpoint.load(tmp_path, "0001", like).state["x"], np.ones(3))
    checkpoint.save(tmp_path, "0003", {"x": jnp.ones(3)}, {}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0001", "0003"]
