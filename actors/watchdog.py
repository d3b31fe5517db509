"""Stops a process whose environment hangs, and says which one."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from telamon.envs.base import BatchedEnv

log = logging.getLogger(__name__)

EXIT_CODE = 70


@contextmanager
def watch(env: BatchedEnv, timeout: float, stop: Callable[[int], None] = os._exit) -> Iterator[None]:
    """While the block runs, calls `stop(70)` once one environment has kept `env.step` busy for `timeout` seconds.

    A hanging environment holds the main thread, often in C, where no exception reaches it: only the process can end.
    The run's last checkpoint stays. `env.active` names the environment that is being stepped; one that has none
    (a batch that steps as a whole) is not watched.
    """
    done = threading.Event()

    def look() -> None:
        seen: tuple[int | None, int] = (None, -1)
        while not done.wait(timeout):
            now = getattr(env, "active", None), getattr(env, "ticks", 0)
            if now[0] is not None and now == seen:
                text = f"environment {now[0]} ({env.spec.id}) has not returned for {timeout:g} s; the bound is env.timeout"
                log.error("event=env_hangs env=%d id=%s seconds=%g", now[0], env.spec.id, timeout)
                print(text, file=sys.stderr, flush=True)
                stop(EXIT_CODE)
                return
            seen = now

    thread = threading.Thread(target=look, name="env-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
