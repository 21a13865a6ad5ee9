"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO, cgroups: Path = _CGROUPS) -> int:
    """Return what the machine has available, or less where a control group (a container's limit) allows less."""
    return min([_available_on_machine(meminfo), *_left_in_cgroups(cgroups)])


def _available_on_machine(meminfo: Path) -> int:
    """Return free memory and what the kernel would give up. Where it does not say, all memory."""
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _left_in_cgroups(root: Path) -> list[int]:
    """Return what the limits of versions 2 and 1 leave, where there are any. File cache counts as left."""
    left = []
    for folder, limit, usage, cache in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        value = (folder / limit).read_text().strip() if (folder / limit).exists() else "max"
        if value != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(int(value) - int((folder / usage).read_text()) + int(stat.get(cache, 0)))
    return left
