"""Facts of the host: memory and processors that this process may really use, inside whatever cgroup it runs
in.

Torch-free. A container sees the whole machine in /proc/meminfo but is killed at its cgroup's limit, so both
are read and the smaller one counts.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # of torch, which reads it at its first allocation


@dataclass(frozen=True)
class CgroupLimit:
    """The tightest limit above this process. free_bytes counts reclaimable file cache as free."""

    total_bytes: int
    free_bytes: int
    path: str


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """(free, total) bytes that this process can still take and can have at all."""
    machine = psutil.virtual_memory()
    free, total = int(machine.available), int(machine.total)
    limit = cgroup_limit(root)
    if limit is None:
        return free, total
    return min(free, limit.free_bytes), min(total, limit.total_bytes)


def cgroup_limit(root: Path = Path("/")) -> CgroupLimit | None:
    """The tightest memory limit among this process's cgroup and its ancestors; None without one."""
    found = [limit for folder in _cgroup_folders(root, "memory") if (limit := _memory_limit(folder))]
    return min(found, key=lambda limit: limit.total_bytes, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors that the cgroup allows, for instance 1.5; None when it sets no quota."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        quota, period = _words(folder / "cpu.max"), "100000"
        if len(quota) == 2:
            quota, period = quota[:1], quota[1]
        else:
            quota = _words(folder / "cpu.cfs_quota_us")
            period = "".join(_words(folder / "cpu.cfs_period_us")) or period
        if quota and quota[0].isdigit() and int(period) > 0:
            quotas.append(int(quota[0]) / int(period))
    return min(quotas, default=None)


def ask_for_huge_pages(root: Path = Path("/")) -> None:
    """Has torch ask for pages of 2 MiB where the kernel gives them to those who ask; a user's own setting
    stands.

    Entering fresh memory in pages of 4 KiB takes longer than filling it (docs/benchmarks/load.md). Comes
    before torch's first allocation, after which it changes nothing.
    """
    if "[madvise]" in _words(root / "sys/kernel/mm/transparent_hugepage/enabled"):
        os.environ.setdefault(HUGE_PAGES, "1")


def usable_cpus() -> int:
    """Logical processors in this process's affinity mask."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Instruction-set flags as the kernel spells them ("avx512_bf16", on ARM "bf16")."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    listed = (
        line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features")) and ":" in line
    )
    return frozenset(next(listed, "").split())


def cpu_name(root: Path = Path("/")) -> str:
    """What the kernel calls the processor, else the machine type."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name") and ":" in line)
    return next(named, "") or platform.processor() or platform.machine()


def peak_bytes(*, reset: bool = False) -> int | None:
    """Highest resident memory of this process so far or since the last reset; None where none is kept."""
    if sys.platform != "linux":
        return getattr(psutil.Process().memory_info(), "peak_wset", None)
    peak = None
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            peak = int(line.split()[1]) * 1024
    if reset:
        try:
            # 5 resets VmHWM and nothing else (proc(5)).
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
    return peak


def energy_joules(root: Path = Path("/")) -> float | None:
    """What the processor packages have used since some moment, by the kernel's powercap counters.

    None where there are none, or where only root may read them. A counter starts again at zero after some
    hours at most, so a difference may come out negative.
    """
    used = [
        int(_words(zone / "energy_uj")[0])
        for zone in sorted((root / "sys/class/powercap").glob("*:*"))
        if "".join(_words(zone / "name")).startswith("package") and _words(zone / "energy_uj")
    ]
    return sum(used) / 1e6 if used else None


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """This process's cgroup folder and its ancestors, for both cgroup versions."""
    folders: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup"
        if controllers:
            mount = mount / controller
        folder = mount / path.lstrip("/")
        while folder != mount and mount in folder.parents:
            folders.append(folder)
            folder = folder.parent
        folders.append(mount)
    return folders


def _memory_limit(folder: Path) -> CgroupLimit | None:
    limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
    used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
    # Version 1 says "no limit" with a number near 2**63.
    if not limit or not limit[0].isdigit() or int(limit[0]) >= 1 << 60:
        return None
    total = int(limit[0])
    words = _words(folder / "memory.stat")
    cache = dict(zip(words[::2], words[1::2], strict=False)).get("inactive_file", "0")
    taken = max(int(used[0]) - int(cache), 0) if used else 0
    return CgroupLimit(total, max(total - taken, 0), str(folder))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []
