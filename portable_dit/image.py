"""Pictures as files: encoded with the record of how they were made, read back, and written whole or never.

Also the one door through which foreign images come in: references are judged by their header before a pixel
is decoded, and everything that was changed on the way to uint8 RGB is told in a note.

Letters: H W pixels.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from portable_dit.errors import ImageError, OutputError, near
from portable_dit.paths import kind_of
from portable_dit.png import encode_png

if TYPE_CHECKING:
    from PIL import Image as PillowImage

Pixels = npt.NDArray[np.uint8]

FORMATS = {"png": ".png", "jpeg": ".jpg", "webp": ".webp"}
RECORD_KEY = "portable-dit"

MAX_REFERENCE_PIXELS = 64 * 1024 * 1024
MAX_REFERENCE_SIDE = 16_384
READABLE = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "GIF", "TIFF", "BMP", "PPM")

EXIF_IFD = 0x8769
USER_COMMENT = 0x9286
ASCII_COMMENT, UTF16_COMMENT = b"ASCII\0\0\0", b"UNICODE\0"
JPEG_EXIF_BYTES = 65_000  # one APP1 segment holds 65,533 bytes; the rest is the directory around the comment


@dataclass(frozen=True, eq=False)
class ReadImage:
    """A foreign image as uint8 RGB [H, W, 3], upright; notes tell what of it was left out or changed."""

    pixels: Pixels
    notes: tuple[str, ...] = ()


def encode(pixels: Pixels, record: Mapping[str, Any], *, format: str = "png", quality: int = 92) -> bytes:
    """The file bytes of a picture with its record inside: text chunks in PNG, EXIF in JPEG and WebP.

    pixels: uint8 RGB [H, W, 3]. record: JSON-able. quality: of JPEG and WebP; PNG is exact.
    """
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    if format == "png":
        return encode_png(pixels, {"Software": "portable-dit", RECORD_KEY: text, **_plain_text(record)})
    if format not in FORMATS:
        raise OutputError(
            f"format {format!r}: not one that pictures are written in.{near(format, tuple(FORMATS))}"
        )
    from PIL import Image

    exif = Image.Exif()
    exif[0x0131] = "portable-dit"  # Software
    exif.get_ifd(EXIF_IFD)[USER_COMMENT] = _user_comment(text)
    packed = exif.tobytes()
    if format == "jpeg" and len(packed) > JPEG_EXIF_BYTES:
        raise OutputError(
            f"format jpeg: the record takes {len(packed):,} bytes; JPEG holds at most {JPEG_EXIF_BYTES:,}. "
            "Use --format png or webp, or a shorter prompt."
        )
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format.upper(), quality=quality, exif=packed)
    return out.getvalue()


def format_of(path: Path, asked: str | None = None) -> str:
    """The format to write a path in: the one asked for, else by its suffix, else PNG. The two must agree."""
    suffix = path.suffix.lower()
    by_suffix = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}.get(suffix)
    if asked is not None and asked not in FORMATS:
        raise OutputError(
            f"--format {asked}: not one that pictures are written in.{near(asked, tuple(FORMATS))}"
        )
    if asked and by_suffix and asked != by_suffix:
        raise OutputError(
            f"--format {asked} for {path.name}: the name says {by_suffix}. "
            f"Name the file {path.stem}{FORMATS[asked]}, or leave out --format."
        )
    if asked is None and by_suffix is None and suffix:
        raise OutputError(
            f"{path.name}: {suffix} is not a format that pictures are written in. "
            "Use .png, .jpg or .webp, or say --format."
        )
    return asked or by_suffix or "png"


def check_writable(path: Path, *, most_bytes: int = 0) -> None:
    """Raise OutputError now, rather than after minutes of work, if a file cannot be written at the path.

    Tried by really creating a file beside it, since modes and mounts say less than the system's answer.
    """
    kind = kind_of(path)
    if kind == "folder":
        raise OutputError(f"{path}: a folder, and -o names a file. Try {path / 'out.png'}.")
    if kind == "other":
        raise OutputError(f"{path}: a device or pipe, which a rename would replace. Name a regular file.")
    target = _real(path)
    if kind_of(target.parent) == "missing":
        raise OutputError(
            f"{path}: the folder {target.parent} does not exist. Make it first: mkdir -p {target.parent}"
        )
    with _part_file(target) as (part, handle):
        os.close(handle)
        part.unlink()
        with contextlib.suppress(FileNotFoundError):
            target.stat()  # raises for a name that is too long for the file system
    free = _free_bytes(target.parent)
    if free is not None and free < most_bytes:
        raise OutputError(
            f"{path}: up to {most_bytes:,} bytes are needed and {target.parent} has {free:,} free. "
            "Make room, or write to another disk."
        )


def write_atomically(path: Path, data: bytes) -> None:
    """The whole file under its name, or nothing: written beside it under another name, then renamed.

    A file that is replaced keeps its mode.
    """
    target = _real(path)
    with _part_file(target) as (part, handle):
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(part, stat.S_IMODE(target.stat().st_mode))
            file.write(data)
        os.replace(part, target)


def _real(path: Path) -> Path:
    """The file that is meant, links followed, since a rename would replace the link."""
    if "\0" in str(path):
        raise OutputError(f"{path}: a file's name cannot hold NUL. Choose another.")
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def _part_file(target: Path) -> Iterator[tuple[Path, int]]:
    """A new hidden file beside the target and its descriptor; gone if anything goes wrong, or on Ctrl-C."""
    part = target.with_name(f".portable-dit-{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        try:
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            yield part, handle
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"{target}: cannot be written in {target.parent} ({reason}). Nothing was left there; choose a "
            "folder that you may write to and that has room, and a shorter name if it is the name."
        ) from error


def _free_bytes(folder: Path) -> int | None:
    if not hasattr(os, "statvfs"):
        return None
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize or None  # some file systems report 0 of 0 when they do not count


def _plain_text(record: Mapping[str, Any]) -> dict[str, str]:
    """The prompt and one line of settings, as picture browsers show them."""
    prompt = str(record.get("prompt", "")).replace("\0", "")
    names = {"steps": "Steps", "seed": "Seed", "size": "Size", "model": "Model", "version": "Version"}
    settings = ", ".join(f"{label}: {record[key]}" for key, label in names.items() if key in record)
    return {"prompt": prompt, "parameters": f"{prompt}\n{settings}"}


def _user_comment(text: str) -> bytes:
    """Text after the character code that EXIF 2.3 asks for; UTF-16 in the byte order of the directory."""
    if text.isascii():
        return ASCII_COMMENT + text.encode("ascii")
    return UTF16_COMMENT + text.encode("utf-16-le", "replace")


def read_record(path: Path) -> dict[str, Any]:
    """The record that `encode` put into a PNG, JPEG or WebP file."""
    with _opened(path, str(path)) as image:
        kind, size = image.format, image.size
        # Text chunks may also come after the pixels in files that other programs have saved again.
        text = getattr(image, "text", {}).get(RECORD_KEY) if kind == "PNG" else _read_user_comment(image)
    found = _parsed(text)
    if found is None:
        raise ImageError(
            f"{path}: a {kind} of {size[0]}x{size[1]} without a portable-dit record. "
            "Only files written by portable-dit, and not stripped of their metadata since, can be inspected."
        )
    return found


def _read_user_comment(image: PillowImage.Image) -> str | None:
    comment = image.getexif().get_ifd(EXIF_IFD).get(USER_COMMENT)
    if not isinstance(comment, bytes):
        return comment if isinstance(comment, str) else None
    code, body = comment[:8], comment[8:]
    if code == UTF16_COMMENT:
        return body.decode("utf-16-le", "replace")
    return body.decode("ascii", "replace") if code == ASCII_COMMENT else None


def _parsed(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        record = json.loads(text)
        json.dumps(record, allow_nan=False)  # what Python reads beyond JSON, others could not read again
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and "version" in record else None


def read_image(source: Path | bytes, *, name: str | None = None) -> ReadImage:
    """Pixels of a reference image as uint8 RGB [H, W, 3], upright, alpha over white, first frame of several.

    Sides and pixel count are read from the header and refused before anything is decoded. Raises ImageError.
    """
    from PIL import ImageOps

    name = name or (str(source) if isinstance(source, Path) else "image")
    with _opened(source, name) as image:
        check_size(image.size, name)
        notes = []
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format != "MPO":  # a phone's MPO holds a small preview of the same picture
            notes.append(f"{name}: has {frames} frames; the first one is used.")
        if _sixteen_bit(image):
            notes.append(f"{name}: 16 bits per channel were brought to 8.")
        image.load()
        pixels = _to_rgb(ImageOps.exif_transpose(image), name, notes)
    return ReadImage(pixels, tuple(notes))


def read_size(source: Path | bytes, *, name: str = "image") -> tuple[int, int]:
    """Width and height that a reference's header says, when `read_image` may take them. Decodes nothing."""
    with _opened(source, name) as image:
        check_size(image.size, name)
        return image.size


def resize(pixels: Pixels, width: int, height: int) -> Pixels:
    """Pixels [H, W, 3] brought to width x height with a Lanczos filter."""
    if pixels.shape[:2] == (height, width):
        return pixels
    from PIL import Image

    resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS)
    return np.array(resized, dtype=np.uint8)


@contextlib.contextmanager
def _opened(source: Path | bytes, name: str) -> Iterator[PillowImage.Image]:
    """The image with only its header read; whatever a damaged or foreign file does becomes an ImageError."""
    from PIL import Image, UnidentifiedImageError

    for plugin in ("Avif", "Mpo", "Tiff", "WebP"):
        importlib.import_module(f"PIL.{plugin}ImagePlugin")  # importing registers the format
    Image.preinit()
    if isinstance(source, Path):
        _require_file(source, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own rule below is stricter
            warnings.simplefilter("ignore", UserWarning)  # damaged EXIF of an image that is otherwise whole
            file = source if isinstance(source, Path) else io.BytesIO(source)
            with Image.open(file, formats=[kind for kind in READABLE if kind in Image.OPEN]) as image:
                yield image
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: {str(error).split(' exceeds')[0]}. {_size_rule()}") from error
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{name}: not an image in a known format. Convert it to one of {', '.join(READABLE)}."
        ) from error
    except PermissionError as error:
        raise ImageError(
            f"{name}: may not be read ({error.strerror}). Change its mode, or copy it."
        ) from error
    except ImageError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, OverflowError) as error:
        raise ImageError(
            f"{name}: damaged or cut short ({error}). The whole file is needed; fetch or export it again."
        ) from error


def _require_file(path: Path, name: str) -> None:
    kind = kind_of(path)
    if kind == "folder":
        raise ImageError(f"{name}: a folder, and an image file is needed. Name a file in it.")
    if kind == "missing" and "://" in name:
        raise ImageError(f"{name}: an address, and nothing is downloaded. Save the image to a file first.")
    if kind == "missing":
        raise ImageError(f"{name}: no such file. Check the path; it is taken from {Path.cwd()}.")
    if kind == "other":
        raise ImageError(f"{name}: a device or pipe. Save the image to a regular file first.")


def check_size(size: tuple[int, int], name: str) -> None:
    """Raise ImageError for a reference image of more pixels, or with a longer side, than is read."""
    width, height = size
    if max(size) > MAX_REFERENCE_SIDE or width * height > MAX_REFERENCE_PIXELS:
        raise ImageError(f"{name}: {width}x{height} pixels. {_size_rule()}")


def _size_rule() -> str:
    return (
        f"Reference images may have at most {MAX_REFERENCE_PIXELS:,} pixels (8192x8192) and no side over "
        f"{MAX_REFERENCE_SIDE:,}. Scale it down first; models see far less."
    )


def _sixteen_bit(image: PillowImage.Image) -> bool:
    return image.mode.startswith("I;16") or any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))


def _to_rgb(image: PillowImage.Image, name: str, notes: list[str]) -> Pixels:
    """Any Pillow mode as uint8 RGB [H, W, 3]."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = _grey_from_wide(image, name, notes)
    elif image.mode == "F":
        raise ImageError(
            f"{name}: floating-point pixels, which have no agreed white. Export it as 8 or 16 bit."
        )
    if image.mode == "CMYK":
        notes.append(f"{name}: CMYK was converted to RGB.")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if np.asarray(image.getchannel("A")).min() < 255:
            notes.append(f"{name}: transparency was laid over white.")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image.convert("RGB"), dtype=np.uint8)


def _grey_from_wide(image: PillowImage.Image, name: str, notes: list[str]) -> PillowImage.Image:
    """Grey of 16 bits, or 16 bits in a 32-bit frame, as 8 bits: 65535 is white."""
    from PIL import Image

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65_535:
        raise ImageError(
            f"{name}: 32-bit integer pixels, which have no agreed white. Export it as 8 or 16 bit."
        )
    clear = values == image.info.get("transparency", -1)  # PNG may call one grey transparent
    if clear.any():
        notes.append(f"{name}: transparency was laid over white.")
        values = np.where(clear, 65_535, values)
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))
