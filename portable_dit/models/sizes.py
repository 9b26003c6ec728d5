"""Which canvases a model draws, as torch-free data: rules for sides, or a list of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Tier:
    """A size that people ask for by name. shrink: sides are drawn that much longer, then resized."""

    name: str
    area: int  # pixels that are drawn
    shrink: int = 1


@dataclass(frozen=True)
class SizeRules:
    """Which canvases a model draws. Sides in pixels; max_ratio is the longer side over the shorter.

    tiers: sizes with a name. small_pixels: up to this area a picture is drawn at about the area `well_drawn`
    and resized; 0 draws every size as it is. canvases: (width, height) of all that are drawn, where a model
    knows single sizes and no others; the first one of the nearest ratio stands in for any wish.
    """

    multiple: int
    min_side: int
    max_side: int
    max_pixels: int
    max_ratio: float
    default: tuple[int, int]  # width, height
    tiers: tuple[Tier, ...] = ()
    small_pixels: int = 0
    well_drawn: int = 0
    canvases: tuple[tuple[int, int], ...] = ()

    @property
    def largest(self) -> tuple[int, int]:
        """The canvas of the most pixels, and of those the one nearest to a square."""
        highest = (size for width in self._widths() for size in self._beside(width, math.inf))
        return max(
            self.canvases or highest,
            key=lambda size: (size[0] * size[1], -abs(size[0] - size[1])),
            default=self.default,
        )

    def of_ratio(self, area: float, ratio: float) -> tuple[int, int]:
        """The canvas of an area and a ratio, width over height: sides rounded, else the nearest legal one."""
        if self.canvases:
            return self._of_ratio_among(1 / ratio)
        ideal = math.sqrt(area * ratio), math.sqrt(area / ratio)
        wide, high = (round(side / self.multiple) * self.multiple for side in ideal)
        both = (wide, high)
        if self._allows(wide, high) and all(self.min_side <= side <= self.max_side for side in both):
            return both
        return self.nearest(*ideal)

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        """The canvas on which a legal size is drawn: itself, or a whole multiple when it is small."""
        if width * height > self.small_pixels:
            return width, height
        times = max(round(math.sqrt(self.well_drawn / (width * height))), 1)
        while times > 1 and (
            max(width, height) * times > self.max_side or not self._allows(width * times, height * times)
        ):
            times -= 1
        return width * times, height * times

    def nearest(self, width: float, height: float) -> tuple[int, int]:
        """The legal canvas closest to width x height in ratio and in area, of which the ratio counts twice.

        A wish beyond what ratios and areas may be is taken as the last that is still in.
        """
        if self.canvases:
            return self._of_ratio_among(max(height, 1) / max(width, 1))
        ratio = min(max(max(width, 1) / max(height, 1), 1 / self.max_ratio), self.max_ratio)
        least_area = self.min_side**2 * max(ratio, 1 / ratio)
        area = min(max(max(width, 1) * max(height, 1), least_area), self.max_pixels)

        def distance(across: float, down: float) -> float:
            return 2 * abs(math.log(across / down / ratio)) + abs(math.log(across * down / area))

        return self._least(distance, lambda across: across / ratio)

    def closest(self, width: int, height: int) -> tuple[int, int]:
        """The legal canvas whose sides differ least from those that were written down, each by its share."""
        if self.canvases:
            return self.nearest(width, height)
        width, height = max(width, 1), max(height, 1)

        def distance(across: float, down: float) -> float:
            return math.log(across / width) ** 2 + math.log(down / height) ** 2

        return self._least(distance, lambda across: height)

    def _least(
        self, distance: Callable[[float, float], float], best_beside: Callable[[float], float]
    ) -> tuple[int, int]:
        """The legal canvas, width and height, of the least distance.

        best_beside: the height of the least distance beside a width, legal or not. Away from it on either
        side the distance must grow.
        """
        found = math.inf, self.default
        for least, width in sorted((distance(w, best_beside(w)), w) for w in self._widths()):
            if least > found[0]:
                break  # whatever the height
            for size in self._beside(width, best_beside(width)):
                found = min(found, (distance(*size), size))
        return found[1]

    def _widths(self) -> range:
        """Sides that are legal each on their own."""
        return range(-(-self.min_side // self.multiple) * self.multiple, self.max_side + 1, self.multiple)

    def _beside(self, width: int, height: float) -> Iterator[tuple[int, int]]:
        """The legal canvases of this width just below and above a height, as far as the rules let it be."""
        least = max(self.min_side, width / self.max_ratio)
        most = min(self.max_side, width * self.max_ratio, self.max_pixels / width)
        steps = min(max(height, least), most) / self.multiple
        for legal in (math.floor(steps) * self.multiple, math.ceil(steps) * self.multiple):
            if self.min_side <= legal <= self.max_side and self._allows(width, legal):
                yield width, legal

    def _allows(self, width: int, height: int) -> bool:
        """Whether sides that are legal each on their own go together."""
        return width * height <= self.max_pixels and max(width, height) <= self.max_ratio * min(width, height)

    def _of_ratio_among(self, ratio: float) -> tuple[int, int]:
        """The first canvas whose height over width is nearest."""
        return min(self.canvases, key=lambda size: abs(ratio - size[1] / size[0]))
