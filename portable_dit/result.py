"""What an engine gives back: pictures, how long each stage took, and events on the way there.

Letters: H W pixels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_dit.errors import OutputError, PortableDitError
from portable_dit.image import Pixels, encode, format_of, write_atomically
from portable_dit.paths import kind_of

STAGES = ("text_encode", "prepare", "denoise", "vae_decode", "encode_png")


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture. pixels: uint8 RGB [H, W, 3].

    record: what is written into its file. seconds: by stage. step_seconds: of each denoise step. encoded: the
    file's bytes by format, for the format that the request named. batch: how many pictures were denoised side
    by side up to the last step, this one among them, whose time and steps are those of all; those that left
    on the way, being cancelled, do not count. wanted: how many would have been if no bit changed by it.
    """

    pixels: Pixels
    seed: int
    record: Mapping[str, Any]
    seconds: Mapping[str, float]
    step_seconds: tuple[float, ...]
    encoded: Mapping[str, bytes]
    batch: int = 1
    wanted: int = 1

    def __repr__(self) -> str:
        return f"Picture({self.width}x{self.height}, seed={self.seed}, {sum(self.seconds.values()):.2f} s)"

    @property
    def width(self) -> int:
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        return int(self.pixels.shape[0])

    def data(self, format: str = "png") -> bytes:
        """The bytes of a file in that format, with the record inside."""
        return self.encoded.get(format) or encode(self.pixels, self.record, format=format)

    def save(self, path: str | Path, *, format: str | None = None) -> SavedImage:
        """Writes the file whole or not at all. format: None goes by the suffix, else PNG."""
        target = Path(path)
        data = self.data(format_of(target, format))
        write_atomically(target, data)
        return SavedImage(target, self.width, self.height, self.seed, hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class SavedImage:
    """A file that was written."""

    path: Path
    width: int
    height: int
    seed: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Result:
    """All pictures of a request, and what they took.

    seconds: by stage, all pictures together, of which those that were denoised side by side count once;
    "total" is the wall time, in which encoding overlaps with drawing. peak_bytes: the device's highest use so
    far, None when it does not say. kernels: by component and op. changes: those of the notes that tell of a
    wish met in another way than it was written.
    """

    images: tuple[Picture, ...]
    seconds: Mapping[str, float]
    peak_bytes: int | None
    backend: str
    device: str
    kernels: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]
    changes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Result(images={self.images}, device={self.device!r}, {self.seconds.get('total', 0.0):.2f} s)"

    def save(self, path: str | Path, *, format: str | None = None) -> tuple[SavedImage, ...]:
        """Writes every picture: one to the path itself, several as name-1, name-2, ... beside it."""
        targets = numbered(Path(path), len(self.images))
        return tuple(
            image.save(target, format=format) for image, target in zip(self.images, targets, strict=True)
        )


Outcome = Result | PortableDitError  # of a request: its pictures, or why there are none


def numbered(path: Path, count: int) -> tuple[Path, ...]:
    """The path itself for one picture, else out-1.png, out-2.png, ..., with as many digits as the last."""
    if count == 1:
        return (path,)
    return tuple(with_number(path, k, count) for k in range(1, count + 1))


def with_number(path: Path, number: int, count: int) -> Path:
    """The path of the number-th file of so many: out-07.png of 12. Raises OutputError for a folder."""
    if not path.name or kind_of(path) == "folder":
        raise OutputError(f"{path}: a folder, and -o names a file. Try {path / 'out.png'}.")
    return path.with_name(f"{path.stem}-{number:0{len(str(count))}}{path.suffix}")


# Events of `Engine.stream`, in the order they come.


@dataclass(frozen=True)
class Queued:
    """The request is right; another one may still be drawing."""


@dataclass(frozen=True)
class Started:
    """Work began on so many images of so many steps each."""

    images: int
    steps: int


@dataclass(frozen=True)
class Encoded:
    """The text encoder has read the prompt."""

    seconds: float


@dataclass(frozen=True, eq=False)
class Stepped:
    """Step 1 to `steps` of an image (counted from 0) is done. preview: uint8 [h, w, 3] when asked for."""

    image: int
    step: int
    steps: int
    seconds: float
    preview: Pixels | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Decoded:
    """The pixels of an image are there; its file may still be in the making."""

    image: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Drawn:
    """An image is complete, its file encoded if the request named a format."""

    image: int
    picture: Picture


@dataclass(frozen=True, eq=False)
class Finished:
    """Everything of the request is done."""

    result: Result


Event = Queued | Started | Encoded | Stepped | Decoded | Drawn | Finished
