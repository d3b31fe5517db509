"""The `telamon` command: finds the sub-command, turns expected failures into one sentence."""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module

from telamon.allocator import keep_freed_memory

SUMMARIES = {
    "train": "Train an agent on one machine, in one process: telamon train ALGORITHM ENV [options]",
    "launch": "Train the same way on a cluster, one machine included: telamon launch ALGORITHM ENV [options]",
    "scale": "Change the number of rollout workers of a running launch: telamon scale RUN --actors N",
    "status": "Show how a run stands, who runs where and what each waits for: telamon status RUN",
    "eval": "Evaluate the newest checkpoint of a run, with a video on request: telamon eval RUN",
    "plot": "Draw the learning curves of runs, over published ones on request: telamon plot RUN...",
    "view": "Show runs on a page for the browser, live, or as one file: telamon view RUN...",
    "envs": "List the environments that can be trained on here",
    "check-env": "Say what an agent would see of an environment, or why it cannot work: telamon check-env ENV",
    "replay": "Serve a replay to actors and learners over gRPC: telamon replay --directory DIR",
    "doctor": "Check this machine: Python, devices, libraries, rendering, disk",
}
"""Sub-command -> summary. Its function has the same name in `deploy.commands`, loaded only when it is wanted."""


def main() -> None:
    """Exits with the command's code; 1 after a failure that a sentence explains, 2 after wrong usage."""
    # a library that finds no handler at all would set up a second, louder log on the terminal
    logging.getLogger().addHandler(logging.NullHandler())
    args = sys.argv[1:]
    if not args or args[0] in ("-h", "--help"):
        rows = "\n".join(f"  {name:<10} {text}" for name, text in SUMMARIES.items())
        print(f"usage: telamon COMMAND ... (telamon COMMAND --help says more)\n\n{rows}")
        sys.exit(0 if args else 2)
    name, rest = args[0], args[1:]
    if name not in SUMMARIES:
        print(f"telamon: {name!r} is none of {', '.join(SUMMARIES)}", file=sys.stderr)
        sys.exit(2)
    keep_freed_memory()
    try:
        sys.exit(getattr(import_module("deploy.commands"), name.replace("-", "_"))(rest))
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get("TELAMON_TRACEBACK"):
            raise
        text = str(error)
        if isinstance(error, OSError) and error.strerror:  # its text begins with its number, which helps nobody
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(f"telamon: {text}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # a second Ctrl-C, or one outside of training
        print("telamon: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
