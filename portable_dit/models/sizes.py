"""Which canvases a model draws, as torch-free data: rules for sides, or a list of them."""

from __future__ import annotations

import math
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
        canvases = self.canvases or tuple((width, self._highest(width)) for width in self._widths())
        legal = (size for size in canvases if size[1] >= self.min_side and self._allows(*size))
        return max(legal, key=lambda size: (size[0] * size[1], -abs(size[0] - size[1])), default=self.default)

    def _widths(self) -> range:
        """Sides that are legal each on their own."""
        return range(-(-self.min_side // self.multiple) * self.multiple, self.max_side + 1, self.multiple)

    def _highest(self, width: int) -> int:
        """The most that a picture of this width may be high, before the ratio of the sides is judged."""
        most = min(self.max_pixels // width, self.max_side, int(self.max_ratio * width))
        return most // self.multiple * self.multiple

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
        """The legal canvas closest to width x height: in ratio above all, then in area."""
        if self.canvases:
            return self._of_ratio_among(max(height, 1) / max(width, 1))
        ratio = min(max(max(width, 1) / max(height, 1), 1 / self.max_ratio), self.max_ratio)
        least_area = self.min_side**2 * max(ratio, 1 / ratio)
        area = min(max(max(width, 1) * max(height, 1), least_area), self.max_pixels)

        def distance(size: tuple[int, int]) -> float:
            return 2 * abs(math.log(size[0] / size[1] / ratio)) + abs(math.log(size[0] * size[1] / area))

        across, down = self._sides_near(math.sqrt(area * ratio)), self._sides_near(math.sqrt(area / ratio))
        legal = [(w, h) for w in across for h in down if self._allows(w, h)]
        if legal:
            return min(legal, key=distance)
        sides = [min(across), min(down)]
        while not self._allows(*sides):  # ends with the smallest square at the latest
            sides[sides.index(max(sides))] -= self.multiple
        return sides[0], sides[1]

    def closest(self, width: int, height: int) -> tuple[int, int]:
        """The legal canvas whose sides differ least from those that were written down, each by its share."""
        if self.canvases:
            return self.nearest(width, height)
        multiple, sides = self.multiple, (max(width, 1), max(height, 1))
        legal = []
        for across in self._widths():
            least = max(self.min_side, across / self.max_ratio)
            most = min(self.max_side, across * self.max_ratio, self.max_pixels / across)
            for rounded in (math.floor, math.ceil):
                down = rounded(min(max(sides[1], least), most) / multiple) * multiple
                if self.min_side <= down <= self.max_side and self._allows(across, down):
                    legal.append((across, down))

        def difference(size: tuple[int, int]) -> float:
            return sum(math.log(a / b) ** 2 for a, b in zip(size, sides, strict=True))

        return min(legal, key=difference, default=self.nearest(width, height))

    def _allows(self, width: int, height: int) -> bool:
        """Whether sides that are legal each on their own go together."""
        return width * height <= self.max_pixels and max(width, height) <= self.max_ratio * min(width, height)

    def _of_ratio_among(self, ratio: float) -> tuple[int, int]:
        """The first canvas whose height over width is nearest."""
        return min(self.canvases, key=lambda size: abs(ratio - size[1] / size[0]))

    def _sides_near(self, side: float) -> tuple[int, ...]:
        """Legal sides just below and above."""
        below = math.floor(side / self.multiple)
        least, most = math.ceil(self.min_side / self.multiple), self.max_side // self.multiple
        return tuple(min(max(n, least), most) * self.multiple for n in (below - 1, below, below + 1))
