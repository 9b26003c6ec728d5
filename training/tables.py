"""The figures of docs/h3-mini.md: kept as JSON in docs/h3-mini, written into the page between markers.

    python -m training.tables --run runs/mini     take over the figures of a training run, then write the page
    python -m training.tables                     write the page from the figures that are kept
    python -m training.tables --check             fail when the page does not say what the figures say

A report that the engine drew with the same weights (`training.evaluate --out docs/h3-mini/engine`) gets a
column of its own.
"""

import argparse
import ast
import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from training.shipped import FIGURES, PAGE, weights_digest

STAGES = {
    "vae": "VAE, 256 px crops",
    "dit256": "DiT at 256 px",
    "mixed": "DiT at all sizes",
    "distil": "six steps without guidance",
}
PROGRESS = re.compile(
    r"^(\S+) (vae|dit256|mixed|distil) +([\d.]+) s +\d+%  step (\d+)  ([\d.]+) M", re.MULTILINE
)
VAE_LOOK = re.compile(r"vae eval at ([\d.]+) M: (\{.*\})")
CURVE = (
    "t2i/single_top1",
    "t2i/style",
    "t2i/both_of_two",
    "edit/remove/gain",
    "edit/replace/gain",
    "edit/add/gain",
    "edit/style/gain",
    "edit/style/attribute",
    "edit/untouched",
)


def record_run(run: Path, figures: Path) -> None:
    """The figures of a finished run into the folder of figures, with the weights that they belong to."""
    figures.mkdir(parents=True, exist_ok=True)
    for size in (256, 512):
        report = json.loads((run / f"report-{size}.json").read_text())
        _write(figures / f"report-{size}.json", {"weights": weights_digest()} | report)
    runs = _runs_so_far(figures / "training.json", read_log(run))
    _write(figures / "training.json", {"weights": weights_digest(), "runs": runs})


def _runs_so_far(path: Path, new: dict[str, Any]) -> list[dict[str, Any]]:
    """The new run alone, or behind those that made the weights which it trained further."""
    if new["vae"] or not path.exists():
        return [new]
    earlier = json.loads(path.read_text())["runs"]
    return [*(run for run in earlier if run != new), new]


def read_log(run: Path) -> dict[str, Any]:
    """Seconds, steps and samples of each stage, what the VAE reached, and the learning curve."""
    log = (run / "log.txt").read_text()
    stages = {
        name: {"seconds": float(seconds), "steps": int(steps), "samples_m": float(samples)}
        for _, name, seconds, steps, samples in PROGRESS.findall(log)
    }
    clocks = [
        datetime.strptime(clock, "%H:%M:%S") for clock in re.findall(r"^(\d\d:\d\d:\d\d) ", log, re.MULTILINE)
    ]
    wall = (clocks[-1] - clocks[0]) % timedelta(days=1)
    curve = []
    for line in (run / "curve.jsonl").read_text().splitlines():
        entry = json.loads(line)
        scores = entry["report"]["scores"]
        values = {name: scores[name]["value"] for name in CURVE if name in scores}
        curve.append({key: entry[key] for key in ("stage", "samples_m", "size")} | {"scores": values})
    looks = VAE_LOOK.findall(log)
    vae = ast.literal_eval(looks[-1][1]) if looks else {}  # none in a run that trained weights further
    return {"wall_seconds": wall.total_seconds(), "stages": stages, "vae": vae, "curve": curve}


def sections(figures: Path) -> dict[str, str]:
    """Marker name -> what the page says there."""
    read = {path.stem: json.loads(path.read_text()) for path in figures.glob("*.json")}
    drawn = {path.stem: json.loads(path.read_text()) for path in (figures / "engine").glob("*.json")}
    engine = {name: r for name, r in drawn.items() if r["weights"] == read[name]["weights"]}
    return {
        "gates-256": gate_table(read["report-256"], engine.get("report-256")),
        "gates-512": gate_table(read["report-512"], engine.get("report-512")),
        "references": references_table(read["report-256"], read["report-512"]),
        "training": training_table(read["training"]),
        "curve": curve_table(read["training"]),
        "precision": precision_table(read["precision"]),
    }


def gate_table(report: Mapping[str, Any], engine: Mapping[str, Any] | None) -> str:
    """Measured against needed, the failing gates in bold."""
    drawn = {gate["name"]: gate for gate in engine["gates"]} if engine else {}
    head = [
        "gate",
        "needed",
        "measured",
        "95 % interval",
        "cases",
        *(["by the engine"] if drawn else []),
        "verdict",
    ]
    lines = [_row(head), _row(["---"] * len(head))]
    for gate in report["gates"]:
        score, unit = gate["score"], gate["unit"]
        verdict = "holds" if gate["passed"] else f"**misses**, {gate['hint']}"
        other = [_value(drawn[gate["name"]]["score"]["value"], unit)] if drawn else []
        lines.append(
            _row(
                [
                    gate["name"].replace("t2i/", "").replace("_", " ").replace("/", ": "),
                    _value(gate["threshold"], unit),
                    _value(score["value"], unit),
                    f"{_value(score['low'], '')} to {_value(score['high'], '')}"
                    if unit == "dB"
                    else f"{100 * score['low']:.1f} to {100 * score['high']:.1f}",
                    str(score["count"]),
                    *other,
                    verdict,
                ]
            )
        )
    missed = [gate["name"] for gate in report["gates"] if not gate["passed"]]
    total = len(report["gates"])
    lines += ["", f"{total - len(missed)} of {total} gates hold. Weights `{report['weights']}`."]
    return "\n".join(lines)


def references_table(small: Mapping[str, Any], large: Mapping[str, Any]) -> str:
    """Two and three references: no gates, but figures."""
    kinds = dict.fromkeys(name.split("/")[1] for name in small["scores"] if name.startswith("multi/"))
    parts = ("objects", "style", "background")
    lines = [_row(["kind", *(f"{part}, 256 / 512 px" for part in parts)]), _row(["---"] * 4)]
    for kind in kinds:
        cells = [
            " / ".join(
                f"{100 * report['scores'][f'multi/{kind}/{part}']['value']:.0f} %"
                for report in (small, large)
            )
            for part in parts
        ]
        lines.append(_row([kind.replace("_", " "), *cells]))
    return "\n".join(lines)


def training_table(training: Mapping[str, Any]) -> str:
    lines = [_row(["run", "stage", "seconds", "steps", "samples, M"]), _row(["---"] * 5)]
    for number, run in enumerate(training["runs"], 1):
        for name, stage in run["stages"].items():
            figures = [f"{stage['seconds']:.0f}", f"{stage['steps']:,}", f"{stage['samples_m']:.2f}"]
            lines.append(_row([str(number), STAGES.get(name, name), *figures]))
    minutes = ", ".join(f"{run['wall_seconds'] / 60:.0f}" for run in training["runs"])
    lines += ["", f"Minutes of wall clock in all, by run: {minutes}. The VAE alone:"]
    for run in training["runs"]:
        lines += [
            f"{reached['psnr']:.1f} dB at {size} px (worst picture {reached['psnr_worst']:.1f}, "
            f"gradient error at token borders {reached['border_ratio']:.2f}x the inside)."
            for size, reached in run["vae"].items()
        ]
    return "\n".join(lines)


def curve_table(training: Mapping[str, Any]) -> str:
    """Every look of every run, in order."""
    heads = [
        name.removeprefix("t2i/").removeprefix("edit/").replace("_", " ").replace("/", ": ") for name in CURVE
    ]
    lines = [_row(["run", "stage", "samples, M", "px", *heads]), _row(["---"] * (4 + len(heads)))]
    for number, run in enumerate(training["runs"], 1):
        for entry in run["curve"]:
            cells = [_value(entry["scores"][name], "dB" if "gain" in name else "%") for name in CURVE]
            stage = STAGES.get(entry["stage"], entry["stage"])
            lines.append(_row([str(number), stage, f"{entry['samples_m']:.2f}", str(entry["size"]), *cells]))
    return "\n".join(lines)


def precision_table(precision: Mapping[str, Any]) -> str:
    lines = [
        _row(["set-up", "worst attention branch", "worst MLP branch", "pictures: mean", "pictures: worst"]),
        _row(["---"] * 5),
    ]
    for name, row in precision["set_ups"].items():
        same = row["mean_db"] > 59.9  # `gates.psnr` says 60 dB of equal pictures
        pictures = ["equal", "equal"] if same else [f"{row['mean_db']:.1f} dB", f"{row['worst_db']:.1f} dB"]
        lines.append(_row([name, f"{row['attention']:.4f}", f"{row['mlp']:.4f}", *pictures]))
    faults = ", ".join(
        f"{name.replace('_', ' ')}: {error:.2f}" for name, error in precision["faults"].items()
    )
    return "\n".join(
        [*lines, "", f"Injected faults, the least error of the broken branch over blocks: {faults}."]
    )


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with the text between each pair of markers replaced. Raises ValueError for a lost marker."""
    for name, text in parts.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"no marker <!-- {name} --> ... <!-- /{name} --> in the page. Put it back.")
        page = pattern.sub(lambda found, text=text: found[1] + text + "\n" + found[2], page)
    return page


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _value(value: float, unit: str) -> str:
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.1f} {unit}".rstrip()


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="folder of a finished training run")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.run:
        record_run(arguments.run, FIGURES)
    page = PAGE.read_text()
    wanted = filled(page, sections(FIGURES))
    if arguments.check:
        raise SystemExit(None if wanted == page else f"{PAGE}: out of date. Run python -m training.tables.")
    PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
