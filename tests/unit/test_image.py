"""Pictures as files: the record inside, whole files or none, and foreign images read safely."""

import io
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from png_files import png_file

from portable_dit.errors import ImageError, OutputError
from portable_dit.image import (
    check_writable,
    encode,
    format_of,
    read_image,
    read_record,
    resize,
    write_atomically,
)

RECORD = {
    "version": "9.9",
    "prompt": 'a "red" apple',
    "seed": 7,
    "steps": 6,
    "size": "32x24",
    "notes": ["one"],
}


def picture(height: int = 24, width: int = 32) -> np.ndarray:
    down, across = np.mgrid[0:height, 0:width]
    return np.stack([down * 7 % 256, across * 5 % 256, (down + across) % 256], -1).astype(np.uint8)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("prompt", ["plain", '猫 and 🐱 "quoted"\nsecond line', "é" * 4000, "x" * 8000])
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_the_record_is_read_back_from_every_format(tmp_path, kind, prompt):
    record = {**RECORD, "prompt": prompt}
    path = tmp_path / f"out.{kind}"
    path.write_bytes(encode(picture(), record, format=kind))
    assert read_record(path) == record


def test_png_keeps_every_pixel_and_the_others_come_close():
    pixels = picture(64, 64)
    for kind, error in (("png", 0), ("jpeg", 12), ("webp", 12)):
        back = np.asarray(Image.open(io.BytesIO(encode(pixels, RECORD, format=kind))).convert("RGB"))
        assert np.abs(back.astype(int) - pixels).mean() <= error


def test_png_also_says_prompt_and_settings_in_plain_words():
    with Image.open(io.BytesIO(encode(picture(), RECORD))) as image:
        assert image.text["prompt"] == RECORD["prompt"]
        assert image.text["parameters"].endswith("Steps: 6, Seed: 7, Size: 32x24, Version: 9.9")


def test_a_record_too_long_for_jpeg_says_which_format_holds_it():
    with pytest.raises(OutputError, match="png or webp"):
        encode(picture(), {**RECORD, "prompt": "猫" * 40_000}, format="jpeg")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_without_a_record_is_refused_with_what_it_is(tmp_path, kind):
    path = tmp_path / "other"
    path.write_bytes(saved(Image.new("RGB", (5, 4)), kind))
    with pytest.raises(ImageError, match="5x4 without a portable-dit record"):
        read_record(path)


def test_the_format_follows_the_name_and_a_contradiction_is_refused(tmp_path):
    from pathlib import Path

    assert format_of(Path("a.JPG")) == "jpeg"
    assert format_of(Path("a")) == "png"
    assert format_of(Path("a"), "webp") == "webp"
    with pytest.raises(OutputError, match=r"Name the file a\.jpg"):
        format_of(Path("a.png"), "jpeg")
    with pytest.raises(OutputError, match=r"\.bmp is not a format"):
        format_of(Path("a.bmp"))
    with pytest.raises(OutputError, match="Did you mean 'jpeg'"):
        format_of(Path("a"), "jpg")


# Writing


def test_a_file_is_written_whole_with_the_usual_mode_and_nothing_beside_it(tmp_path):
    path = tmp_path / "out.png"
    path.write_bytes(b"old")
    check_writable(path)
    assert path.read_bytes() == b"old"
    with path.open("rb") as reader:
        write_atomically(path, b"new")
        assert reader.read() == b"old"  # who reads meanwhile never sees a mixture
    (tmp_path / "usual").write_bytes(b"")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert {p.name for p in tmp_path.iterdir()} == {"out.png", "usual"}


def test_writing_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "folder" / "real.png")
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert (tmp_path / "folder" / "real.png").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("missing/out.png", "mkdir -p"),
        (".", "a folder"),
        ("/dev/null", "device"),
        ("/proc/out.png", "cannot be"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_work_begins(tmp_path, place, words):
    with pytest.raises(OutputError, match=words):
        check_writable(tmp_path / place)
    assert list(tmp_path.iterdir()) == []
    assert not os.path.isfile("/dev/null")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    for above in tmp_path.parents:
        if above.stat().st_mode & 0o005 != 0o005 and above.stat().st_uid == os.geteuid():
            above.chmod(0o755)
    tmp_path.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(OutputError, match="Permission denied"):
            check_writable(folder / "out.png")
    finally:
        os.seteuid(0)


def test_too_little_room_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(OutputError, match=r"up to 9,000,000,000,000,000 bytes.*free"):
        check_writable(tmp_path / "out.png", most_bytes=9 * 10**15)


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path):
    import resource

    path = tmp_path / "out.png"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OutputError, match="File too large"):
            write_atomically(path, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# Reading foreign images


def test_a_plain_image_comes_through_unchanged_without_notes(tmp_path):
    path = tmp_path / "plain.png"
    Image.fromarray(picture()).save(path)
    read = read_image(path)
    assert np.array_equal(read.pixels, picture())
    assert read.notes == ()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM"])
def test_usual_formats_are_read(kind):
    assert read_image(saved(Image.new("RGB", (8, 6), "red"), kind)).pixels.shape == (6, 8, 3)


@pytest.mark.parametrize(
    "size", [(30_000, 30_000), (30_000, 20), (20, 30_000), (16_000, 16_000), (9000, 9000)]
)
def test_huge_images_are_refused_by_their_header_without_decoding(size):
    with pytest.raises(ImageError, match=r"at most 67,108,864 pixels \(8192x8192\) and no side over 16,384"):
        read_image(png_file(*size))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_truncated_image_is_refused(kind, part):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = saved(Image.fromarray(noise), kind)
    with pytest.raises(ImageError, match=r"damaged|not an image|cut short"):
        read_image(data[: int(len(data) * part)], name="half")


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"%PDF-1.7", b"%!PS-Adobe-3.0 EPSF-3.0", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_refused(data):
    with pytest.raises(ImageError, match="PNG, JPEG"):
        read_image(data, name="thing")


def test_missing_files_folders_and_devices_are_refused(tmp_path):
    with pytest.raises(ImageError, match="no such file"):
        read_image(tmp_path / "missing.png")
    with pytest.raises(ImageError, match="a folder"):
        read_image(tmp_path)
    from pathlib import Path

    with pytest.raises(ImageError, match="device or pipe"):
        read_image(Path("/dev/zero"))


def test_the_first_frame_of_an_animation_is_used_with_a_note():
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP"):
        read = read_image(saved(frames[0], kind, save_all=True, append_images=frames[1:]), name="moving")
        assert read.pixels[4, 4, 0] > 200
        assert read.pixels[4, 4, 2] < 60
        assert "2 frames" in read.notes[0]


def test_cmyk_is_converted_with_a_note():
    read = read_image(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"), name="print")
    assert read.pixels[4, 4, 0] > 200
    assert read.pixels[4, 4, 1] < 60
    assert "CMYK" in read.notes[0]


def test_sixteen_bit_grey_keeps_its_range_with_a_note():
    ramp = np.array([[0, 128, 257, 32_896, 65_535]], np.uint16)
    read = read_image(saved(Image.fromarray(ramp), "PNG"), name="deep")
    assert read.pixels[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert "16 bits" in read.notes[0]


def test_sixteen_bit_colour_is_read_with_a_note():
    row = b"\0" + struct.pack(">HHH", 65_535, 32_896, 0)
    read = read_image(png_file(1, 1, zlib.compress(row), depth=16), name="deep")
    assert read.pixels.tolist() == [[[255, 128, 0]]]
    assert "16 bits" in read.notes[0]


def test_floating_point_pixels_are_refused():
    with pytest.raises(ImageError, match="no agreed white"):
        read_image(saved(Image.new("F", (4, 4), 0.5), "TIFF"))


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_black_and_white_grey_and_palette_become_rgb(mode):
    white = Image.new("RGB", (4, 4), "white").convert(mode)
    assert read_image(saved(white, "PNG")).pixels.tolist() == [[[255] * 3] * 4] * 4


def test_transparency_lies_over_white_with_a_note():
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    read = read_image(saved(half, "PNG"), name="cut-out")
    assert read.pixels[0, 0].tolist() == [255, 255, 255]
    assert "over white" in read.notes[0]
    opaque = Image.new("RGBA", (4, 4), (255, 0, 0, 255))
    assert read_image(saved(opaque, "PNG")).notes == ()
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0])
    assert read_image(saved(palette, "PNG", transparency=0)).pixels[0, 0].tolist() == [255, 255, 255]


@pytest.mark.parametrize("orientation", range(2, 9))
def test_exif_rotation_is_applied(orientation):
    upright = np.zeros((8, 16, 3), np.uint8)
    upright[:4, :8] = 255  # white in the upper left corner
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    stored = Image.fromarray(upright).transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    read = read_image(saved(stored, "PNG", exif=exif), name="phone")
    assert np.array_equal(read.pixels, upright)
    assert read.notes == ()


def test_resizing_keeps_colours_and_gives_the_size():
    half = resize(np.full((40, 60, 3), (10, 200, 30), np.uint8), 30, 20)
    assert half.shape == (20, 30, 3)
    assert np.unique(half.reshape(-1, 3), axis=0).tolist() == [[10, 200, 30]]
