"""Time of PNG encoders on a 4096x4096 picture: python docs/benchmarks/png.py [--side 4096] [--repeats 7]

Prints a table in Markdown. Encoders that are not installed are left out. All are timed in turn, again and
again, so that a busy moment hits all of them; ratios are of medians within one run. CPU seconds count all
threads, and say on a busy machine what the wall clock cannot.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from portable_dit.png import encode_png

Encoder = Callable[[np.ndarray], bytes]


def natural(side: int) -> np.ndarray:
    """What photographs have: power falling with frequency, channels alike, and a little sensor noise."""
    random = np.random.default_rng(0)
    power = np.fft.fftfreq(side)[:, None] ** 2 + np.fft.rfftfreq(side)[None] ** 2
    power[0, 0] = 1
    pixels = np.empty((side, side, 3), np.uint8)
    shared = None
    for channel in range(3):
        spectrum = np.fft.rfft2(random.standard_normal((side, side), dtype=np.float32)) / power**0.6
        spectrum[0, 0] = 0
        own = np.fft.irfft2(spectrum, s=(side, side))
        own /= own.std()
        shared = own if shared is None else shared
        noise = random.standard_normal((side, side), dtype=np.float32)
        pixels[..., channel] = np.clip(128 + 42 * shared + 25 * own + noise, 0, 255)
    return pixels


def flat(side: int) -> np.ndarray:
    """Drawn art: a few even areas with hard borders."""
    pixels = np.full((side, side, 3), (240, 240, 255), np.uint8)
    down, across = np.mgrid[0:side, 0:side]
    for x, y, radius, colour in ((0.3, 0.4, 0.2, (200, 30, 40)), (0.65, 0.6, 0.3, (20, 160, 60))):
        pixels[(down - y * side) ** 2 + (across - x * side) ** 2 < (radius * side) ** 2] = colour
    return pixels


def pillow(**options: object) -> Encoder:
    def encode(pixels: np.ndarray) -> bytes:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG", **options)
        return out.getvalue()

    return encode


def encoders() -> dict[str, Encoder]:
    found: dict[str, Encoder] = {
        "Pillow, default level": pillow(),
        "Pillow, level 1": pillow(compress_level=1),
        "portable_dit.png, 1 thread": lambda pixels: encode_png(pixels, threads=1),
        "portable_dit.png": encode_png,
    }
    try:
        import fpng

        found["fpng (1 thread)"] = lambda pixels: fpng.from_ndarray(pixels)
    except ImportError:
        pass
    try:
        from zlib_ng import zlib_ng

        found["zlib-ng level 2, sub filter (1 thread)"] = lambda pixels: deflated(pixels, zlib_ng.compress, 2)
    except ImportError:
        pass
    found["zlib level 1, sub filter (1 thread)"] = lambda pixels: deflated(pixels, zlib.compress, 1)
    return found


def deflated(pixels: np.ndarray, compress: Callable[[bytes, int], bytes], level: int) -> bytes:
    """The deflate stream alone, of sub-filtered rows: the part of the file that costs time."""
    height, width, _ = pixels.shape
    rows = pixels.reshape(height, width * 3)
    out = np.empty((height, 1 + width * 3), np.uint8)
    out[:, 0] = 1
    out[:, 1:4] = rows[:, :3]
    np.subtract(rows[:, 3:], rows[:, :-3], out=out[:, 4:])
    return compress(out, level)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for name, make in (("natural-like", natural), ("flat", flat)):
        pixels = make(options.side)
        candidates = encoders()
        seconds: dict[str, list[float]] = {label: [] for label in candidates}
        work: dict[str, list[float]] = {label: [] for label in candidates}
        sizes = {}
        for _ in range(options.repeats):
            for label, encode in candidates.items():
                start, worked = time.perf_counter(), time.process_time()
                data = encode(pixels)
                seconds[label].append(time.perf_counter() - start)
                work[label].append(time.process_time() - worked)
                sizes[label] = len(data)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(pixels)))), pixels)
        base = statistics.median(seconds["Pillow, default level"])
        print(f"\n{name}, {options.side}x{options.side}, {pixels.nbytes / 1e6:.1f} MB of pixels\n")
        print("| encoder | median, s | least, s | CPU, s | times Pillow's speed | file, MB |")
        print("| --- | --- | --- | --- | --- | --- |")
        for label, times in sorted(seconds.items(), key=lambda item: statistics.median(item[1])):
            median = statistics.median(times)
            columns = (
                f"{median:.3f}",
                f"{min(times):.3f}",
                f"{statistics.median(work[label]):.3f}",
                f"{base / median:.1f}",
                f"{sizes[label] / 1e6:.2f}",
            )
            print(f"| {label} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
