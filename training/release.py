"""Everything in the repository that depends on the weights of h3-mini, made anew from a training run.

    make release-h3-mini RUN=runs/mini

Checkpoint, gate cases and judge, golden pictures, contact sheets, figures and tables, in this order. About
five minutes on two cores. Afterwards `make test` says whether the gates that tests/integration/test_gates.py
lists as open still are, and somebody has to look at the sheets and say in docs/h3-mini.md what they show.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from portable_dit.evaluation.builtin.cases import CASES
from training.shipped import WEIGHTS


def steps(run: Path) -> tuple[tuple[str, ...], ...]:
    """Arguments of `python -m` for each step."""
    return (
        ("training.export", "--from", str(run), "--out", str(WEIGHTS)),
        ("training.gates", "export-tests", "--judge", str(run / "judge.safetensors"), "--out", str(CASES)),
        ("training.golden", "--write"),
        ("training.sheets",),
        ("training.branch_check",),
        ("training.tables", "--run", str(run)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished training run")
    parser.add_argument("--first", default="training.export", help="the step to begin with, after a failure")
    arguments = parser.parse_args()
    todo = steps(arguments.run)
    names = [step[0] for step in todo]
    if arguments.first not in names:
        parser.error(f"--first {arguments.first}: one of {', '.join(names)}")
    for step in todo[names.index(arguments.first) :]:
        print(f"== python -m {' '.join(step)}", flush=True)
        subprocess.run([sys.executable, "-m", *step], check=True)


if __name__ == "__main__":
    main()
