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

from portable_dit.evaluation.builtin.cases import CASES
from training.shipped import WEIGHTS

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
        "--resume", type=Path, help="folder with sets of an earlier run, copied to a new --out"
    )
    parser.add_argument(
        "--from-shipped",
        type=Path,
        nargs="?",
        const=WEIGHTS,
        help="start from a shipped checkpoint (default: the package's own) instead of a run's sets",
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
    size.add_argument(
        "--further",
        action="store_true",
        help="train weights that exist further: no VAE, one long mixed stage",
    )
    parser.add_argument("--precompile", help=argparse.SUPPRESS)
    return parser.parse_args()


def own_gpu(visible: str | None, local_rank: int) -> str:
    """CUDA_VISIBLE_DEVICES for one process of a machine, given what it is for all of them.

    Every process calls its GPU cuda:0, because the compiler's cache tells device numbers apart: the second
    rank compiled everything again.
    """
    return visible.split(",")[local_rank].strip() if visible else str(local_rank)


def set_environment(arguments: argparse.Namespace) -> None:
    if "LOCAL_RANK" in os.environ:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu(visible, int(os.environ["LOCAL_RANK"]))
    cache = (arguments.cache or arguments.out / "compiler-cache").resolve()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_logging(out: Path, name: str | None) -> None:
    """To the terminal, and to a file of the run's folder."""
    out.mkdir(parents=True, exist_ok=True)
    form = logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logger = logging.getLogger("training")
    logger.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if name is not None:
        handlers.append(logging.FileHandler(out / name))
    for handler in handlers:
        handler.setFormatter(form)
        logger.addHandler(handler)


def main() -> None:
    arguments = read_arguments()
    set_environment(arguments)
    rank = int(os.environ.get("RANK", "0"))
    if arguments.precompile:
        set_logging(arguments.out, None)
        precompile(arguments)
        return
    if rank == 0 and not (arguments.out / "dit-index.json").exists():  # a run that began goes on instead
        prepare_sets(arguments)
    set_logging(arguments.out, "log.txt" if rank == 0 else f"log-{rank}.txt")
    run(arguments)


def prepare_sets(arguments: argparse.Namespace) -> None:
    """The weights that a new run starts from, if it was told any."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.resume:
        unpack(arguments.resume, arguments.out)
    if arguments.from_shipped:
        from training.restart import sets_from_shipped

        sets_from_shipped(arguments.from_shipped, arguments.out, judge=CASES / "judge.safetensors")


def unpack(source: Path, out: Path) -> None:
    """What `training.pack` wrote, or a run's own folder, brought into a new run's folder."""
    for path in source.iterdir():
        if path.suffix in (".json", ".safetensors", ".jsonl"):
            shutil.copyfile(path, out / path.name)
        elif path.suffix == ".tar":
            with tarfile.open(path) as archive:
                safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # not before 3.11.4
                archive.extractall(out, **safely)


def run(arguments: argparse.Namespace) -> None:
    from dataclasses import replace

    from training import chain, presets

    size = "tiny" if arguments.tiny else "smoke" if arguments.smoke else "full"
    preset = (presets.further if arguments.further else getattr(presets, size))()
    preset = replace(
        preset,
        compile=preset.compile and not arguments.no_compile,
        graphs=preset.graphs and not arguments.no_graphs,
        precompile=not arguments.no_precompile,
    )
    if arguments.shares:
        pairs = (pair.split("=") for pair in arguments.shares.split(","))
        preset = replace(preset, minutes={**preset.minutes, **{name: float(value) for name, value in pairs}})
    first = arguments.from_stage or preset.stages[0]
    stages = STAGES[STAGES.index(first) : STAGES.index(arguments.to_stage) + 1]
    try:
        whole = chain.Chain(
            preset,
            out=arguments.out,
            data=arguments.data,
            minutes=arguments.minutes,
            seed=arguments.seed,
            again=arguments.from_stage is not None or arguments.further,
        )
        whole.run(stages)
    except BaseException:
        logging.getLogger("training").exception("the chain stopped")
        raise


def precompile(arguments: argparse.Namespace) -> None:
    import torch
    from safetensors.torch import load_file

    from training.model import load_float_table
    from training.precompile import precompile as precompile_part
    from training.presets import full

    table = load_float_table(load_file(arguments.data / "text_table.safetensors"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precompile_part(full(), arguments.precompile, table, device)


if __name__ == "__main__":
    main()
