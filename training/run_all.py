"""Command line of the training chain.

Torch is imported only after the arguments are read: worker processes start from this file too, and need none.

    python -m training.run_all --out runs/mini --minutes 25
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tarfile
from pathlib import Path

STAGES = ("vae", "dit256", "mixed", "distil", "eval")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train h3-mini: VAE, transformer, six-step distillation, export."
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the run; a second run continues there"
    )
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "build")
    parser.add_argument("--minutes", type=float, default=25.0, help="wall clock of the whole chain")
    parser.add_argument(
        "--from-stage",
        choices=STAGES,
        help="start here, and train this and later stages further if they were done",
    )
    parser.add_argument("--to-stage", choices=STAGES, default=STAGES[-1])
    parser.add_argument(
        "--resume", type=Path, help="folder with sets of an earlier run, copied to --out first"
    )
    parser.add_argument(
        "--shares", default="", help="minutes of stages as name=minutes,..., relative to each other"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="plain PyTorch kernels")
    parser.add_argument("--no-graphs", action="store_true", help="launch kernels one by one")
    parser.add_argument("--no-precompile", action="store_true", help="no compiler process beside the VAE")
    parser.add_argument("--cache", type=Path, help="compiler cache (default: inside --out)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tiny", action="store_true", help="toy model and data on a CPU, about a minute")
    size.add_argument("--smoke", action="store_true", help="real sizes, a few seconds for each stage")
    parser.add_argument("--precompile", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def set_environment(arguments: argparse.Namespace) -> None:
    cache = (arguments.cache or arguments.out / "compiler-cache").resolve()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_logging(out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    form = logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logger = logging.getLogger("training")
    logger.setLevel(logging.INFO)
    for handler in (logging.StreamHandler(sys.stdout), logging.FileHandler(out / name)):
        handler.setFormatter(form)
        logger.addHandler(handler)


def main() -> None:
    arguments = read_arguments()
    set_environment(arguments)
    rank = int(os.environ.get("RANK", "0"))
    if arguments.resume and rank == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        unpack(arguments.resume, arguments.out)
    if arguments.precompile:
        set_logging(arguments.out, "precompile-steps.log")
        precompile(arguments)
        return
    set_logging(arguments.out, "log.txt" if rank == 0 else f"log-{rank}.txt")
    run(arguments)


def unpack(source: Path, out: Path) -> None:
    """What `training.pack` wrote, or a run's own folder, brought into a new run's folder."""
    for path in source.iterdir():
        if path.suffix in (".json", ".safetensors", ".jsonl"):
            shutil.copyfile(path, out / path.name)
        elif path.suffix == ".tar":
            with tarfile.open(path) as archive:
                archive.extractall(out, filter="data")


def run(arguments: argparse.Namespace) -> None:
    from dataclasses import replace

    from training import chain

    preset = chain.tiny() if arguments.tiny else chain.smoke() if arguments.smoke else chain.full()
    preset = replace(
        preset,
        compile=preset.compile and not arguments.no_compile,
        graphs=preset.graphs and not arguments.no_graphs,
        precompile=not arguments.no_precompile,
    )
    if arguments.shares:
        pairs = (pair.split("=") for pair in arguments.shares.split(","))
        preset = replace(preset, minutes={**preset.minutes, **{name: float(value) for name, value in pairs}})
    first = arguments.from_stage or STAGES[0]
    stages = STAGES[STAGES.index(first) : STAGES.index(arguments.to_stage) + 1]
    try:
        whole = chain.Chain(
            preset,
            out=arguments.out,
            data=arguments.data,
            minutes=arguments.minutes,
            seed=arguments.seed,
            again=arguments.from_stage is not None,
        )
        whole.run(stages)
    except BaseException:
        logging.getLogger("training").exception("the chain stopped")
        raise


def precompile(arguments: argparse.Namespace) -> None:
    import torch
    from safetensors.torch import load_file

    from training import chain
    from training.model import load_float_table

    table = load_float_table(load_file(arguments.data / "text_table.safetensors"))
    chain.precompile(chain.full(), table, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


if __name__ == "__main__":
    main()
