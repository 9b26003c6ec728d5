"""Stage 1: the image VAE on rendered scenes.

Every picture is learned as 256-pixel tiles, because that is how the engine runs the VAE at any size; tiles
of larger canvases show the same art at up to twice the scale, so crops of those are in the mix.

The loss is pixels, their gradients and a 4x-pooled copy, with the gradient across token borders counted
more: a ViT decoder paints 16-pixel patches, and what the eye sees first is where they do not meet.

Letters: B batch, H W pixels.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from portable_dit.models.h3_image.config import VAEConfig
from portable_dit.models.h3_image.vae import ImageVAE, ResBlock
from portable_dit.pixels import to_pixels
from training.capture import compiled
from training.checkpoint import has_set, load_set, read_index, save_set
from training.feed import Feed, FeedKind
from training.loop import LoopSettings, Meter, Progress, TrainStep, attempt, run_loop
from training.model import fused_attention, set_attention
from training.optim import FlatOptimizer, OptimSettings
from training.parallel import Clock, World
from training.pool import Filler, PixelPool, PixelScale, Plan, Ring, compile_vae, crop_chunk, render_all
from training.render import Atlas

log = logging.getLogger("training")

NAME = "vae"
SCALE_START = 0.2  # of the decoder's layer scales
LOGVAR_START = -4.0  # latents begin with little noise; the KL term adds what it needs


@dataclass(frozen=True)
class VAESettings:
    """batch: 256 px crops in a step. border: extra weight of the gradient across token borders."""

    batch: int = 64
    pool: int = 8192
    first_fill: int = 2048
    reuse: float = 3.0
    l2: float = 2.0
    gradient: float = 1.0
    border: float = 3.0
    pooled: float = 1.0
    kl: float = 5e-4
    eval_images: int = 96
    stat_images: int = 2048
    optim: OptimSettings = field(default_factory=lambda: OptimSettings(adam_rate=8e-4, betas=(0.9, 0.99)))
    loop: LoopSettings = field(default_factory=lambda: LoopSettings(warmup=200, decay_from=0.35))


def feed_kinds(count: int = 256) -> list[FeedKind]:
    """What the VAE learns from: whole 256 px scenes, and crops of larger ones."""
    return [
        FeedKind("scenes-256", None, ((256, 256, 1.0),), count),
        FeedKind("scenes-384", None, ((384, 384, 1.0), (512, 384, 0.5), (384, 512, 0.5)), count // 4),
        FeedKind("scenes-512", None, ((512, 512, 1.0),), count // 4),
    ]


FEED_SHARES = {"scenes-256": 0.5, "scenes-384": 0.2, "scenes-512": 0.3}


def is_muon_matrix(name: str, parameter: nn.Parameter) -> bool:
    """The matrices of the decoder's transformer blocks."""
    return "transformer_blocks" in name and parameter.ndim == 2


def start(config: VAEConfig, *, seed: int) -> ImageVAE:
    """A VAE with fresh weights."""
    torch.manual_seed(seed)
    vae = ImageVAE(config)
    for name, module in vae.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d) and "refine.4" not in name:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)
    nn.init.constant_(vae.quant_conv.bias[config.latent_channels :], LOGVAR_START)
    nn.init.trunc_normal_(vae.decoder.register_tokens, std=0.02)
    for block in vae.decoder.transformer_blocks:
        nn.init.constant_(block.scale1, SCALE_START)
        nn.init.constant_(block.scale2, SCALE_START)
    for module in vae.modules():
        if isinstance(module, ResBlock):
            with torch.no_grad():
                module.conv2.weight.mul_(0.3)  # a calm residual stream at the start
    return vae


def gradient_errors(difference: Tensor, *, token: int = 16) -> tuple[Tensor, Tensor]:
    """Mean absolute gradient error across token borders and inside tokens, of a difference [B, 3, H, W]."""
    border, inside = [], []
    for axis in (2, 3):
        steps = difference.diff(dim=axis).abs().mean(dim=(0, 1, 5 - axis))  # [H - 1] or [W - 1]
        at_border = torch.arange(1, len(steps) + 1, device=steps.device) % token == 0
        border.append(steps[at_border])
        inside.append(steps[~at_border])
    return torch.cat(border).mean(), torch.cat(inside).mean()


def losses(out: Tensor, target: Tensor, mean: Tensor, logvar: Tensor, s: VAESettings) -> dict[str, Tensor]:
    """Weighted loss terms; out and target float32 [B, 3, H, W] in -1..1."""
    difference = out.float() - target
    gradient = difference.new_zeros(())
    for axis in (2, 3):
        steps = difference.diff(dim=axis).abs()
        place = torch.arange(1, steps.shape[axis] + 1, device=steps.device)
        weight = 1.0 + s.border * (place % 16 == 0).float()
        steps = steps * weight.view((-1, 1) if axis == 2 else (1, -1))
        gradient = gradient + steps.mean() / (1 + s.border / 16)
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    return {
        "l1": difference.abs().mean(),
        "l2": s.l2 * difference.square().mean(),
        "gradient": s.gradient * gradient,
        "pooled": s.pooled * F.avg_pool2d(difference, 4).abs().mean(),
        "kl": s.kl * kl,
    }


def psnr(out: Tensor, target: Tensor) -> Tensor:
    """Peak signal to noise in dB for each picture, [B, 3, H, W] in 0..1 -> [B]."""
    error = (out.clamp(0, 1) - target).square().mean(dim=(1, 2, 3))
    return -10 * torch.log10(error.clamp(min=1e-10))


def save_grid(pairs: list[Tensor], path: Path, *, columns: int = 8) -> None:
    """A picture sheet of [N, 3, H, W] tensors in 0..1, one row for each tensor."""
    rows = [torch.cat(list(images[:columns]), dim=2) for images in pairs]
    sheet = (torch.cat(rows, dim=1).clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    temporary = path.with_suffix(".part")
    Image.fromarray(sheet).save(temporary, format="WEBP", quality=88)
    temporary.replace(path)


def load_vae(folder: Path, config: VAEConfig, device: torch.device) -> ImageVAE:
    """The finished VAE with its latent statistics in the config.

    Raises ValueError when it is not finished.
    """
    tensors, index = load_set(folder, NAME)
    note = index["note"]
    if not note.get("latents_std"):
        raise ValueError(f"{folder}: the VAE has no latent statistics yet; run the vae stage to its end.")
    statistics = {key: tuple(note[key]) for key in ("latents_mean", "latents_std")}
    vae = ImageVAE(replace(config, **statistics))
    vae.load_state_dict(tensors)
    return vae.to(device).requires_grad_(False)


def is_finished(folder: Path) -> bool:
    return has_set(folder, NAME) and bool(read_index(folder, NAME)["note"].get("done"))


class VAEStage:
    """Everything of one VAE training run."""

    def __init__(
        self, config: VAEConfig, settings: VAESettings, *, atlas: Atlas, feed: Feed, world: World, out: Path,
        compile_blocks: bool, use_graphs: bool, seed: int,
    ) -> None:  # fmt: skip
        self.config, self.settings, self.world, self.out, self.atlas = config, settings, world, out, atlas
        self.feed = feed
        device = world.device
        self.vae = start(config, seed=seed)
        self.before = 0
        if has_set(out, NAME):
            tensors, index = load_set(out, NAME)
            self.vae.load_state_dict(tensors)
            self.before = index["step"]
            log.info("vae: continues from step %d", self.before)
        self.vae.to(device)
        set_attention(self.vae, fused_attention)
        if compile_blocks:
            compile_vae(self.vae)
        self.optimizer = FlatOptimizer(
            self.vae.named_parameters(), is_matrix=is_muon_matrix, settings=settings.optim
        )
        world.broadcast(self.optimizer.weight)
        self.optimizer.restart_ema()
        torch.manual_seed(seed + 1 + world.rank)
        self.pool = PixelPool(settings.pool, side=config.tile_size, device=device)
        make = functools.partial(crop_chunk, atlas=atlas, side=config.tile_size)
        plans = [Plan(name, "pixels", make, settings.reuse, share=FEED_SHARES[name]) for name in FEED_SHARES]
        pools: Mapping[str, Ring] = {"pixels": self.pool}
        self.filler = Filler(pools, plans, feed, device=device)
        self.filler.fill({name: int(settings.first_fill * share) for name, share in FEED_SHARES.items()})
        self.meter = Meter(("l1", "l2", "gradient", "pooled", "kl"), device)
        self.losses = compiled(losses, enabled=compile_blocks)
        self.fixed = self._fixed_pictures()
        self.use_graphs = use_graphs
        self.scale = PixelScale(device)

    def _autocast(self) -> Any:
        return torch.autocast(
            self.world.device.type, torch.bfloat16, enabled=self.world.device.type == "cuda"
        )

    def _loss(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        pixels = self.pool.batch(self.settings.batch)
        with self._autocast():
            inputs = self.scale.normalize(pixels).contiguous(memory_format=torch.channels_last)
            mean, logvar = self.vae.encode_tile(inputs)
            mean, logvar = mean.float(), logvar.float()
            z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
            out = self.vae.decode_tile(z)
        out = self.scale.denormalize(out.float())
        parts = self.losses(out * 2 - 1, pixels * 2 - 1, mean, logvar, self.settings)
        return sum(parts.values()), parts

    def _fixed_pictures(self) -> dict[int, Tensor]:
        """Scenes for evaluation at 256 and 512 pixels, float32 [N, 3, side, side]."""
        count = self.settings.eval_images
        small = self.feed.get("scenes-256").plan[:count]
        large = self.feed.get("scenes-512").plan[: max(count // 4, 1)]
        return {
            256: render_all(small, self.atlas, width=256, height=256).float(),
            512: render_all(large, self.atlas, width=512, height=512).float(),
        }

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """PSNR and border ratio of the averaged weights at 256 and, tiled, at 512 pixels."""
        vae = ImageVAE(self.config).to(self.world.device)
        vae.load_state_dict(self._averaged())
        result: dict[str, Any] = {}
        for side, pictures in self.fixed.items():
            inputs = (pictures * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
            outputs = torch.cat(
                [vae.decode(vae.encode(part, max_tiles=64), max_tiles=64) for part in inputs.split(32)]
            )
            out = to_pixels(outputs).permute(0, 3, 1, 2).float() / 255
            border, inside = gradient_errors(out - pictures)
            values = psnr(out, pictures)
            result[str(side)] = {
                "psnr": float(values.mean()), "psnr_worst": float(values.min()),
                "border_ratio": float(border / inside),
            }  # fmt: skip
            save_grid(
                [pictures, out, (out - pictures).abs() * 4],
                self.out / f"vae-{side}.webp",
                columns=2048 // side,
            )
        return result

    def _averaged(self) -> dict[str, Tensor]:
        return self.optimizer.named_ema()

    @torch.no_grad()
    def statistics(self, images: int) -> dict[str, list[float]]:
        """Mean and standard deviation of each latent channel over pooled crops."""
        vae = ImageVAE(self.config).to(self.world.device)
        vae.load_state_dict(self._averaged())
        total = torch.zeros(self.config.latent_channels, device=self.world.device, dtype=torch.float64)
        squares, count = total.clone(), 0
        for _ in range(max(1, images // 64)):
            pixels = self.pool.batch(min(64, images))
            mean = vae.encode_tile(vae.normalize_pixels(pixels))[0].double()
            total += mean.sum(dim=(0, 2, 3))
            squares += mean.square().sum(dim=(0, 2, 3))
            count += mean.numel() // mean.shape[1]
        average = total / count
        deviation = (squares / count - average.square()).clamp(min=1e-12).sqrt()
        return {"latents_mean": average.tolist(), "latents_std": deviation.tolist()}

    def save(self, progress: Progress, *, done: bool = False) -> None:
        images = self.settings.stat_images if done else min(self.settings.stat_images, 256)
        note = {"done": done, "samples": progress.samples, "measured": self.measured}
        note |= self.statistics(images)
        save_set(self.out, NAME, self._averaged(), step=self.before + progress.steps, note=note)

    def evaluate(self, progress: Progress) -> None:
        self.measured = self.measure()
        log.info("vae eval at %.3f M: %s", progress.samples / 1e6, json.dumps(self.measured))

    def run(self, make_clock: Callable[[], Clock]) -> None:
        """Train until the clock is done; leaves the finished set in `out`."""
        self.measured: dict[str, Any] = {}
        step = TrainStep(
            self._loss, drawn={"pixels": self.settings.batch}, optimizer=self.optimizer, meter=self.meter,
            world=self.world, use_graphs=self.use_graphs,
        )  # fmt: skip
        self.filler.start()
        clock = make_clock()
        try:
            progress = run_loop(
                "vae", [step], optimizer=self.optimizer, meter=self.meter, filler=self.filler, clock=clock,
                world=self.world, settings=self.settings.loop, save=self.save, evaluate=self.evaluate,
            )  # fmt: skip
        finally:
            self.filler.stop()
        if self.world.is_first:
            attempt(self.evaluate, progress)
            self.save(progress, done=True)
        self.world.barrier()
