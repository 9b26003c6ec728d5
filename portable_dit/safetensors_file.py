"""A safetensors file as its header describes it, checked before any byte of a tensor is touched. Torch-free.

The format is eight bytes of header length, a JSON header, and the tensors. Reading it here instead of
through the library buys two things: every defect becomes one sentence that says what to do, and pages of a
tensor that was copied can be given back at once, so that loading a checkpoint costs the memory of one tensor
and not of the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from portable_dit.errors import WeightsError
from portable_dit.paths import kind_of

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
# Unsigned view, and the bits, sign aside, from which on a value is infinite or NaN (E4M3 has NaN only). Of
# float64 those from which on it is so as float32, since no module holds more: halfway behind the largest.
NOT_FINITE = {
    "F64": (np.uint64, 0x47EFFFFFF0000000),
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
    "F8_E5M2": (np.uint8, 0x7C),
}
CHUNK_BYTES = 1 << 20  # small enough for a core's own cache


@dataclass(frozen=True, eq=False)
class TensorFile:
    """An open safetensors file: its tensors by name, and its bytes mapped privately."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    bytes: mmap.mmap
    metadata: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Where one tensor lies. dtype: safetensors' name of it. start, stop: byte offsets in the mapped file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    path: Path
    mapped: mmap.mmap

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def content(self) -> bytes:
        """A copy of the tensor's bytes, for the small ones that hold text."""
        return bytes(self.mapped[self.start : self.stop])

    def is_finite(self, first: int = 0, last: int | None = None) -> bool:
        """Whether no value is NaN or infinite, or float64 beyond float32. Read once, beside other threads.

        first, last: byte offsets of a piece, multiples of eight; the whole tensor when left out.
        """
        stop = self.nbytes if last is None else min(last, self.nbytes)
        raw = np.frombuffer(self.mapped, np.uint8, stop - first, self.start + first)
        if self.dtype not in NOT_FINITE:
            raw[:: mmap.PAGESIZE].max(initial=0)  # brings the pages in, which is what a reader ahead is for
            return True
        kind, least = NOT_FINITE[self.dtype]
        unsigned = kind((1 << 8 * kind().itemsize - 1) - 1)
        for place in range(0, raw.size, CHUNK_BYTES):
            values = raw[place : place + CHUNK_BYTES].view(kind)
            if ((values & unsigned) >= kind(least)).any():
                return False
        return True

    def release(self) -> None:
        """Gives the whole pages of this tensor back to the system; they are read again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = -(-self.start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (self.stop - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if length > 0:
                self.mapped.madvise(mmap.MADV_DONTNEED, first, length)


def open_tensor_file(path: Path) -> TensorFile:
    """The file with its header read and checked. Raises WeightsError when it is not whole."""
    if kind_of(path) == "other":
        raise WeightsError(f"{path}: a device or pipe, and weights are mapped. Copy them to a regular file.")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise WeightsError(
                    f"{path}: not a safetensors file (its first bytes are no header). {_again()}"
                )
            if 8 + length > size:
                raise WeightsError(f"{path}: cut short inside its header, at {size:,} bytes. {_again()}")
            header = _parsed(file.read(length), path)
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightsError(
            f"{path}: cannot be read ({error.strerror}). Check the path and its mode."
        ) from error
    metadata = header.pop("__metadata__", None) or {}
    data = 8 + length
    tensors = {name: _entry(name, entry, data, path, mapped) for name, entry in header.items()}
    expected = max((tensor.stop for tensor in tensors.values()), default=data)
    if expected != size:
        fault = "cut short" if size < expected else "longer than its header says"
        raise WeightsError(f"{path}: {fault}, {size:,} bytes instead of {expected:,}. {_again()}")
    return TensorFile(path, tensors, mapped, metadata if isinstance(metadata, dict) else {})


class TensorFileWriter:
    """A safetensors file written one tensor at a time, in any order; it gets its name when it is whole.

    tensors: name -> (safetensors' dtype, shape) of everything that will be written. metadata: text to text.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._part = path.with_name(f".{path.name}.{os.getpid()}.part")
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        # Wide types first: then every tensor starts at a multiple of its item size and can be mapped.
        for name in sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][0]], name)):
            dtype, shape = tensors[name]
            begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
            self._places[name] = begin, end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._data = 8 + len(raw)
        self._file = self._part.open("wb")
        self._file.write(struct.pack("<Q", len(raw)) + raw)
        self._file.truncate(self._data + end)

    def write(self, name: str, data: memoryview | bytes) -> None:
        """The bytes of one tensor; each is written once."""
        begin, end = self._places.pop(name)
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        assert len(view) == end - begin, f"{name}: {len(view)} bytes for {end - begin}"
        self._file.seek(self._data + begin)
        self._file.write(view)

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and not self._places:
            self._part.replace(self.path)
        else:
            self._part.unlink(missing_ok=True)


def stored_tensors(place: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, of all safetensors files in a folder, or of the files that its index names."""
    if place.is_file():
        return dict(open_tensor_file(place).tensors)
    folder = place
    if not folder.is_dir():
        raise WeightsError(f"{folder}: no such folder. The checkpoint is incomplete; download it again.")
    os.listdir(folder)  # a glob holds its tongue about a folder that may not be listed
    index = _index(folder)
    files = sorted(set(index.values()) or (path.name for path in folder.glob("*.safetensors")))
    if not files:
        raise WeightsError(
            f"{folder}: holds no .safetensors file, and no other format is read, since others can run code. "
            "Convert the checkpoint with the safetensors library."
        )
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise WeightsError(listed(f"{folder}: {len(absent)} of {len(files)} files are missing.", absent))
    found: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in open_tensor_file(folder / name).tensors.values():
            if tensor.name in found:
                raise WeightsError(
                    f"{folder}: {tensor.name} is in {found[tensor.name].path.name} and in {name}. "
                    "Keep one form of the weights in the folder."
                )
            found[tensor.name] = tensor
    wrong = [name for name, file in index.items() if name not in found or found[name].path.name != file]
    if wrong:
        raise WeightsError(listed(f"{folder}: tensors are not in the files that the index names.", wrong))
    return found


def _index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name of the index file, {} when there is none."""
    paths = sorted(folder.glob("*.safetensors.index.json"))
    if not paths:
        return {}
    try:
        weight_map = json.loads(paths[0].read_text(encoding="utf-8"))["weight_map"]
        right = all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        right = False
    if not right:
        raise WeightsError(f"{paths[0]}: not an index of safetensors files. Restore it from the checkpoint.")
    return dict(weight_map)


def _parsed(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: its safetensors header is no JSON ({error}). {_again()}") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: its safetensors header is no JSON object. {_again()}")
    return header


def _entry(name: str, entry: Any, data: int, path: Path, mapped: mmap.mmap) -> StoredTensor:
    """One line of the header as a StoredTensor; its size must follow from dtype and shape."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        right = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise WeightsError(f"{path}: the header entry of {name} is malformed. {_again()}")
    if dtype not in ITEM_BYTES:
        raise WeightsError(f"{path}: {name} has dtype {dtype}. Known: {', '.join(ITEM_BYTES)}.")
    need = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != need:
        raise WeightsError(
            f"{path}: {name} is {dtype} {list(shape)}, {need:,} bytes, but the header gives it "
            f"{end - begin:,}. {_again()}"
        )
    return StoredTensor(name, dtype, shape, data + begin, data + end, path, mapped)


def _again() -> str:
    return "Download or copy the file again."


def listed(head: str, lines: Sequence[str], *, most: int = 12) -> str:
    """A message with its details on lines of their own, the first `most` of them."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([head, *(f"  {line}" for line in [*lines[:most], *more])])
