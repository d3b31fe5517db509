"""Stops a process whose environment hangs, and says which one."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from telamon.envs.base import BatchedEnv

log = logging.getLogger(__name__)

EXIT_CODE = 70

LOOKS = 10
"""Looks at the environment per time-out: the process ends at most a tenth of it late."""
LONGEST = 10.0
"""Seconds between two looks at most."""


@contextmanager
def watch(env: BatchedEnv, timeout: float, stop: Callable[[int], None] = os._exit) -> Iterator[None]:
    """While the block runs, calls `stop(70)` once one environment has kept a tick of `env` busy for `timeout` seconds.

    A hanging environment holds the main thread, often in C, where no exception reaches it: only the process can end.
    The run's last checkpoint stays. `env.active` names the environment that is being stepped; one that has none
    (a batch that steps as a whole) is not watched.
    """
    done = threading.Event()

    def look() -> None:
        seen, since = (env.active, env.ticks), time.monotonic()
        while not done.wait(min(timeout / LOOKS, LONGEST)):
            now = env.active, env.ticks
            if now[0] is None or now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= timeout:
                # the sentence goes to stderr by itself, where a warning would repeat it
                log.info("event=env_hangs env=%d id=%s seconds=%g", now[0], env.spec.id, timeout)
                sys.stderr.write(
                    f"telamon: environment {now[0]} ({env.spec.id}) has not returned for {timeout:g} s; "
                    "the bound is env.timeout\n"
                )
                sys.stderr.flush()
                stop(EXIT_CODE)
                return

    thread = threading.Thread(target=look, name="env-watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
