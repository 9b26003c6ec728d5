"""The manifest of a checkpoint folder: what each file must be, and the check that it is. Torch-free.

A file of the right size with wrong content draws noise without any error; a sha256 over each file is the only
thing that tells. `manifest.json` lies beside `model_index.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from portable_dit.errors import WeightsError
from portable_dit.paths import told_what_is_hidden
from portable_dit.safetensors_file import listed, open_tensor_file, stored_tensors

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class ManifestEntry:
    """What a file must be. sha256: lower-case hex."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Verification:
    """What `verify` looked at: file names, their bytes, and whether there was a manifest to compare with."""

    folder: Path
    files: tuple[str, ...]
    bytes: int
    tensors: int
    has_manifest: bool


def make_manifest(folder: Path) -> dict[str, Any]:
    """The content of manifest.json for all files of a checkpoint folder as they are now."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {
        "version": 1,
        "files": {
            name: {"sha256": _sha256(folder / name), "bytes": (folder / name).stat().st_size}
            for name in names
            if name != MANIFEST and not Path(name).name.startswith(".")
        },
    }


def read_manifest(folder: Path) -> dict[str, ManifestEntry] | None:
    """File name -> what it must be, or None when the folder has no manifest."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        if any(".." in PurePosixPath(name).parts or name.startswith("/") for name in files):
            raise ValueError("it names files outside the folder")
        return {name: ManifestEntry(entry["sha256"], int(entry["bytes"])) for name, entry in files.items()}
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path}: not a manifest ({error!r}). Restore it from the checkpoint.") from error


@told_what_is_hidden()
def verify(folder: str | Path, *, on_file: Callable[[str], None] = lambda name: None) -> Verification:
    """Checks every file against the manifest, every header, and every value for NaN.

    on_file: told each name as its turn comes. Raises WeightsError that lists all problems.
    """
    root = Path(folder)
    if not root.is_dir():
        raise WeightsError(f"{root}: no such folder. Name a checkpoint folder, or builtin.")
    os.listdir(root)  # a glob holds its tongue about a folder that may not be listed
    manifest = read_manifest(root)
    weights = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.safetensors"))
    if not weights and manifest is None:
        raise WeightsError(f"{root}: holds neither {MANIFEST} nor a .safetensors file. Is it a checkpoint?")
    names = sorted({*weights, *(manifest or {})})
    problems: list[str] = []
    tensors = 0
    for name in names:
        on_file(name)
        problem = file_problem(root, name, manifest[name]) if manifest and name in manifest else None
        if manifest is not None and name not in manifest:
            problem = f"{name}: not in {MANIFEST}"
        if problem is None and name.endswith(".safetensors"):
            problem, count = _tensor_problem(root / name)
            tensors += count
        if problem:
            problems.append(problem)
    folders = {*(path.parent for path in root.rglob("*.safetensors.index.json"))}
    folders |= {(root / name).parent for name in weights}
    found = (_folder_problem(folder) for folder in sorted(folders))
    problems = problems or [problem for problem in found if problem]
    if problems:
        raise WeightsError(
            listed(f"{root}: {len(problems)} of {len(names)} files are not right.", problems)
            + "\nDownload or copy these files again."
        )
    size = sum((root / name).stat().st_size for name in names)
    return Verification(root, tuple(names), size, tensors, manifest is not None)


def file_problem(root: Path, name: str, entry: ManifestEntry) -> str | None:
    path = root / name
    if not path.is_file():
        return f"{name}: missing"
    if path.stat().st_size != entry.bytes:
        return f"{name}: {path.stat().st_size:,} bytes instead of {entry.bytes:,}"
    return None if _sha256(path) == entry.sha256 else f"{name}: right size, wrong content (sha256 differs)"


def _tensor_problem(path: Path) -> tuple[str | None, int]:
    """What is wrong inside a safetensors file, and how many tensors it has."""
    try:
        tensors = open_tensor_file(path).tensors
    except WeightsError as error:
        return str(error), 0
    bad = []
    for tensor in tensors.values():
        if not tensor.is_finite():
            bad.append(tensor.name)
        tensor.release()
    return (
        f"{path}: NaN or infinite values, or float64 beyond float32, in {', '.join(bad[:12])}"
        if bad
        else None
    ), len(tensors)


def _folder_problem(folder: Path) -> str | None:
    """What is wrong between the files of a folder: shards that are missing, tensors that stand twice."""
    try:
        stored_tensors(folder)
    except WeightsError as error:
        return str(error)
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
