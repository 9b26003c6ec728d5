"""A run's weights and records in few files of at most 16 MiB, to bring home from a lent machine.

    python -m training.pack --from RUN --to FOLDER

The folder is what `training.run_all --resume FOLDER` takes. It works on a run that is still going, too. The
teacher and the student go as int8 rows: 18.6 MB each instead of 37, and training goes on from them as well.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tarfile
import time
from pathlib import Path

from PIL import Image

from training.checkpoint import has_set, load_set, read_index, save_set

SMALL = ("*.txt", "*.log", "*.json", "*.jsonl", "*.md")
SMALL_BYTES = 15 * 2**20
SETS = ("vae", "dit", "student")
TRIES = 5  # a run may replace a set while it is read


def pack(source: Path, target: Path, *, sets: tuple[str, ...] = SETS) -> list[Path]:
    """Write the files; returns them. sets: weights to take along where they exist."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sets:
        if has_set(source, name):
            _copy(source, target, name, codec=None if name == "vae" else "int8")
    indices = {path.name for path in target.glob("*-index.json")}
    with tarfile.open(target / "records.tar", "w") as archive:
        for pattern in SMALL:
            for path in sorted(source.glob(pattern)):
                if path.name not in indices:
                    archive.add(path, path.name)
        for path in sorted(target.glob("*-index.json")):
            archive.add(path, path.name)
            path.unlink()
        judge = source / "judge.safetensors"
        if sets and judge.exists():
            archive.add(judge, judge.name)
        room = SMALL_BYTES - archive.offset
        for path in sorted(source.glob("*.png"), key=lambda p: p.stat().st_mtime, reverse=True):
            data = _webp(path)
            if len(data) < room:
                entry = tarfile.TarInfo(path.stem + ".webp")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
                room -= len(data) + 1024
    return sorted(path for path in target.iterdir() if path.is_file())


def _copy(source: Path, target: Path, name: str, *, codec: str | None) -> None:
    if codec is None:
        for file in (f"{name}-index.json", *read_index(source, name)["files"]):
            shutil.copyfile(source / file, target / file)
        return
    for attempt in range(TRIES):
        try:
            tensors, index = load_set(source, name)
            break
        except (OSError, ValueError):
            if attempt == TRIES - 1:
                raise
            time.sleep(1)
    save_set(target, name, tensors, step=index["step"], codec=codec, note=index["note"])


def _webp(path: Path) -> bytes:
    buffer = io.BytesIO()
    with Image.open(path) as image:
        if max(image.size) > 16000:
            image.thumbnail((16000, 16000))
        image.save(buffer, format="WEBP", quality=80)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack a training run into few small files.")
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--to", dest="target", type=Path, required=True)
    parser.add_argument(
        "--sets", default=",".join(SETS), help="weights to take along; empty = records and sheets only"
    )
    arguments = parser.parse_args()
    sets = tuple(name for name in arguments.sets.split(",") if name)
    for path in pack(arguments.source, arguments.target, sets=sets):
        print(f"{path.stat().st_size:12,}  {path.name}")


if __name__ == "__main__":
    main()
