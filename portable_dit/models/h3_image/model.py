"""H3-Image as the engine sees it: components, and the stages of a request.

Letters: B batch, L text rows, R reference rows, T target rows, S = L + R + T, C channels, h w latent cells, H
W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.errors import WeightsError, near
from portable_dit.masks import NO_MASK, Mask, Part
from portable_dit.models.h3_image.buildable import require_buildable
from portable_dit.models.h3_image.config import H3Config
from portable_dit.models.h3_image.dit import Block, H3Transformer, ModulationTables
from portable_dit.models.h3_image.noise import reference_noises, target_noise
from portable_dit.models.h3_image.packing import TARGET_TIME, Packing, pack, patchify, unpatchify
from portable_dit.models.h3_image.qwen_config import QwenConfig
from portable_dit.models.h3_image.schedule import all_times, make_schedule, reference_time
from portable_dit.models.h3_image.spec import H3Spec, make_spec
from portable_dit.models.h3_image.text import Conditioner, Conditioning, MiniTextEncoder
from portable_dit.models.h3_image.tokens import QwenTokenizer, WordPiece
from portable_dit.models.h3_image.vae import ImageVAE
from portable_dit.models.spec import COMPONENTS, TILE_BATCH, Schedule, TileRunner
from portable_dit.ops import Modulation, Rotary
from portable_dit.tiles import run_tiles

if TYPE_CHECKING:
    from portable_dit.models.h3_image.qwen import QwenConditioner

PREVIEW_CELLS = 16  # of a preview's longer side: one tile, whatever the size of the picture


def build(config: H3Config, dtypes: Mapping[str, torch.dtype], *, spec: H3Spec | None = None) -> H3Image:
    """The model on the meta device, each component in its dtype. Weights come next, then `finish_loading`.

    Raises WeightsError when the parts of the checkpoint do not belong together.
    """
    require_buildable(config)
    with torch.device("meta"):
        return H3Image(
            config=config,
            spec=spec or make_spec("h3-image", config),
            dit=H3Transformer(config.dit, dtypes["dit"]),
            vae=ImageVAE(config.vae, dtypes["vae"]),
            conditioner=_build_conditioner(config, dtypes["text_encoder"]),
        )


def _build_conditioner(config: H3Config, dtype: torch.dtype) -> Conditioner | QwenConditioner:
    """The conditioner that the text encoder's config describes."""
    if not isinstance(config.text, QwenConfig):
        if config.folder is None:
            raise WeightsError(
                "weights: the small text encoder needs its word list. Name a folder, not random."
            )
        words = WordPiece.from_folder(config.folder / "text_encoder")
        return Conditioner(MiniTextEncoder(config.text, dtype), words)
    from portable_dit.models.h3_image.qwen import QwenConditioner, QwenEncoder

    if config.folder is None:  # random weights: tokens without meaning for states without meaning
        from portable_dit.models.h3_image.qwen_files import byte_tokenizer

        tokenizer = QwenTokenizer(byte_tokenizer(config.text))
    else:
        tokenizer = QwenTokenizer.from_checkpoint(config.folder)
    return QwenConditioner(QwenEncoder(config.text, dtype), tokenizer)


@dataclass(frozen=True)
class BoundBlock:
    """A block with its fixed modulation table."""

    block: Block
    table: Tensor

    def __call__(self, x: Tensor, index: Tensor, rotary: Rotary, mask: Mask) -> Tensor:
        out: Tensor = self.block(x, Modulation(self.table, index), rotary, mask)
        return out


@dataclass(frozen=True)
class H3Denoiser:
    """The transformer bound to one request; see `models.spec.Denoiser`.

    shape: (h, w) of the target. prefix: [1, L + R, C]. indices: for each step, int64 [1, S] into the blocks'
    tables. final_indices: for each step, int64 [1, T] into the final one.
    """

    dit: H3Transformer
    blocks: tuple[BoundBlock, ...]
    shape: tuple[int, int]
    prefix: Tensor
    rotary: Rotary
    indices: tuple[Tensor, ...]
    final_table: Tensor
    final_indices: tuple[Tensor, ...]

    def embed(self, latents: Tensor, step: int) -> tuple[Tensor, tuple[Tensor, Rotary, Mask]]:
        """latents: float32 [B, latent channels, h, w] -> hidden rows [B, S, C] and what every block takes."""
        batch = latents.shape[0]
        hidden = self.dit.embed(patchify(latents), self.prefix.expand(batch, -1, -1))
        return hidden, (self.indices[step].expand(batch, -1), self.rotary, NO_MASK)

    def part(
        self, arguments: tuple[Tensor, Rotary, Mask], lengths: tuple[int, ...], index: int
    ) -> tuple[Tensor, Rotary, Mask]:
        """What the blocks take for one part of the rows; see `models.spec.Denoiser`."""
        entries, rotary, mask = arguments
        rows = slice(sum(lengths[:index]), sum(lengths[: index + 1]))
        mine = Rotary(rotary.cos[:, rows], rotary.sin[:, rows])
        return entries[:, rows], mine, Part(mask, lengths, index)

    def join(self, arguments: Sequence[tuple[Tensor, Rotary, Mask]]) -> tuple[Tensor, Rotary, Mask]:
        """What the blocks take for several pictures side by side; see `models.spec.Denoiser`."""
        entries, rotaries, masks = zip(*arguments, strict=True)
        both = Rotary(torch.cat([r.cos for r in rotaries]), torch.cat([r.sin for r in rotaries]))
        return torch.cat(entries), both, masks[0]

    def head(self, hidden: Tensor, step: int) -> Tensor:
        """Hidden rows [B, S, C] -> velocity float32 [B, latent channels, h, w]."""
        index = self.final_indices[step].expand(hidden.shape[0], -1)
        which = step if self.dit.config.pdd_heads else None
        rows = self.dit.head(hidden, index.shape[1], Modulation(self.final_table, index), which)
        return unpatchify(rows, *self.shape)


class H3Image:
    """A loaded model; see `models.spec.Model`."""

    def __init__(
        self,
        *,
        config: H3Config,
        spec: H3Spec,
        dit: H3Transformer,
        vae: ImageVAE,
        conditioner: Conditioner | QwenConditioner,
    ) -> None:
        self.config = config
        self.spec = spec
        self.dit = dit
        self.vae = vae
        self.conditioner = conditioner
        self._times: tuple[float, ...] = ()
        self._tables: ModulationTables | None = None

    def component(self, name: str) -> nn.Module:
        """The module of "text_encoder", "dit" or "vae"."""
        modules = {"text_encoder": self.conditioner.encoder, "dit": self.dit, "vae": self.vae}
        if name not in modules:
            raise ValueError(f"component {name!r}.{near(name, COMPONENTS)}")
        return modules[name]

    def blocks_name(self, component: str) -> str:
        """Where the equal blocks of a component are in it."""
        return {"dit": "blocks", "text_encoder": "layers"}[component]

    @torch.no_grad()
    def finish_loading(self, schedule: Schedule, device: str | None = None) -> None:
        """Turns modulation, which depends on the times alone, into small tables and drops 40 % of the
        weights; see `models.spec.Model`.
        """
        self._times = all_times(self.config.scheduler, schedule)
        self._tables = self.dit.modulation_tables(self._times, device)
        self.dit.drop_adaln()

    def schedule(self, steps: int) -> Schedule:
        """The noise levels for so many steps. Raises RequestError for steps the model is not distilled
        for.
        """
        return make_schedule(self.config.scheduler, steps, heads=self.config.dit.pdd_heads)

    @torch.no_grad()
    def encode_prompt(
        self, prompt: str, references: Sequence[np.ndarray], system_prompt: str | None = None
    ) -> Conditioning:
        """Text states and tags. Raises RequestError when the prompt holds nothing, or too much."""
        return self.conditioner(prompt, references)

    @torch.no_grad()
    def prepare(
        self,
        prompt: Conditioning,
        references: Sequence[np.ndarray],
        width: int,
        height: int,
        schedule: Schedule,
        seed: int,
        *,
        tile_batch: int = TILE_BATCH,
        guidance: float | None = None,
        branches: tuple[int, ...] = (0,),
    ) -> H3Denoiser:
        """References encoded and packed behind the text; see `models.spec.Model`."""
        device = self.dit.video_patch_proj.weight.device
        tables = self._tables_on(device)
        latents = self.reference_latents(references, seed, tile_batch)
        _, h, w = self.latent_shape(width, height)
        packing = pack(prompt.tags, [(z.shape[-2], z.shape[-1]) for z in latents], (h, w))
        prefix = self.dit.prefix(prompt.states[None].to(device), [patchify(z).to(device) for z in latents])
        indices, final_indices = self._indices(packing, schedule, device)
        return H3Denoiser(
            dit=self.dit,
            blocks=tuple(map(BoundBlock, cast(Sequence[Block], self.dit.blocks), tables.blocks)),
            shape=(h, w),
            prefix=prefix,
            rotary=self.dit.rotary(packing.positions[None].float().to(device)),
            indices=indices,
            final_table=tables.final,
            final_indices=final_indices,
        )

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """(latent channels, h, w) of a picture."""
        ratio = self.config.vae.ratio
        return self.config.vae.latent_channels, height // ratio, width // ratio

    def noise(self, width: int, height: int, references: Sequence[np.ndarray], seed: int) -> Tensor:
        """What the picture starts from: float32 [1, C, h, w] on the host, the same on every device."""
        convention = self.config.scheduler.reference_noise
        shapes = self._shapes(references)
        return target_noise(self.latent_shape(width, height), shapes, seed, convention=convention)

    @torch.no_grad()
    def decode(self, latents: Tensor, *, run: TileRunner = run_tiles, tile_batch: int = TILE_BATCH) -> Tensor:
        """Latents float32 [1, C, h, w] -> values in 0 .. 1 and a little beyond, [3, H, W]."""
        return self.vae.decode(latents, run=run, max_tiles=tile_batch)[0]

    @torch.no_grad()
    def preview(self, latents: Tensor) -> Tensor:
        """The picture at one tile's size or less, from latents averaged down: values [3, H, W]."""
        shrink = max(latents.shape[-2:]) / PREVIEW_CELLS
        if shrink > 1:
            size = [max(1, round(side / shrink)) for side in latents.shape[-2:]]
            latents = F.interpolate(latents, size=size, mode="area")
        return self.vae.decode(latents)[0]

    def _tables_on(self, device: torch.device) -> ModulationTables:
        """The fixed tables where the transformer is now; they stay there, since they are small."""
        assert self._tables is not None, "finish_loading comes first"
        blocks = tuple(table.to(device) for table in self._tables.blocks)
        self._tables = ModulationTables(blocks, self._tables.final.to(device))
        return self._tables

    @torch.no_grad()
    def reference_latents(
        self, references: Sequence[np.ndarray], seed: int, tile_batch: int = TILE_BATCH
    ) -> list[Tensor]:
        """References as the transformer sees them, encoded, with a thousandth of noise: [1, C, h, w] each."""
        scheduler, device = self.config.scheduler, self.vae.post_quant_conv.weight.device
        time, shapes = scheduler.condition_time, self._shapes(references)
        noises, _ = reference_noises(shapes, seed, convention=scheduler.reference_noise)
        latents = []
        for image, noise in zip(references, noises, strict=True):
            pixels = torch.from_numpy(np.array(image))[None].to(device)  # a copy: image may be read-only
            clean = self.vae.encode(pixels, max_tiles=min(tile_batch, TILE_BATCH))  # large and few
            latents.append(time * clean + (1.0 - time) * noise.to(device))
        return latents

    def _shapes(self, references: Sequence[np.ndarray]) -> list[tuple[int, int, int]]:
        return [self.latent_shape(image.shape[1], image.shape[0]) for image in references]

    def _indices(
        self, packing: Packing, schedule: Schedule, device: torch.device
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """For every step, where rows find their modulation: [1, S] into block tables, [1, T] into the
        final.
        """
        blocks, finals = [], []
        for time in schedule.times:
            both = (time, reference_time(self.config.scheduler, time))
            places = torch.tensor([self._times.index(value) for value in both])
            index = places[packing.row_times] * self.config.dit.num_tags + packing.tags  # [S]
            blocks.append(index[None].to(device))
            finals.append(torch.full((1, packing.target_rows), int(places[TARGET_TIME]), device=device))
        return tuple(blocks), tuple(finals)
