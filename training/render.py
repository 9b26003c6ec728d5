"""Draws scenes in batches on any torch device.

A placed sprite is a separable resampling, so each object is two small matrix products with antialiasing
weights (a triangle filter, as wide as one source or one target pixel, whichever is larger). That is exact for
every size and for mirror images, needs no mip levels, and is what a GPU does best.

Letters: N scenes, M objects, S sprite side, H W canvas pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from portable_dit.evaluation.builtin.scenes import COLORS, STYLES, Scene
from training.scenes import BACKGROUND_KINDS, LANDSCAPES, MAX_OBJECTS, RenderPlan, plan_render

GRADIENT, STRIPES = BACKGROUND_KINDS.index("gradient"), BACKGROUND_KINDS.index("stripes")
FIRST_LANDSCAPE = BACKGROUND_KINDS.index(LANDSCAPES[0])
NUM_STRIPE_PERIODS = 4
CLOUDS = (  # x, y, radius; shares of the short side, two a cloud
    (0.16, 0.16, 0.09), (0.26, 0.18, 0.07), (0.8, 0.1, 0.08), (0.7, 0.12, 0.06),
    (0.86, 0.62, 0.07), (0.95, 0.64, 0.06), (0.08, 0.86, 0.08), (0.2, 0.88, 0.06),
)  # fmt: skip
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True)
class Atlas:
    """All sprites with premultiplied colours. sprites: uint8 [concepts * 3, 4, S, S], style fastest."""

    sprites: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.sprites.device

    @staticmethod
    def load(folder: str | Path, *, device: str | torch.device = "cpu", side: int = 256) -> "Atlas":
        """The atlas that `training.build_data` wrote. side: 256 as stored, or 128 / 64 to save memory."""
        styles = []
        for style in STYLES:
            sheet = np.asarray(Image.open(Path(folder) / f"atlas-{style}.webp").convert("RGBA"))
            rows, columns = sheet.shape[0] // 256, sheet.shape[1] // 256
            sprites = sheet.reshape(rows, 256, columns, 256, 4).transpose(
                0, 2, 4, 1, 3
            )  # [row, column, 4, S, S]
            styles.append(torch.from_numpy(sprites.reshape(rows * columns, 4, 256, 256)))
        sprites = torch.stack(styles, dim=1).flatten(0, 1)  # [concepts * 3, 4, 256, 256]
        return Atlas(torch.cat([prepared(chunk.to(device), side) for chunk in sprites.split(128)]))


def prepared(sprites: torch.Tensor, side: int) -> torch.Tensor:
    """Premultiplied and averaged down to `side`, uint8 [M, 4, S, S] -> uint8 [M, 4, side, side]."""
    values = sprites.float()
    values[:, :3] *= values[:, 3:] / 255
    if side != values.shape[-1]:
        values = torch.nn.functional.avg_pool2d(values, values.shape[-1] // side)
    return values.round().to(torch.uint8)


@torch.no_grad()
def render(scenes: RenderPlan | Sequence[Scene], atlas: Atlas, *, width: int, height: int) -> torch.Tensor:
    """Pictures of the scenes, float32 [N, 3, H, W] in 0..1 on the atlas' device."""
    plan = scenes if isinstance(scenes, RenderPlan) else plan_render(scenes)
    device = atlas.device
    images = draw_backgrounds(plan, width, height, device)  # [N, 3, H, W]
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    for slot in range(MAX_OBJECTS):
        present = np.flatnonzero(plan.sprites[:, slot] >= 0)
        if not present.size:
            continue
        index = torch.from_numpy(present).to(device)
        chosen = torch.from_numpy(plan.sprites[present, slot].astype(np.int64)).to(device)
        boxes = torch.from_numpy(plan.boxes[present, slot]).to(device)  # [M, 4]
        x, y, size, flip = boxes.unbind(1)
        pixels = size * min(width, height)
        side = atlas.sprites.shape[-1]
        across = resampling(x * width, pixels, flip, count=width, side=side).to(dtype)  # [M, W, S]
        down = resampling(y * height, pixels, torch.zeros_like(flip), count=height, side=side).to(
            dtype
        )  # [M, H, S]
        sprites = atlas.sprites[chosen].to(dtype).flatten(1, 2)  # [M, 4 S, S]
        wide = (sprites @ (across / 255).transpose(1, 2)).unflatten(1, (4, side))  # [M, 4, S, W]
        layer = (down[:, None] @ wide).float()  # [M, 4, H, W]
        below = images if present.size == len(plan) else images[index]
        above = below * (1 - layer[:, 3:]) + layer[:, :3]
        images = above if present.size == len(plan) else images.index_copy(0, index, above)
    if plan.black_and_white.any():
        gray = torch.from_numpy(plan.black_and_white).to(device)[:, None, None, None]
        luma = (images * torch.tensor(LUMA, device=device)[:, None, None]).sum(dim=1, keepdim=True)
        images = torch.where(gray, luma.expand_as(images), images)
    return images.clamp(0, 1)


def resampling(
    center: torch.Tensor, size: torch.Tensor, flip: torch.Tensor, *, count: int, side: int
) -> torch.Tensor:
    """Weights that bring `side` sprite pixels to `count` canvas pixels on one axis, float32 [M, count, side].

    center, size: of the sprite's box in canvas pixels, float32 [M]. flip: 1 mirrors.
    """
    canvas = torch.arange(count, device=center.device, dtype=torch.float32) + 0.5
    scale = side / size  # sprite pixels in a canvas pixel
    position = (
        (canvas - center[:, None]) * scale[:, None] * (1 - 2 * flip[:, None]) + side / 2 - 0.5
    )  # [M, count]
    reach = scale.clamp_min(1)[:, None, None]
    source = torch.arange(side, device=center.device, dtype=torch.float32)
    weights = (1 - (position[:, :, None] - source).abs() / reach).clamp_min(0)  # [M, count, side]
    return weights / weights.sum(dim=2, keepdim=True).clamp_min(1e-3)


def draw_backgrounds(plan: RenderPlan, width: int, height: int, device: torch.device) -> torch.Tensor:
    """Only what lies behind the objects, float32 [N, 3, H, W]."""
    kind, first, second, mirrored = torch.from_numpy(plan.backgrounds.astype(np.int64)).to(device).unbind(1)
    palette = torch.tensor(list(COLORS.values()), device=device, dtype=torch.float32) / 255  # [12, 3]
    across = (torch.arange(width, device=device, dtype=torch.float32) + 0.5) / width
    down = (torch.arange(height, device=device, dtype=torch.float32) + 0.5) / height
    wave = torch.sin(across * (2 * torch.pi * NUM_STRIPE_PERIODS))
    stripes = (0.5 - wave * width / (2 * torch.pi * NUM_STRIPE_PERIODS)).clamp(0, 1)  # sharp edges
    share = (kind == GRADIENT).float()[:, None, None] * down[:, None]
    share = share + (kind == STRIPES).float()[:, None, None] * stripes  # [N, H or 1, W or 1]
    a, b = palette[first][:, :, None, None], palette[second][:, :, None, None]  # [N, 3, 1, 1]
    images = (a + (b - a) * share[:, None]).expand(-1, -1, height, width)
    natural = np.flatnonzero(plan.backgrounds[:, 0] >= FIRST_LANDSCAPE)
    if natural.size:
        index = torch.from_numpy(natural).to(device)
        plain = torch.stack([landscape(name, width, height, device) for name in LANDSCAPES])
        both = torch.cat([plain, plain.flip(3)])  # [8, 3, H, W]
        images = images.index_copy(0, index, both[kind[index] - FIRST_LANDSCAPE + 4 * mirrored[index]])
    return images


def landscape(name: str, width: int, height: int, device: torch.device) -> torch.Tensor:
    """One of four fixed backdrops, float32 [3, H, W]; shapes keep their proportions on every canvas."""
    short = min(width, height)
    x = (torch.arange(width, device=device, dtype=torch.float32) + 0.5)[None, :] / short  # [1, W]
    y = (torch.arange(height, device=device, dtype=torch.float32) + 0.5)[:, None] / short  # [H, 1]
    v = y * short / height  # 0 top .. 1 bottom

    def color(red: int, green: int, blue: int) -> torch.Tensor:
        return torch.tensor((red, green, blue), device=device, dtype=torch.float32)[:, None, None] / 255

    def blend(top: torch.Tensor, bottom: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        return top + (bottom - top) * share.clamp(0, 1)

    def edge(distance: torch.Tensor, softness: float) -> torch.Tensor:
        """0 where the distance is below -softness, 1 above softness."""
        return (distance / (2 * softness) + 0.5).clamp(0, 1)

    pixel = 1.0 / short
    if name == "sky":
        image = blend(color(92, 158, 232), color(190, 222, 248), v.expand(height, width))
        for cx, cy, radius in CLOUDS:
            dx, dy = x - cx * width / short, (y - cy * height / short) * 1.6
            image = blend(image, color(248, 250, 252), edge(radius - (dx * dx + dy * dy).sqrt(), 0.015))
        return image
    if name == "grass":
        sky = blend(color(130, 190, 240), color(205, 230, 250), (v * 2).expand(height, width))
        meadow = blend(color(124, 190, 80), color(62, 138, 52), ((v - 0.5) * 2).expand(height, width))
        hill = 0.52 + 0.03 * torch.sin(x * 5.0)
        return blend(sky, meadow, edge((v - hill) * height / short, pixel))
    if name == "sea":
        sky = blend(color(150, 205, 245), color(225, 240, 250), (v * 2.2).expand(height, width))
        water = blend(color(52, 140, 190), color(18, 70, 130), ((v - 0.45) * 1.8).expand(height, width))
        crest = torch.sin(x * 13.0 + 1.5 * torch.sin(v * 23.0)) * torch.sin(v * 34.0)
        water = blend(water, color(140, 200, 225), edge(crest - 0.8, 0.12) * 0.6)
        return blend(sky, water, edge((v - 0.45) * height / short, pixel))
    image = blend(color(12, 14, 46), color(44, 44, 104), v.expand(height, width))
    for index in range(20):  # stars on a plastic-number lattice: even, and the same everywhere
        cx, cy = (index * 0.754878 + 0.2) % 1, (index * 0.569840 + 0.45) % 1
        dx, dy = x - cx * width / short, y - cy * height / short
        radius = 0.008 + 0.004 * (index % 3)
        image = blend(image, color(250, 244, 205), edge(radius - (dx * dx + dy * dy).sqrt(), 0.004))
    return image
