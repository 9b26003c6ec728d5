"""Faults put into a backend package one at a time, each of which something must see.

A process for every fault would cost two seconds of imports each. So one process on the mocked machine takes
them in turn, with the mutated package imported anew each time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mock_vendor.process import MockedMachine, Mutation


def assert_all_seen(machine: MockedMachine, mutations: Sequence[Mutation]) -> None:
    """Each mutation makes its category of the conformance suite fail, which passes without it."""
    tried = [_try(machine.mutated(m), m.category, m.kernel) for m in mutations]
    unlike = dict.fromkeys((m.category, m.kernel) for m in mutations)
    plain = [_try(machine.home, category, kernel) for category, kernel in unlike]
    work = machine.folder / "mutants.json"
    work.write_text(json.dumps({"package": machine.package, "backend": machine.name, "tries": plain + tried}))
    done = machine.python("-m", "mock_vendor.mutants", work)
    assert done.returncode == 0, done.stderr
    failures = json.loads(done.stdout.splitlines()[-1])
    before = [f for f in failures[: len(plain)] if f]
    assert not before, f"without a mutation: {before}"
    unseen = [str(m) for m, failed in zip(mutations, failures[len(plain) :], strict=True) if not failed]
    assert not unseen, f"nothing fails with {unseen}"


def _try(source: Path, category: str, kernel: str | None) -> dict[str, str | None]:
    return {"source": str(source), "category": category, "kernel": kernel}


def _try_all(work: dict[str, object]) -> list[list[str]]:
    """For each try, the cases of the category that failed with the package from that source."""
    from portable_dit.conformance.suite import run_suite

    found = []
    for one in work["tries"]:  # type: ignore[attr-defined]
        package = str(work["package"])
        for name in [n for n in sys.modules if n.partition(".")[0] == package]:
            del sys.modules[name]
        sys.path.insert(0, one["source"])  # for this process and those that the suite starts
        report = run_suite(
            str(work["backend"]), categories=(one["category"],), kernel=one["kernel"], repeats=1
        )
        sys.path.pop(0)
        found.append([f"{o.op} {o.kernel} {o.case}: {o.detail}" for o in report.failures])
    return found


if __name__ == "__main__":
    print(json.dumps(_try_all(json.loads(Path(sys.argv[1]).read_text()))))
