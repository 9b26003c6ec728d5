"""Host facts read from a file tree as the kernel lays it out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from portable_dit import host

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_limit_of_all_ancestors_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/outer/memory.current": f"{GIB}\n",
            "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
        },
    )
    limit = host.cgroup_limit(root)
    assert limit is not None
    assert limit.total_bytes == 2 * GIB
    assert limit.free_bytes == 2 * GIB - (GIB - GIB // 4)
    assert host.memory(root) == (limit.free_bytes, limit.total_bytes)
    assert host.cpu_quota(root) == 1.5


def test_version_one_limits_are_read_and_its_huge_number_means_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/x\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
    }
    root = write(tmp_path, files)
    assert host.memory(root) == (GIB // 2, GIB)
    assert host.cpu_quota(root) == 0.5


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    assert host.cgroup_limit(root) is None
    assert host.cpu_quota(root) is None
    free, total = host.memory(root)
    assert 0 < free <= total


def test_processor_name_and_flags_come_from_cpuinfo(tmp_path: Path) -> None:
    x86 = write(tmp_path / "a", {"proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: fpu avx512_bf16\n"})
    arm = write(tmp_path / "b", {"proc/cpuinfo": "processor : 0\nFeatures : asimd bf16 i8mm\n"})
    assert host.cpu_name(x86) == "Some CPU"
    assert host.cpu_flags(x86) == {"fpu", "avx512_bf16"}
    assert host.cpu_flags(arm) == {"asimd", "bf16", "i8mm"}
    assert host.cpu_flags(tmp_path / "nothing") == frozenset()


@pytest.mark.parametrize(
    ("modes", "own", "expected"),
    [
        ("always [madvise] never\n", None, "1"),
        ("always [madvise] never\n", "0", "0"),
        ("[always] madvise never\n", None, None),
        ("always madvise [never]\n", None, None),
        (None, None, None),
    ],
)
def test_huge_pages_are_asked_for_where_asking_helps(tmp_path, monkeypatch, modes, own, expected) -> None:
    if modes is not None:
        write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": modes})
    monkeypatch.setenv(host.HUGE_PAGES, own) if own else monkeypatch.delenv(host.HUGE_PAGES, raising=False)
    host.ask_for_huge_pages(tmp_path)
    assert os.environ.get(host.HUGE_PAGES) == expected
    monkeypatch.delenv(host.HUGE_PAGES, raising=False)
