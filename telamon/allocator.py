"""The C library's allocator, set so that a process keeps the memory that it frees.

An update frees and takes again up to 100 MB of temporaries. glibc returns blocks of that size to the kernel at once,
and the kernel hands them back page by page, each zeroed: a third of the CPU time of a small model's update.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Lets this process reuse what it frees; call it before the first computation, while no thread has an arena.

    No block is mapped on its own, the heap never shrinks, and all threads share it (a thread's own arena holds no block
    above 64 MiB). Resident memory then stays at its peak. False: not glibc, nothing was changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(name, value) for name, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)))
