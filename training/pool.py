"""Training samples on the device: ring buffers that a filler keeps fresh while steps draw from them.

Drawing happens inside the captured step, so it takes no host work: an index is drawn on the device and rows
are gathered. Filling renders and encodes on a stream of its own; finished chunks are written between two
steps.

Letters: B batch, L text rows, R references, P rows of one picture, H W pixels.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_dit.models.h3_image.packing import patchify
from portable_dit.models.h3_image.vae import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    DecoderBlock,
    Downsample,
    ImageVAE,
    ResBlock,
)
from portable_dit.models.tiling import tile_axis
from portable_dit.tiles import blend_tiles, cut_tiles
from training.capture import Captured, compiled
from training.feed import Chunk, Feed
from training.model import TEXT_ROWS, Batch
from training.render import Atlas, render

log = logging.getLogger("training")

RENDER_PIXELS = 256 * 256 * 256  # in one call, about 1 GB of scratch


def render_all(chunk_plan: Any, atlas: Atlas, *, width: int, height: int) -> Tensor:
    """Pictures of any number of scenes as float16 [N, 3, H, W] in 0..1, a bounded number at once."""
    at_once = max(1, RENDER_PIXELS // (width * height))
    parts = [
        render(chunk_plan[i : i + at_once], atlas, width=width, height=height).half()
        for i in range(0, len(chunk_plan), at_once)
    ]
    return torch.cat(parts)


class Encoder:
    """The frozen VAE encoder for filling pools: float16, channels last, one CUDA graph over `tiles` tiles.

    Larger pictures are cut into the VAE's own tiles, so a pooled latent is what the engine would compute.
    """

    def __init__(
        self,
        vae: ImageVAE,
        *,
        device: torch.device,
        tiles: int,
        use_graphs: bool,
        compile_blocks: bool = False,
    ) -> None:
        self.config = vae.config
        half = device.type == "cuda"
        self.dtype = torch.float16 if half else torch.float32
        copy = ImageVAE(vae.config)
        copy.load_state_dict(vae.state_dict())
        self.scale = PixelScale(device)
        self.vae = copy.to(device, self.dtype).to(memory_format=torch.channels_last).requires_grad_(False)
        if compile_blocks:
            compile_vae(self.vae)
        side = vae.config.tile_size
        self.pixels = torch.zeros(tiles, 3, side, side, device=device, dtype=self.dtype)
        self.pixels = self.pixels.to(memory_format=torch.channels_last)
        self.means = torch.zeros(tiles, vae.config.latent_channels, side // 16, side // 16, device=device)
        self.run = Captured(self._encode, device=device, enabled=use_graphs)

    @torch.no_grad()
    def _encode(self) -> None:
        pixels = self.scale.normalize(self.pixels).to(self.dtype)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        self.means.copy_(self.vae.encode_tile(pixels)[0])

    @torch.no_grad()
    def check(self, vae: ImageVAE, pixels: Tensor) -> float:
        """Relative error against the float32 encoder on some tiles; raises RuntimeError above 5 %."""
        exact = vae.encode_tile(vae.normalize_pixels(pixels))[0]
        error = float((self.tiles(pixels) - exact).norm() / exact.norm())
        if not error < 0.05:
            raise RuntimeError(
                f"the {self.dtype} encoder is {error:.3f} off the float32 one; do not train on it."
            )
        return error

    @torch.no_grad()
    def tiles(self, pixels: Tensor) -> Tensor:
        """Raw latents float32 [N, 24, 16, 16] of tiles [N, 3, 256, 256] in 0..1."""
        done = []
        for part in pixels.split(len(self.pixels)):
            self.pixels[: len(part)].copy_(part)
            self.run()
            done.append(self.means[: len(part)].clone())
        return torch.cat(done)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalised latents float32 [N, 24, h, w] of pictures [N, 3, H, W] in 0..1."""
        ratio = self.config.ratio
        rows, columns = (
            tile_axis(side, tile=self.config.tile_size, overlap=self.config.tile_overlap, step=ratio)
            for side in pixels.shape[-2:]
        )
        cut = cut_tiles(pixels, rows, columns)
        latents = self.tiles(cut.flatten(0, 2)).unflatten(0, cut.shape[:3])
        return self.vae_normalize(blend_tiles(latents, rows // ratio, columns // ratio))

    def vae_normalize(self, latents: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(values, device=latents.device)[:, None, None]
            for values in (self.config.latents_mean, self.config.latents_std)
        )
        return (latents - mean) / std


def compile_vae(vae: ImageVAE) -> None:
    """Compile the repeated parts, one version for each shape; the state dict is untouched."""
    run = compiled(_class_forward, enabled=True)
    for module in vae.modules():
        if isinstance(module, ResBlock | Downsample | DecoderBlock):
            module.forward = functools.partial(run, module)
    if vae.decoder.refine is not None:
        vae.decoder.refine.forward = functools.partial(run, vae.decoder.refine)


def _class_forward(module: Any, *arguments: Any) -> Any:
    return type(module).forward(module, *arguments)


class PixelScale:
    """ImageNet normalisation with its constants on the device beforehand, as a CUDA graph needs them."""

    def __init__(self, device: torch.device) -> None:
        self.mean = torch.tensor(IMAGENET_MEAN, device=device)[:, None, None]
        self.std = torch.tensor(IMAGENET_STD, device=device)[:, None, None]

    def normalize(self, pixels: Tensor) -> Tensor:
        """[N, 3, H, W] in 0..1 -> what the encoder takes."""
        return (pixels - self.mean) / self.std

    def denormalize(self, pixels: Tensor) -> Tensor:
        """[N, 3, H, W] from the decoder -> 0..1, not clamped."""
        return pixels * self.std + self.mean


@dataclass(frozen=True)
class Encoded:
    """A chunk ready to be written: tensors of LatentPool, or pictures of PixelPool."""

    pool: str
    tensors: Mapping[str, Tensor]


class Ring:
    """Tensors with a common first dim, overwritten oldest first; `count` rows of them are real."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        first = next(iter(self.tensors.values()))
        self.capacity = len(first)
        self.count = torch.zeros((), device=first.device)
        self.cursor = 0
        self.written = 0

    def write(self, rows: Mapping[str, Tensor]) -> None:
        total = len(next(iter(rows.values())))
        begin = 0
        while begin < total:
            size = min(total - begin, self.capacity - self.cursor)
            for name, tensor in self.tensors.items():
                tensor[self.cursor : self.cursor + size].copy_(rows[name][begin : begin + size])
            self.cursor = (self.cursor + size) % self.capacity
            begin += size
        self.written += total
        self.count.fill_(float(min(self.written, self.capacity)))

    def draw(self, batch: int) -> Tensor:
        """int64 [batch] random places among the real rows; no host work."""
        spread = torch.rand(batch, device=self.count.device) * self.count
        return spread.long().clamp(max=self.capacity - 1)


class PixelPool(Ring):
    """uint8 crops [capacity, 3, side, side] for the VAE."""

    def __init__(self, capacity: int, *, side: int, device: torch.device) -> None:
        self.side = side
        super().__init__({"pixels": torch.zeros(capacity, 3, side, side, dtype=torch.uint8, device=device)})

    def batch(self, size: int) -> Tensor:
        """float32 [size, 3, side, side] in 0..1, half of them mirrored."""
        pixels = self.tensors["pixels"][self.draw(size)].float() / 255
        flip = torch.rand(size, 1, 1, 1, device=pixels.device) < 0.5
        return torch.where(flip, pixels.flip(3), pixels)


class LatentPool(Ring):
    """Encoded records of one bucket: R reference slots, pictures of up to P rows."""

    def __init__(
        self, capacity: int, *, references: int, picture_rows: int, row_size: int, device: torch.device
    ) -> None:
        self.references, self.picture_rows = references, picture_rows
        half = torch.float16 if device.type == "cuda" else torch.float32
        whole = {"device": device, "dtype": torch.int32}
        super().__init__(
            {
                "ids": torch.zeros(capacity, TEXT_ROWS, **whole),
                "length": torch.zeros(capacity, **whole),
                "grid": torch.ones(capacity, 2, **whole),
                "num_references": torch.zeros(capacity, **whole),
                "target": torch.zeros(capacity, picture_rows, row_size, device=device, dtype=half),
                "references": torch.zeros(
                    capacity, references, picture_rows, row_size, device=device, dtype=half
                ),
            }
        )

    def batch(self, size: int) -> Batch:
        """A random batch."""
        place = self.draw(size)
        rows = {name: tensor[place] for name, tensor in self.tensors.items()}
        return as_batch(rows)


def as_batch(rows: Mapping[str, Tensor]) -> Batch:
    """Pool rows in the dtypes that a step computes with."""
    whole = {name: rows[name].long() for name in ("ids", "length", "grid", "num_references")}
    return Batch(**whole, target=rows["target"].float(), references=rows["references"].float())


def encode_chunk(chunk: Chunk, atlas: Atlas, encoder: Encoder, *, picture_rows: int) -> dict[str, Tensor]:
    """Render and encode a chunk's pictures and lay them out as pool rows."""
    device = atlas.device
    pictures = render_all(chunk.plan, atlas, width=chunk.width, height=chunk.height)
    ratio = encoder.config.ratio
    at_once = max(1, len(encoder.pixels) * 256 * 256 // (chunk.width * chunk.height))
    latents = torch.cat([encoder(part) for part in pictures.split(at_once)])
    rows = F.pad(patchify(latents), (0, 0, 0, picture_rows - chunk.width * chunk.height // (2 * ratio) ** 2))
    slots = torch.from_numpy(chunk.slots).to(device)  # [n, R]
    shown = (slots >= 0)[..., None, None]
    references = torch.where(shown, rows[slots.clamp(min=0)], 0.0)
    grid = torch.tensor([chunk.height // (2 * ratio), chunk.width // (2 * ratio)], device=device)
    return {
        "ids": torch.from_numpy(chunk.ids).to(device),
        "length": torch.from_numpy(chunk.length).to(device),
        "grid": grid.expand(len(chunk), 2),
        "num_references": (slots >= 0).sum(dim=1),
        "target": rows[: len(chunk)],
        "references": references,
    }


def crop_chunk(chunk: Chunk, atlas: Atlas, *, side: int) -> dict[str, Tensor]:
    """uint8 crops of rendered scenes, one for each side x side of canvas, at random places."""
    pictures = render_all(chunk.plan, atlas, width=chunk.width, height=chunk.height)
    crops = max(1, chunk.width * chunk.height // side**2)
    parts = []
    for _ in range(crops):
        top = int(torch.randint(0, chunk.height - side + 1, ()))
        left = int(torch.randint(0, chunk.width - side + 1, ()))
        parts.append(pictures[..., top : top + side, left : left + side])
    return {"pixels": (torch.cat(parts).float() * 255).round().to(torch.uint8)}


@dataclass(frozen=True)
class Plan:
    """How one feed fills one pool.

    reuse: times that a sample is drawn on average before another replaces it.
    """

    feed: str
    pool: str
    make: Callable[[Chunk], dict[str, Tensor]]
    reuse: float
    share: float = 1.0  # of the pool's samples that this feed makes


class Filler:
    """Keeps pools fresh: as many new samples as the steps have earned, made on a side stream by a thread.

    On a CPU there is no thread; `between_steps` does the work itself.
    """

    def __init__(
        self, pools: Mapping[str, Ring], plans: Sequence[Plan], feed: Feed, *, device: torch.device
    ) -> None:
        self.pools, self.plans, self.feed, self.device = pools, plans, feed, device
        self.made = dict.fromkeys((plan.feed for plan in plans), 0)
        self.drawn = dict.fromkeys(pools, 0)
        self.ready: queue.Queue[tuple[Encoded, Any]] = queue.Queue(maxsize=4)
        self.error: BaseException | None = None
        self.stopping = threading.Event()
        self.thread: threading.Thread | None = None

    def fill(self, samples: Mapping[str, int]) -> None:
        """Synchronously make at least this many samples for each named feed, as a start."""
        for plan in self.plans:
            while self.made[plan.feed] < samples[plan.feed]:
                encoded = self._make(plan)
                self.pools[encoded.pool].write(encoded.tensors)
        self.made = dict.fromkeys(self.made, 0)

    def start(self) -> None:
        self.stopping.clear()
        if self.device.type == "cuda":
            self.thread = threading.Thread(target=self._loop, daemon=True)
            self.thread.start()

    def between_steps(self, drawn: Mapping[str, int]) -> None:
        """Account for the samples of a step and write what is ready, on the current stream."""
        for name, count in drawn.items():
            self.drawn[name] += count
        if self.error is not None:
            raise RuntimeError("the pool filler failed") from self.error
        if self.thread is None:
            plan = self._next()
            if plan is not None:
                encoded = self._make(plan)
                self.pools[encoded.pool].write(encoded.tensors)
            return
        while not self.ready.empty():
            encoded, event = self.ready.get()
            torch.cuda.current_stream().wait_event(event)
            self.pools[encoded.pool].write(encoded.tensors)
            for tensor in encoded.tensors.values():
                tensor.record_stream(torch.cuda.current_stream())

    def stop(self) -> None:
        self.stopping.set()
        while self.thread is not None and self.thread.is_alive():
            while not self.ready.empty():
                self.ready.get()
            self.thread.join(timeout=0.1)
        self.thread = None

    def _next(self) -> Plan | None:
        owed = [
            (self.drawn[p.pool] * p.share / p.reuse - self.made[p.feed], i) for i, p in enumerate(self.plans)
        ]
        most, which = max(owed)
        return self.plans[which] if most > 0 else None

    def _make(self, plan: Plan) -> Encoded:
        rows = plan.make(self.feed.get(plan.feed))
        self.made[plan.feed] += len(next(iter(rows.values())))
        return Encoded(plan.pool, rows)

    def _loop(self) -> None:
        try:
            stream = torch.cuda.Stream(self.device)
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                while not self.stopping.is_set():
                    plan = self._next()
                    if plan is None:
                        time.sleep(0.002)
                        continue
                    encoded = self._make(plan)
                    event = torch.cuda.Event()
                    event.record(stream)
                    self._hand_over(encoded, event)
        except BaseException as error:  # noqa: BLE001 (re-raised by the training loop)
            self.error = error

    def _hand_over(self, encoded: Encoded, event: Any) -> None:
        while not self.stopping.is_set() and self.ready.full():
            time.sleep(0.002)
        if not self.stopping.is_set():
            self.ready.put((encoded, event))
