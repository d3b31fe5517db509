"""Time of one update, guarded and donated as the learner runs it, and of its compilation. JSON lines.

python bench/update.py [--preset 1 5 size1m size12m] [--recipe paper] [--dtype float32] [--image]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a bare accelerator machine has no installed telamon

from bench.cases import agent, parser, window
from bench.flops import flops
from bench.timing import interleaved, report
from learner.update import init, make_update
from telamon.allocator import keep_freed_memory


def main() -> None:
    options = parser(__doc__).parse_args()
    keep_freed_memory()
    for preset in options.preset:
        subject = agent(options, preset)
        batch, key = window(subject), jax.random.key(1)
        state = init(subject, jax.random.key(0))
        update = make_update(subject)
        count = flops(update, state, batch, key, np.uint32(0))
        started = time.perf_counter()
        lowered = update.lower(state, batch, key, np.uint32(0))
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()

        def one(compiled=compiled, batch=batch, key=key):
            nonlocal state
            state, outcome = compiled(state, batch, key, np.uint32(0))
            return outcome

        times = interleaved(one, options.repetitions)
        line = report(
            "update", *times, count, preset=preset,
            batch=subject.batch_size, recipe=options.recipe, dtype=options.dtype, obs=options.obs,
            action=options.action, image=options.image, trace_s=round(traced - started, 1),
            compile_s=round(done - traced, 1),
        )  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
