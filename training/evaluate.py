"""Every gate of h3-mini on the shipped weights, drawn by the engine with a recipe of your choice.

    python -m training.evaluate --size 256 --size 512 --num-cases 64 --out report

Needs what `training.build_data` wrote; 64 cases of a kind are 1,344 pictures at each size. `--recipe` and
`--set` measure any machine, precision or number format that a recipe can name.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from portable_dit import DEFAULT_RECIPE
from portable_dit.engine import Engine
from portable_dit.evaluation.builtin.cases import CASES
from portable_dit.evaluation.builtin.judge import load_judge
from training.gates import Report, against_smaller, evaluate
from training.paint import EnginePainter
from training.render import Atlas
from training.scenes import Concepts
from training.shipped import weights_digest


def write_report(report: Report, out: Path, **facts: Any) -> None:
    """report-SIZE.json and .md in a folder; facts go into the JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"report-{report.size}.json").write_text(json.dumps(facts | report.json(), indent=1) + "\n")
    (out / f"report-{report.size}.md").write_text(report.markdown())


def overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """["precision=float32"] -> {"precision": "float32"}, values read as YAML."""
    return {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default=DEFAULT_RECIPE)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as portable-dit run")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "build")
    parser.add_argument("--judge", type=Path, default=CASES / "judge.safetensors")
    parser.add_argument("--size", type=int, action="append", help="repeatable; default: 256 and 512")
    parser.add_argument(
        "--num-cases", type=int, default=64, help="of each kind of edit; text to image: twice"
    )
    parser.add_argument("--out", type=Path, default=Path("report"))
    arguments = parser.parse_args()
    concepts, atlas = Concepts.load(arguments.data / "concepts.json"), Atlas.load(arguments.data)
    judge = load_judge(arguments.judge)
    smallest: Report | None = None
    with Engine.load(arguments.recipe, overrides(arguments.set)) as engine:
        for size in sorted(arguments.size or (256, 512)):
            begin = time.perf_counter()
            report = evaluate(
                EnginePainter(engine, atlas),
                atlas=atlas,
                concepts=concepts,
                judge=judge,
                size=size,
                num_cases=arguments.num_cases,
            )
            if smallest is not None:
                report = against_smaller(report, smallest)
            smallest = smallest or report
            write_report(
                report,
                arguments.out,
                weights=weights_digest(),
                drawn_by=f"engine, {engine.plan.backend}, DiT in {engine.plan.dtype['dit']}",
                seconds=round(time.perf_counter() - begin),
            )
            print(report.markdown(), flush=True)


if __name__ == "__main__":
    main()
