"""Slots that a client and a server share: who owns one, what is refused, and what kills leave (nothing)."""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from telamon.rpc.codec import SLOT, Layout
from telamon.rpc.shared import SharedSlots, sweep
from tests.waiting import next_line

LAYOUT = Layout({"env_id": ((), np.dtype(np.int32)), "image": ((5, 3), np.dtype(np.uint8))})
SLOT_BYTES = LAYOUT.nbytes(4, SLOT)


def test_both_sides_see_the_same_memory_after_the_name_is_gone(tmp_path: Path) -> None:
    ours = SharedSlots.create(3, SLOT_BYTES, tmp_path)
    theirs = SharedSlots.attach(str(ours.path), 3, SLOT_BYTES, tmp_path)
    ours.unlink()
    assert list(tmp_path.iterdir()) == []
    for slot in range(3):
        LAYOUT.views(theirs.slot(slot), 4, SLOT)["image"][:] = slot + 1
    for slot in range(3):
        assert (LAYOUT.views(ours.slot(slot), 4, SLOT)["image"] == slot + 1).all()
    theirs.close()
    ours.slot(0)[:3] = b"abc"  # still there
    ours.close()
    with pytest.raises(ValueError, match="released"):
        ours.slot(0)


def test_the_file_is_private_and_whole(tmp_path: Path) -> None:
    ours = SharedSlots.create(2, 4096, tmp_path)
    status = ours.path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 2 * 4096 <= status.st_blocks * 512
    ours.close()


def test_arrays_in_a_slot_lie_at_multiples_of_64(tmp_path: Path) -> None:
    ours = SharedSlots.create(2, SLOT_BYTES, tmp_path)
    for slot in range(2):
        for array in LAYOUT.views(ours.slot(slot), 4, SLOT).values():
            assert array.ctypes.data % 64 == 0


def test_a_slot_is_not_handed_out_while_anything_looks_at_it(tmp_path: Path) -> None:
    ours = SharedSlots.create(2, SLOT_BYTES, tmp_path)
    slots = [ours.take(), ours.take()]
    assert sorted(slots) == [0, 1]
    assert ours.take() is None
    views = ours.views(slots[0], LAYOUT, 4)
    derived = views["image"][1:].reshape(-1).view(np.int8)
    exported = memoryview(views["env_id"])
    del views
    gc.collect()
    assert ours.take() is None
    del derived
    gc.collect()
    assert ours.take() is None
    del exported
    assert ours.take() == slots[0]
    ours.give_back(slots[1])
    with pytest.raises(ValueError, match="given back twice"):
        ours.give_back(slots[1])
    assert ours.take() == slots[1]


def test_views_outlive_the_slots(tmp_path: Path) -> None:
    ours = SharedSlots.create(1, SLOT_BYTES, tmp_path)
    ours.take()
    views = ours.views(0, LAYOUT, 4)
    views["image"][:] = 7
    ours.unlink()
    ours.close()
    del ours
    gc.collect()
    assert (views["image"] == 7).all()
    assert _mappings() == 1
    del views
    assert _mappings() == 0


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("telamon-slots-")


def test_threads_never_share_a_slot(tmp_path: Path) -> None:
    ours = SharedSlots.create(4, SLOT_BYTES, tmp_path)
    wrong = []

    def work(me: int) -> None:
        for _ in range(300):
            if (slot := ours.take()) is not None:
                views = ours.views(slot, LAYOUT, 4)
                views["env_id"][:] = me
                if (views["env_id"] != me).any():
                    wrong.append(slot)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sorted(ours.take() for _ in range(4)) == [0, 1, 2, 3]
    assert ours.take() is None


@pytest.mark.parametrize(
    ("slots", "slot_bytes"), [(0, 64), (-1, 64), (1, 0), (1, 63), (1, 100), (1, -64), (2**40, 64), (2**26 + 1, 64)]
)
def test_impossible_sizes_are_refused(slots: int, slot_bytes: int, tmp_path: Path) -> None:
    for make in (
        lambda: SharedSlots.create(slots, slot_bytes, tmp_path),
        lambda: SharedSlots.attach(f"{tmp_path}/telamon-slots-{'0' * 32}", slots, slot_bytes, tmp_path),
    ):
        with pytest.raises(ValueError, match=f"{slots} slots of {slot_bytes} bytes cannot be shared"):
            make()
    assert list(tmp_path.iterdir()) == []


def test_no_space_names_the_bytes_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"cannot give 8192 bytes for 2 slots: No space left on device"):
        SharedSlots.create(2, 4096, tmp_path)
    assert list(tmp_path.iterdir()) == []


NAME = "telamon-slots-" + "0123456789abcdef" * 2


def _plant(directory: Path, kind: str) -> str:
    """Something that is no shared memory of 64 bytes; returns the path that a hostile client offers."""
    path = directory / NAME
    if kind == "symlink":
        (directory / "secret").write_bytes(bytes(64))
        path.symlink_to(directory / "secret")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "smaller":
        path.write_bytes(bytes(63))
    elif kind == "larger":
        path.write_bytes(bytes(65))
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(64)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", "cannot be opened on this host: No such file"),
        ("symlink", "cannot be opened on this host: Too many levels of symbolic links"),
        ("directory", "cannot be opened on this host: Is a directory"),
        ("pipe", "is not a regular file"),
        ("smaller", "has 63 bytes"),
        ("larger", "has 65 bytes"),
        ("sparse", "has 64 bytes, 0 of them allocated"),
    ],
)
def test_what_is_no_shared_memory_is_refused(kind: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        SharedSlots.attach(_plant(tmp_path, kind), 1, 64, tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/dev/zero",
        "",
        "/",
        NAME,
        "{0}/../{1}/" + NAME,
        "{0}/sub/" + NAME,
        "{0}//" + NAME,
        "{0}/./" + NAME,
        "{0}/" + NAME + "\n",
        "{0}/" + NAME + "\0",
        "{0}/" + NAME[:-1] + "G",
        "{0}/" + NAME + "0",
        "{0}/other",
        "x" * 10**6,
    ],
)
def test_paths_elsewhere_are_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for good in (tmp_path / NAME, tmp_path / "sub" / NAME, tmp_path / "other"):
        good.write_bytes(b"x" * 64)
    SharedSlots.attach(str(tmp_path / NAME), 1, 64, tmp_path)
    with pytest.raises(ValueError, match="is no shared memory; its path must be") as error:
        SharedSlots.attach(path.format(tmp_path, tmp_path.name), 1, 64, tmp_path)
    assert len(str(error.value)) < 1000


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SharedSlots.create(1, 64, tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ValueError, match="is not a regular file of user"):
        SharedSlots.attach(str(ours.path), 1, 64, tmp_path)


def test_the_wire_cannot_name_a_slot_that_there_is_not(tmp_path: Path) -> None:
    ours = SharedSlots.create(2, 64, tmp_path)
    for index in (-1, 2, 2**32 - 1):
        with pytest.raises(ValueError, match=f"slot {index} is none of the 2 slots"):
            ours.slot(index)
    assert SharedSlots.attach(str(ours.path), 2, 64, tmp_path).take() is None


CHILD = """
import sys, time
from pathlib import Path
from telamon.rpc.shared import SharedSlots
slots = SharedSlots.create(2, 4096, Path(sys.argv[1]))
if sys.argv[2] == "unlink":
    slots.unlink()
print(slots.path, flush=True)
time.sleep(3600)
"""


def _child(directory: Path, then: str) -> tuple["subprocess.Popen[str]", Path]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(directory), then], stdout=subprocess.PIPE, text=True)
    return child, Path(next_line(child).strip())


def _kill(child: "subprocess.Popen[str]") -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL


def test_kills_leave_nothing(tmp_path: Path) -> None:
    mine = SharedSlots.create(1, 64, tmp_path)
    others = tmp_path / "somebody-elses"
    others.touch()
    _plant(tmp_path, "symlink")
    children = [_child(tmp_path, then) for then in ("hold", "hold", "unlink")]
    (_, held_path), (killed, killed_path), (unlinked, unlinked_path) = children
    try:
        assert held_path.exists()
        assert killed_path.exists()
        assert not unlinked_path.exists()
        attached = SharedSlots.attach(str(killed_path), 2, 4096, tmp_path)
        assert sweep(tmp_path) == 0  # all their makers live
        _kill(killed)
        _kill(unlinked)
        assert killed_path.exists()  # killed between making and unlinking
        attached.slot(1)[:] = bytes(4096)  # the server goes on with what it has mapped
        assert sweep(tmp_path) == 1
        assert not killed_path.exists()
        assert held_path.exists()
        assert mine.path.exists()
        assert others.exists()
    finally:
        for child, _ in children:
            if child.poll() is None:
                _kill(child)
    assert sweep(tmp_path) == 1
    attached.close()
    mine.close()  # without `unlink`
    assert sweep(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"somebody-elses", "secret", NAME}
    assert sweep(tmp_path / "nowhere") == 0


def test_a_sweep_between_making_and_locking_costs_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    flock, swept = fcntl.flock, []

    def late(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.append(sweep(tmp_path))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    ours = SharedSlots.create(1, 64, tmp_path)
    assert swept == [1]
    assert list(tmp_path.iterdir()) == [ours.path]
