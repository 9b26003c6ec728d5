"""The canvases that HunyuanImage-3.0 draws: one for each shape token, and no others. Torch-free.

From the square outwards one side grows by a sixteenth of the base and the other shrinks, both staying
between half and twice the base; the Instruct forms know four sizes more. The place of a canvas in the list is
the number of its token, `<img_ratio_k>`.
"""

from __future__ import annotations

# Height and width of what the Instruct forms know beside the walk, in the order of their tokens.
INSTRUCT_EXTRAS = ((1024, 768), (1280, 720), (768, 1024), (720, 1280))
EXTRAS_BASE = 1024  # the extras belong to this base size


def canvases(base: int, *, extras: bool) -> tuple[tuple[int, int], ...]:
    """(width, height) of every canvas, in the order of the shape tokens.

    base: pixels of the square's side. extras: with the sizes of the Instruct forms at the end; one of a ratio
    that is there already has no token.
    """
    step, least, most = base // 16, base // 2, base * 2
    found = {(base, base)}
    for sign in (1, -1):
        height = width = base
        while (height, width) not in ((most, least), (least, most)):
            height = min(max(height + sign * step, least), most)
            width = min(max(width - sign * step, least), most)
            found.add((height, width))
    ordered = sorted(found, key=lambda size: size[0] / size[1])
    if extras and base == EXTRAS_BASE:
        ratios = {height / width for height, width in ordered}
        ordered += [size for size in INSTRUCT_EXTRAS if size[0] / size[1] not in ratios]
    return tuple((width, height) for height, width in ordered)
