"""`portable-dit eval`: whether what a server draws shows what was asked for, scored by a judge."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from portable_dit.cli.options import JsonFlag
from portable_dit.cli.terminal import tell
from portable_dit.errors import UserError

BUILTIN = "builtin"
MOST_UNSCORED = 3  # samples whose want of a score is explained; --json has all
JUDGE_ADVICE = (
    "--judge is the address of a vision model's server that answers OpenAI's /v1/chat/completions. Start "
    "that, or give its address."
)


def evaluate(
    suite: Annotated[
        str,
        typer.Option(metavar="FILE|builtin", help="What is drawn: a suite's file, or h3-mini's own gates."),
    ] = BUILTIN,
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Draws; left out, the pictures are there already.")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="URL|builtin",
            help="Scores: a vision model's server, or h3-mini's own judge.",
            show_default="builtin with --suite builtin, else none",
        ),
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="The judge's name on its server.")] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            readable=False, metavar="FOLDER", help="Where pictures are kept between the two passes."
        ),
    ] = None,
    samples_per_type: Annotated[
        int | None, typer.Option(min=1, help="So many of each type, not all.")
    ] = None,
    types: Annotated[str | None, typer.Option(metavar="A,B", help="Only these types of the suite.")] = None,
    num_inference_steps: Annotated[int | None, typer.Option(min=1, help="Steps, else the suite's.")] = None,
    report: Annotated[
        Path | None, typer.Option(readable=False, metavar="FILE", help="Write the report as JSON.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Draw a suite on a server, let a judge score it; exit code 1 when a gate is missed."""
    if (suite == BUILTIN) != (judge == BUILTIN) and judge is not None:
        raise UserError("--suite builtin and --judge builtin: they belong together. Give both or neither.")
    if report is not None:
        from portable_dit.image import check_writable

        check_writable(report)
    found: dict[str, Any] | None
    if suite == BUILTIN:
        _require_whole(
            {
                "--pictures": pictures,
                "--types": types,
                "--num-inference-steps": num_inference_steps,
                "--judge-model": judge_model,
            }
        )
        found = _builtin(server, samples_per_type)
    else:
        found = _by_rubric(
            Path(suite),
            server,
            judge,
            judge_model=judge_model,
            pictures=pictures,
            samples_per_type=samples_per_type,
            types=[name.strip() for name in types.split(",")] if types else [],
            steps=num_inference_steps,
        )
    if found is None:
        return
    if report is not None:
        from portable_dit.image import write_atomically

        write_atomically(report, json_text.dumps(found, indent=1).encode())
    typer.echo(json_text.dumps(found) if json else _table(found))
    unscored = [one for one in found.get("judgements", ()) if one["score"] is None]
    for note in (*found["notes"], *(f"{one['id']}: {one['reason']}" for one in unscored[:MOST_UNSCORED])):
        tell(f"note: {note}")
    if not found["passed"]:
        raise typer.Exit(1)


def _require_whole(flags: Mapping[str, object]) -> None:
    """Refuses the flags that only a suite of one's own has, as far as they were given."""
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        raise UserError(
            f"{', '.join(given)}: not with --suite builtin, which is drawn and scored in one pass, as it is. "
            f"Leave {'it' if len(given) == 1 else 'them'} out, or name a suite's file."
        )


def _builtin(server: str | None, samples_per_type: int | None) -> dict[str, Any]:
    """The gates of h3-mini."""
    from portable_dit.server.client import Client

    if server is None:
        raise UserError(
            "--server: missing. Start one with `portable-dit serve --recipe cpu/h3-mini`, and give its URL."
        )
    from portable_dit.evaluation.builtin.gates import evaluate_served

    return evaluate_served(Client.of(server).draw, samples_per_type=samples_per_type, on_case=_progress)


def _by_rubric(
    path: Path,
    server: str | None,
    judge: str | None,
    *,
    judge_model: str | None,
    pictures: Path | None,
    samples_per_type: int | None,
    types: list[str],
    steps: int | None,
) -> dict[str, Any] | None:
    """The report of a suite's file; None when nobody judges yet."""
    from portable_dit.evaluation.judging import draw_missing, judge_all
    from portable_dit.evaluation.report import make_report
    from portable_dit.evaluation.suite import read_suite
    from portable_dit.server.client import Client

    if server is None and judge is None:
        raise UserError(
            "--server and --judge: missing. --server URL draws the suite, and --judge URL has a vision model "
            "score it. Give both, or one of them with --pictures FOLDER."
        )
    if pictures is None and (server is None or judge is None):
        missing, does = ("--judge", "scores what is drawn") if judge is None else ("--server", "draws")
        raise UserError(
            f"{missing}: missing, which {does}. Say {missing} URL, or --pictures FOLDER, where one pass "
            "leaves its pictures and the other finds them."
        )
    suite = read_suite(path, types=types, samples_per_type=samples_per_type)
    folder = pictures or path.with_suffix("")
    if server is not None:
        draw_missing(
            Client.of(server),
            suite,
            folder,
            steps=steps,
            on_sample=lambda sample: _progress(f"draw {sample.id}"),
        )
    if judge is None:
        typer.echo(str(folder))
        return None
    judgements = judge_all(
        Client.of(judge, advice=JUDGE_ADVICE),
        suite,
        folder,
        model=judge_model,
        on_sample=lambda sample: _progress(f"judge {sample.id}"),
    )
    return make_report(suite, judge, judgements).as_dict()


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def _table(found: dict[str, Any]) -> str:
    """The report for people."""
    verdict = "passed" if found["passed"] else "FAILED"
    open_gates = sum(gate["outcome"] == "undecided" for gate in found.get("gates", ()))
    if found["passed"] and open_gates:
        verdict += f", {open_gates} of {len(found['gates'])} gates undecided"
    lines = [f"{found['suite']}, judged by {found['judge']}: {verdict}"]
    if "gates" in found:
        for gate in found["gates"]:
            outcome = "MISSED" if gate["outcome"] == "missed" else gate["outcome"]
            value = "-" if gate["value"] is None else f"{gate['value']:.3f}"
            figures = f"{value:>8} of {gate['needed']:<6g} {gate['count']:5} cases"
            lines.append(f"{gate['name']:28} {figures}  {outcome}")
        return "\n".join(lines)
    for name, mean in {"overall": found["overall"], **found["types"]}.items():
        value = "-" if mean["mean"] is None else f"{mean['mean']:.3f}"
        missing = f", {mean['unscored']} without a score" if mean["unscored"] else ""
        lines.append(f"{name:28} {value:>8} of {found['gate']:<6g} {mean['count']:5} samples{missing}")
    return "\n".join(lines)
