"""A report as JSON, as JUnit for CI, and as a table to publish."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.etree import ElementTree

from portable_dit.conformance.outcome import Outcome, worst
from portable_dit.conformance.suite import Report, as_dict


def as_json(report: Report) -> str:
    """The whole report, outcomes by category."""
    return json.dumps(as_dict(report), indent=1)


def as_junit(report: Report) -> str:
    """JUnit XML: a test suite for each category, a test case for each outcome; not claimed is skipped."""
    root = ElementTree.Element("testsuites", name=f"portable-dit conformance {report.backend}")
    for category, outcomes in report.outcomes.items():
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=f"{report.backend}.{category}",
            tests=str(len(outcomes)),
            failures=str(sum(o.status == "fail" for o in outcomes)),
            skipped=str(sum(o.status == "not_claimed" for o in outcomes)),
            time=f"{report.seconds[category]:.2f}",
        )
        for outcome in outcomes:
            name = " ".join(part for part in (outcome.case, outcome.dtype) if part)
            place = f"{report.backend}.{category}.{outcome.op}.{outcome.kernel}"
            case = ElementTree.SubElement(suite, "testcase", classname=place, name=name)
            if outcome.status == "fail":
                ElementTree.SubElement(case, "failure", message=outcome.detail)
            elif outcome.status == "not_claimed":
                ElementTree.SubElement(case, "skipped", message=outcome.detail)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def as_table(report: Report) -> str:
    """Markdown to publish: what was tried, what came out, and each kernel at its worst case."""
    device = report.device
    libraries = ", ".join(f"{k} {v}" for k, v in sorted(report.capabilities.libraries.items()))
    facts = [f"torch {report.torch}", *([f"driver {device.driver}"] if device.driver else [])]
    facts += [libraries] if libraries else []
    verdict = "passes" if report.ok else f"fails {len(report.failures)} cases"
    lines = [
        f"**{report.backend}** on {device.name} ({device.arch}) {verdict} the conformance suite of "
        f"portable-dit {report.version}, {report.date}; {', '.join(facts)}.",
        "",
        "| category | passed | failed | not claimed |",
        "| --- | ---: | ---: | ---: |",
    ]
    for category, outcomes in report.outcomes.items():
        counts = [sum(o.status == s for o in outcomes) for s in ("pass", "fail", "not_claimed")]
        lines.append(f"| {category} | {' | '.join(map(str, counts))} |")
    rows = [_kernel_row(same) for same in _by_kernel(report)]
    if rows:
        lines += [
            "",
            "Error: of the worst row, relative to float64; the bound is twice the plain body's on the host.",
            "",
            "| op | kernel | dtype | passed | error | bound | time against plain |",
            "| --- | --- | --- | ---: | ---: | ---: | ---: |",
            *rows,
        ]
    return "\n".join(lines) + "\n"


def _by_kernel(report: Report) -> list[Sequence[Outcome]]:
    """Outcomes of each kernel and dtype that ran at least one case of numbers."""
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for category in ("attention", "linear", "experts", "fused"):
        for outcome in report.outcomes.get(category, ()):
            if outcome.status != "not_claimed" and outcome.dtype:
                groups.setdefault((outcome.op, outcome.kernel, outcome.dtype), []).append(outcome)
    return list(groups.values())


def _kernel_row(outcomes: Sequence[Outcome]) -> str:
    shown = worst(outcomes)
    passed = f"{sum(o.status == 'pass' for o in outcomes)}/{len(outcomes)}"
    timed = [o for o in outcomes if o.seconds and o.plain_seconds]
    ratio = sum(o.seconds or 0 for o in timed) / sum(o.plain_seconds or 0 for o in timed) if timed else None
    cells = [
        shown.op,
        shown.kernel,
        shown.dtype,
        passed,
        "-" if shown.error is None else f"{shown.error:.1e}",
        "-" if shown.tolerance is None else f"{shown.tolerance:.1e}",
        "-" if ratio is None else f"{ratio:.2f}",
    ]
    return f"| {' | '.join(cells)} |"
