"""Processes on a mocked vendor's machine, for tests to run the real commands in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_vendor.signatures import CALLS, Recorded, load

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """A fault in a backend package that must not go unseen: `old`, found once in `file`, becomes `new`.

    category: the part of the conformance suite that sees it. kernel: whose cases do, None for all.
    """

    file: str
    old: str
    new: str
    category: str
    kernel: str | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.old!r} -> {self.new!r}"


class MockedMachine:
    """A machine with a vendor's stack, as far as Python code can tell, and its backend package installed.

    folder: an empty one, for the installed package's metadata. variant: what the vendor's `install` is given,
    such as a chip. home: the folder of the backend, with its package, signatures/ and tests/mock_<name>.py.
    """

    def __init__(self, name: str, variant: str, folder: Path, *, home: Path | None = None) -> None:
        self.name = name
        self.package = f"portable_dit_{name}"
        self.home = home or ROOT / "backends" / name
        self.variant = variant
        self.folder = folder
        info = folder / f"{self.package}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: portable-dit-{name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[portable_dit.backends]\n{name} = {self.package}\n")

    def environment(self, source: Path | None = None) -> dict[str, str]:
        """source: the folder that holds the backend's package; the repository's own unless given."""
        path = [
            ROOT / "tests" / "mock_vendor" / "site",
            ROOT / "tests",
            self.home / "tests",
            source or self.home,
            self.folder,
            ROOT,
        ]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "MOCK_VENDOR": f"{self.name}:{self.variant}",
            CALLS: str(self.folder / "calls.jsonl"),
            "OMP_NUM_THREADS": "1",
        }

    def python(
        self, *arguments: str | Path, source: Path | None = None, timeout: int = 1800
    ) -> subprocess.CompletedProcess[str]:
        """`python ARGUMENTS` on this machine."""
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=self.environment(source),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def command(self, *arguments: str | Path, source: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`portable-dit ARGUMENTS` on this machine."""
        return self.python("-m", "portable_dit", *arguments, source=source)

    def mutated(self, mutation: Mutation) -> Path:
        """A copy of the package with the fault in it, to give as `source`."""
        copy = self.folder / f"mutant-{len(list(self.folder.iterdir()))}"
        shutil.copytree(self.home / self.package, copy / self.package)
        file = copy / self.package / mutation.file
        text = file.read_text()
        assert text.count(mutation.old) == 1, f"{mutation}: found {text.count(mutation.old)} times"
        file.write_text(text.replace(mutation.old, mutation.new))
        return copy

    def unbound_calls(self) -> list[str]:
        """Vendor calls on this machine so far that some recorded version of the function refuses."""
        records: Sequence[Recorded] = load(self.home / "signatures")
        calls = {tuple(map(_frozen, json.loads(line))) for line in self._call_lines()}
        return sorted(
            reason
            for name, positional, keywords in calls
            for record in records
            if name in {**record.functions, **record.operators}
            if (reason := record.binds(name, positional, keywords)) is not None
        )

    def called(self) -> set[str]:
        """Names of the vendor functions that were called on this machine so far."""
        return {json.loads(line)[0] for line in self._call_lines()}

    def _call_lines(self) -> list[str]:
        file = self.folder / "calls.jsonl"
        return file.read_text().splitlines() if file.exists() else []


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
