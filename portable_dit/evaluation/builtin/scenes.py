"""What a picture of h3-mini's world shows, as data: a background and up to four placed objects."""

from __future__ import annotations

from dataclasses import dataclass

STYLES = ("cartoon", "flat", "3d")

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "orange": (244, 132, 30),
    "yellow": (250, 214, 60),
    "green": (66, 160, 71),
    "teal": (20, 150, 150),
    "blue": (45, 95, 205),
    "purple": (126, 66, 180),
    "pink": (245, 155, 190),
    "brown": (121, 78, 46),
    "black": (26, 26, 26),
    "white": (250, 250, 250),
    "gray": (140, 140, 140),
}
COLOR_NAMES = tuple(COLORS)
WHITE = COLOR_NAMES.index("white")
# Few sizes and places: what varies freely is learned as a blur. Sizes are shares of the canvas' short side.
LARGE, MEDIUM = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Background:
    """kind: one of BACKGROUND_KINDS; first and second index COLORS, where the kind has colours."""

    kind: str
    first: int = WHITE
    second: int = WHITE
    mirrored: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """x, y: the centre as a share of width and height. size: the box as a share of the short side."""

    concept: int
    style: int
    x: float
    y: float
    size: float
    flip: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    background: Background
    objects: tuple[Placed, ...]
    black_and_white: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """kind: a key of one of the mixes. edit: the same for records with references, None for text to image.

    named: the concepts that the caption speaks of, in its order.
    """

    caption: str
    target: Scene
    references: tuple[Scene, ...]
    kind: str
    edit: str | None
    named: tuple[int, ...]
