"""How many cores this process may keep busy."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> int:
    """Return the cores it may run on, or fewer where a control group (a container's limit) gives less time.

    More threads than that use up a period's time at once, and then all of the process stands still, its event loop too.
    """
    return min([len(os.sched_getaffinity(0)), *_quotas(cgroups)])


def _quotas(root: Path) -> Iterator[int]:
    """Yield what limits of versions 2 and 1 allow, where there are any, in cores rounded up."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        paths = [root / file for file in files]
        if all(path.exists() for path in paths):
            quota, period = " ".join(path.read_text() for path in paths).split()
            if quota not in ("max", "-1"):
                yield math.ceil(int(quota) / int(period))
