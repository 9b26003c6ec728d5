"""Checks and measures the backend on the device that is here, in one go.

    python3 backends/cuda/tests/on_device.py [--only SECTION ...] [--rows 4416 16800] [--out FOLDER]

Needs torch for CUDA and the package's own dependencies; not pytest, and nothing installed: the two packages
are taken from the tree. Results go to FOLDER/on_device.json ($OUT by default), and a short table is printed
last. A section that breaks is reported and the next one runs. Exit status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE), str(HERE.parent), str(ROOT), str(ROOT / "docs" / "benchmarks")]


@dataclass(frozen=True)
class Row:
    """One line of the report. ok: None for a measurement, which is neither right nor wrong."""

    section: str
    name: str
    ok: bool | None
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """What was found so far."""

    rows: list[Row] = field(default_factory=list)
    section: str = ""

    def check(self, name: str, ok: bool, text: str = "", **numbers: Any) -> None:
        self._add(Row(self.section, name, bool(ok), text, numbers))

    def measured(self, name: str, text: str, **numbers: Any) -> None:
        self._add(Row(self.section, name, None, text, numbers))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        mark = {True: "ok  ", False: "FAIL", None: "    "}[row.ok]
        print(f"{mark} {row.section:12} {row.name:44} {row.text}", flush=True)


def sections(rows: list[int]) -> dict[str, Callable[[Report], None]]:
    import device_bench as bench
    import device_checks as checks
    import device_collectives
    import device_pictures as pictures
    import device_quality as quality

    return {
        "identity": checks.identity,
        "conformance": checks.conformance,
        "bits": checks.bits,
        "graphs": checks.graphs,
        "transfer": checks.transfer,
        "limits": checks.limits,
        "collectives": lambda report: device_collectives.collectives(report, rows),
        "attention": lambda report: bench.attention(report, rows),
        "products": lambda report: bench.products(report, rows),
        "mixtures": bench.mixtures,
        "fusions": lambda report: bench.fused_seams(report, rows),
        "blocks": lambda report: bench.blocks(report, rows),
        "offload": bench.layerwise,
        "branches": quality.branches,
        "builtin": quality.pictures,
        "meaning": quality.meaning,
        "pictures": pictures.pictures,
        "diffusers": pictures.diffusers,
        "capped": pictures.capped,
        "by_block": quality.by_block,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Checks and measures the backend on the device that is here."
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION")
    parser.add_argument("--rows", nargs="+", type=int, default=[4416, 16800])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args()
    report = Report()
    known = sections(options.rows)
    unknown = set(options.only) - set(known)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name, run in known.items():
        if options.only and name not in options.only:
            continue
        report.section = name
        start = time.perf_counter()
        try:
            run(report)
        except Exception as error:  # noqa: BLE001 - one broken section must not cost the others their device time
            traceback.print_exc()
            report.check("section", False, f"{type(error).__name__}: {error}".splitlines()[0])
        report.measured("section time", f"{time.perf_counter() - start:.1f} s")
    write(report, options.out)
    return print_table(report)


def write(report: Report, folder: Path) -> None:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": device}
    folder.mkdir(parents=True, exist_ok=True)
    data = {**facts, "rows": [asdict(row) for row in report.rows]}
    (folder / "on_device.json").write_text(json.dumps(data, indent=1, default=str))


def print_table(report: Report) -> int:
    """Measurements, then failures, then one line; the exit status."""
    checked = [row for row in report.rows if row.ok is not None]
    failed = [row for row in checked if not row.ok]
    print("\n--- measured")
    for row in report.rows:
        if row.ok is None and row.name != "section time":
            print(f"{row.section:10} {row.name:40} {row.text}")
    print("--- failed" if failed else "--- nothing failed")
    for row in failed:
        print(f"{row.section:10} {row.name:40} {row.text}")
    print(f"{len(checked) - len(failed)} of {len(checked)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
