"""Weights that were quantised while loading, kept on disk for the next time.

Encoding a large model takes longer than reading it. An entry is one safetensors file in canonical form, so
that any device may read what another wrote. Its name is made of everything that decides its numbers: the
stored files, the format, and the layers that it reached. It is written beside the load and gets its name when
it is whole; a load that fails leaves nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from portable_dit.errors import WeightsError
from portable_dit.safetensors_file import StoredTensor, TensorFileWriter, open_tensor_file

if TYPE_CHECKING:
    from torch import nn

    from portable_dit.formats import Encoded, Format

FOLDER_VARIABLE = "PORTABLE_DIT_CACHE"
SAMPLE_BYTES = 4096
VERSION = 1


@dataclass(frozen=True)
class CacheEntry:
    """One file of the cache. title: which weights, in which format, for people."""

    path: Path
    title: str
    bytes: int


def cache_folder() -> Path:
    """Where entries lie: $PORTABLE_DIT_CACHE, else the user's cache folder."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "portable-dit" / "weights"


def cache_entries() -> list[CacheEntry]:
    """All entries, by name."""
    found = []
    for path in sorted(cache_folder().glob("*.safetensors")):
        try:
            title = open_tensor_file(path).metadata.get("title", path.stem)
        except WeightsError:
            title = f"{path.stem} (damaged)"
        found.append(CacheEntry(path, title, path.stat().st_size))
    return found


def clear_cache() -> int:
    """Removes all entries and what unfinished writes left; gives the bytes that became free."""
    folder, freed = cache_folder(), 0
    for path in (*folder.glob("*.safetensors"), *folder.glob(".*.part")):
        freed += path.stat().st_size
        path.unlink(missing_ok=True)
    return freed


def fingerprint(stored: Mapping[str, StoredTensor]) -> str:
    """sha256 over names, types and shapes of stored tensors, a sample of each, and the times of their files.

    A sample tells checkpoints apart without reading all of them; the files' times tell an edit in place.
    """
    digest = hashlib.sha256()
    for path in sorted({tensor.path for tensor in stored.values()}):
        facts = path.stat()
        digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    for name, tensor in sorted(stored.items()):
        middle = tensor.start + max(0, (tensor.nbytes - SAMPLE_BYTES) // 2)
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(tensor.mapped[middle : min(middle + SAMPLE_BYTES, tensor.stop)])
    return digest.hexdigest()


class CachedWeights:
    """The cache entry of one component in one format: read when it is there, written while loading if not.

    part: which of a layout's parts it is. changed_by: fingerprints of what is added to the stored weights.
    keep: whether this process writes it; of several that hold the same part, one does. agree: whether all
    processes have found theirs, since they read together or encode together. tensors: the cached values by
    parameter name, empty when there was no entry. A context: the entry is kept when it ends well.
    """

    def __init__(
        self,
        module: nn.Module,
        stored: Mapping[str, StoredTensor],
        *,
        title: str,
        part: str = "",
        changed_by: Sequence[str] = (),
        keep: bool = True,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        from portable_dit.quantize import quantized_weights

        layers = {name: layer for name, (layer, _) in quantized_weights(module).items()}
        self._format: Format = next(iter(layers.values())).kernel.format
        shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
        key = json.dumps([VERSION, fingerprint(stored), self._format.name, sorted(shapes), part, *changed_by])
        self.path = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
        self.tensors: Mapping[str, StoredTensor] = {}
        self._scales: Mapping[str, StoredTensor] = {}
        self._writer: TensorFileWriter | None = None
        found = self._found()
        if agree(bool(found)):
            self.tensors = {name: found[name] for name in shapes}
            self._scales = {name: found[f"{name}_scales"] for name in shapes}
        elif keep:
            self._writer = self._start(shapes, title)

    @property
    def reused(self) -> bool:
        return bool(self.tensors)

    def read(self, name: str) -> Encoded:
        """The cached weight of a parameter, as a view of the file."""
        from portable_dit.formats import Encoded
        from portable_dit.weights import as_tensor

        return Encoded(self._format, as_tensor(self.tensors[name]), as_tensor(self._scales[name]))

    def write(self, name: str, encoded: Encoded) -> None:
        """Puts one weight into the entry that is being made."""
        if self._writer is not None:
            from portable_dit.weights import as_bytes

            assert encoded.scales is not None
            self._writer.write(name, as_bytes(encoded.values))
            self._writer.write(f"{name}_scales", as_bytes(encoded.scales))

    def __enter__(self) -> CachedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, error, trace)

    def _found(self) -> Mapping[str, StoredTensor]:
        """What the entry holds, {} when there is none or it is damaged."""
        if not self.path.is_file():
            return {}
        try:
            return open_tensor_file(self.path).tensors
        except WeightsError:
            self.path.unlink(missing_ok=True)
            return {}

    def _start(self, shapes: Mapping[str, tuple[int, int]], title: str) -> TensorFileWriter:
        form = self._format
        need = sum(form.bytes(*shape) for shape in shapes.values())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if free < need:
                raise WeightsError(
                    f"cache: {need:,} bytes are needed for {title}, and {self.path.parent} has {free:,} "
                    f"free. Set {FOLDER_VARIABLE}, clear it with `portable-dit weights cache --clear`, or "
                    "leave cache out."
                )
            return TensorFileWriter(self.path, _entry_tensors(form, shapes), {"title": title})
        except OSError as error:
            raise WeightsError(
                f"cache: {self.path.parent} cannot be written ({error.strerror}). Set {FOLDER_VARIABLE} to "
                "another folder, or leave cache out."
            ) from error


def _entry_tensors(
    form: Format, shapes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What the entry's header says, before any weight is there."""
    from portable_dit.weights import safetensors_dtype

    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    assert form.scales is not None
    for name, shape in shapes.items():
        grid = tuple(-(-size // (side or size)) for size, side in zip(shape, form.block, strict=True))
        tensors[name] = safetensors_dtype(form.values), shape
        tensors[f"{name}_scales"] = safetensors_dtype(form.scales), grid
    return tensors
