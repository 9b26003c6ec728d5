"""HunyuanImage-3.0 as the engine sees it: components, and the stages of a request.

The text encoder is the token table: a prompt becomes rows of it, for both guidance branches. Preparing a
request runs them through all layers once and keeps their keys and values.

Letters: B branches, L prefix rows, S rows of a step, C channels, h w latent cells, H W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from portable_dit.errors import near
from portable_dit.masks import Mask, Part
from portable_dit.models.hunyuan_image_3.config import HunyuanConfig
from portable_dit.models.hunyuan_image_3.dit import (
    Block,
    HunyuanTransformer,
    Prefix,
    image_mask,
    image_positions,
    rotary_of,
    text_positions,
)
from portable_dit.models.hunyuan_image_3.spec import HunyuanSpec, tile_axes
from portable_dit.models.hunyuan_image_3.tokens import TextTokens
from portable_dit.models.hunyuan_image_3.vae import Decoder
from portable_dit.models.spec import COMPONENTS, TILE_BATCH, Schedule, TileRunner
from portable_dit.ops import Rotary
from portable_dit.sampling import draw_noise, shift_sigmas, times_of, uniform_sigmas
from portable_dit.tiles import blend_tiles, cut_tiles

PREVIEW_CELLS = 16  # of a preview's longer side
Arguments = tuple[Rotary, Mask, Tensor, Tensor]  # what every block takes beside the rows


class TokenTable(nn.Module):
    """Rows of the token table: ids int64 [..., L] -> [..., L, C]."""

    def __init__(self, config: HunyuanConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.dit.vocab_size, config.dit.hidden_size, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.wte(ids)
        return rows


@dataclass(frozen=True)
class Conditioning:
    """What a prompt becomes, whatever the size of the picture will be.

    text: [2, L, C], with the prompt and without it, up to the marks of the image. marks: [2, C], those of its
    start and size class. ratios: [canvases, C], the shape tokens, of which one is taken.
    """

    text: Tensor
    marks: Tensor
    ratios: Tensor


@dataclass(frozen=True)
class Times:
    """What depends on the steps alone, one row for each: slots [steps, 1, slots, C], into and out of the
    convolutions [steps, 1, C] each.
    """

    slots: Tensor
    patch: Tensor
    final: Tensor


@dataclass(frozen=True)
class KeptPrefix:
    """The prefix of the last picture, and what it was made of: pictures of one request share it."""

    prompt: Conditioning
    canvas: int
    branches: tuple[int, ...]
    prefix: Prefix

    def serves(self, prompt: Conditioning, canvas: int, branches: tuple[int, ...]) -> bool:
        return self.prompt is prompt and (self.canvas, self.branches) == (canvas, branches)


@dataclass(frozen=True)
class BoundBlock:
    """A block with its place among the layers, by which it finds its part of the prefix."""

    block: Block
    layer: int

    def __call__(self, x: Tensor, rotary: Rotary, mask: Mask, keys: Tensor, values: Tensor) -> Tensor:
        out: Tensor = self.block(x, rotary, mask, Prefix(keys, values).of(self.layer))[0]
        return out


@dataclass(frozen=True)
class HunyuanDenoiser:
    """The transformer bound to one request; see `models.spec.Denoiser`. shape: (h, w) of the picture."""

    dit: HunyuanTransformer
    blocks: tuple[BoundBlock, ...]
    shape: tuple[int, int]
    prefix: Prefix
    rotary: Rotary
    mask: Mask
    times: Times

    def embed(self, latents: Tensor, step: int) -> tuple[Tensor, Arguments]:
        """latents: float32 [1, latent channels, h, w] -> rows [B, S, C], and what every block takes."""
        branches = self.prefix.k.shape[1]
        image = self.dit.patch_embed(latents, self.times.patch[step])  # [1, h * w, C], the same for all
        rows = torch.cat([self.times.slots[step], image], dim=1).expand(branches, -1, -1)
        return rows, (self.rotary, self.mask, self.prefix.k, self.prefix.v)

    def part(self, arguments: Arguments, lengths: tuple[int, ...], index: int) -> Arguments:
        """What the blocks take for one part of the rows; see `models.spec.Denoiser`."""
        rotary, mask, keys, values = arguments
        rows = slice(sum(lengths[:index]), sum(lengths[: index + 1]))
        mine = Rotary(rotary.cos[:, rows], rotary.sin[:, rows])
        return mine, Part(mask, lengths, index), keys, values

    def join(self, arguments: Sequence[Arguments]) -> Arguments:
        """What the blocks take for several pictures side by side; see `models.spec.Denoiser`.

        Where rows stand, their number and the canvas say alike for all.
        """
        rotary, mask, _, _ = arguments[0]
        keys = torch.cat([own[2] for own in arguments], dim=1)
        return rotary, mask, keys, torch.cat([own[3] for own in arguments], dim=1)

    def head(self, hidden: Tensor, step: int) -> Tensor:
        """Rows [B, S, C] -> velocity towards the data, float32 [B, latent channels, h, w].

        The model itself points from the data to the noise.
        """
        image = hidden[:, self.dit.config.slots :]
        velocity: Tensor = self.dit.final_layer(image, self.times.final[step], self.shape)
        return -velocity


class HunyuanImage:
    """A loaded model; see `models.spec.Model`."""

    def __init__(
        self,
        *,
        spec: HunyuanSpec,
        table: TokenTable,
        dit: HunyuanTransformer,
        vae: Decoder,
        tokens: TextTokens,
    ) -> None:
        self.spec = spec
        self.table = table
        self.dit = dit
        self.vae = vae
        self.tokens = tokens
        self._kept: KeptPrefix | None = None
        self._kept_times: tuple[tuple[Schedule, float | None], Times] | None = None

    def component(self, name: str) -> nn.Module:
        """The module of "text_encoder", "dit" or "vae"."""
        modules = {"text_encoder": self.table, "dit": self.dit, "vae": self.vae}
        if name not in modules:
            raise ValueError(f"component {name!r}.{near(name, COMPONENTS)}")
        return modules[name]

    def blocks_name(self, component: str) -> str:
        """Where the equal blocks of the transformer are in it; the other components have none."""
        return {"dit": "layers"}[component]

    def finish_loading(self, schedule: Schedule, device: str | None = None) -> None:
        """Lays the convolutions' weights out as rows of channels, as the picture's rows lie in memory; what
        depends on the schedule is small and made when a request asks for it.
        """
        for module in (*self.dit.patch_embed.modules(), *self.dit.final_layer.modules()):
            if isinstance(module, nn.Conv2d):
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)

    def schedule(self, steps: int) -> Schedule:
        """Noise levels of so many steps, shifted once, as the publishers do it."""
        sigmas = shift_sigmas(uniform_sigmas(steps), self.spec.config.generation.flow_shift)
        return Schedule(sigmas, times_of(sigmas))

    @torch.no_grad()
    def encode_prompt(
        self, prompt: str, references: Sequence[np.ndarray], system_prompt: str | None = None
    ) -> Conditioning:
        """Rows of the token table. Raises RequestError when the prompt holds nothing, or too much."""
        marks, text = self.tokens.marks, self.tokens.render(prompt, system_prompt)
        device = self.table.wte.weight.device

        def rows(ids: Sequence[Any]) -> Tensor:
            found: Tensor = self.table(torch.tensor(ids, device=device))
            return found

        both = [text.conditional, text.unconditional]
        return Conditioning(rows(both), rows([marks.image_start, marks.base_size]), rows(marks.ratios))

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
    ) -> HunyuanDenoiser:
        """The prefix run through all layers; see `models.spec.Model`."""
        config, device = self.dit.config, self.dit.device
        prefix = self._prefix(prompt, self.spec.sizes.canvases.index((width, height)), branches)
        _, h, w = self.latent_shape(width, height)
        length = prefix.k.shape[2]
        positions = torch.cat(
            [
                text_positions(length, config.slots, device),
                image_positions(length + config.slots, (h, w), device),
            ]
        )
        return HunyuanDenoiser(
            dit=self.dit,
            blocks=tuple(BoundBlock(cast(Block, block), n) for n, block in enumerate(self.dit.layers)),
            shape=(h, w),
            prefix=prefix,
            rotary=rotary_of(positions, config),
            mask=image_mask(length, config.slots, h * w),
            times=self._times(schedule, guidance),
        )

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """(latent channels, h, w) of a picture."""
        vae = self.spec.config.vae
        return vae.latent_channels, height // vae.ffactor_spatial, width // vae.ffactor_spatial

    def noise(self, width: int, height: int, references: Sequence[np.ndarray], seed: int) -> Tensor:
        """What the picture starts from: float32 [1, C, h, w] on the host, the same on every device."""
        return draw_noise((1, *self.latent_shape(width, height)), seed)

    @torch.no_grad()
    def decode(self, latents: Tensor, *, run: TileRunner, tile_batch: int = TILE_BATCH) -> Tensor:
        """Latents float32 [1, C, h, w] -> values in 0 .. 1 and a little beyond, [3, H, W]."""
        config = self.spec.config.vae
        z = latents / config.scaling_factor
        if not tile_batch:
            return from_centre(run(self.vae, z, 1)[0])
        ratio = config.ffactor_spatial
        rows, columns = tile_axes(z.shape[-1] * ratio, z.shape[-2] * ratio, config)
        tiles = cut_tiles(z, rows // ratio, columns // ratio)  # [rows, columns, 1, C, h, w]
        decoded = run(self.vae, tiles.flatten(0, 2), tile_batch)
        blended = blend_tiles(decoded.reshape(*tiles.shape[:3], *decoded.shape[1:]), rows, columns)
        return from_centre(blended[0])

    @torch.no_grad()
    def preview(self, latents: Tensor) -> Tensor:
        """The picture small, from latents averaged down: values [3, H, W]."""
        shrink = max(latents.shape[-2:]) / PREVIEW_CELLS
        if shrink > 1:
            size = [max(1, round(side / shrink)) for side in latents.shape[-2:]]
            latents = F.interpolate(latents, size=size, mode="area")
        return from_centre(self.vae(latents / self.spec.config.vae.scaling_factor)[0])

    def _prefix(self, prompt: Conditioning, canvas: int, branches: tuple[int, ...]) -> Prefix:
        """Run through all layers, or kept from the picture before, whose numbers are the same."""
        if self._kept is None or not self._kept.serves(prompt, canvas, branches):
            self._kept = None  # its memory is free before the next one is made
            device = self.dit.device
            marks = torch.cat([prompt.marks, prompt.ratios[canvas : canvas + 1]]).to(device)  # [3, C]
            text = prompt.text[list(branches)].to(device)  # [B, L - 3, C]
            states = torch.cat([text, marks.expand(len(branches), -1, -1)], dim=1)
            self._kept = KeptPrefix(prompt, canvas, branches, self.dit.prefill(states))
        return self._kept.prefix

    def _times(self, schedule: Schedule, guidance: float | None) -> Times:
        """Embeddings of all steps, those of the picture before where it had the same."""
        asked = schedule, guidance
        if self._kept_times is None or self._kept_times[0] != asked:
            self._kept_times = asked, self._new_times(schedule, guidance)
        return self._kept_times[1]

    def _new_times(self, schedule: Schedule, guidance: float | None) -> Times:
        """Each step's made on its own, so that none depends on how many there are."""
        dit, device = self.dit, self.dit.device
        levels = 1000.0 * torch.tensor(schedule.sigmas, dtype=torch.float32, device=device)  # [steps + 1]
        scale = torch.tensor([guidance or 1.0], dtype=torch.float32, device=device)
        now = [levels[step : step + 1] for step in range(schedule.steps)]
        after = [levels[step + 1 : step + 2] for step in range(schedule.steps)]
        return Times(
            slots=torch.stack([dit.slots(t, scale, r) for t, r in zip(now, after, strict=True)]),
            patch=torch.stack([dit.time_embed(t) for t in now]),
            final=torch.stack([dit.time_embed_2(t) for t in now]),
        )


def from_centre(values: Tensor) -> Tensor:
    """Values in -1 .. 1 as float32 in 0 .. 1."""
    return values.float() / 2 + 0.5


def build(spec: HunyuanSpec, dtypes: Mapping[str, torch.dtype]) -> HunyuanImage:
    """The model on the meta device, each component in its dtype. Weights come next."""
    config = spec.config
    tokens = TextTokens.of(config)
    with torch.device("meta"):
        return HunyuanImage(
            spec=spec,
            table=TokenTable(config, dtypes["text_encoder"]),
            dit=HunyuanTransformer(config.dit, config.vae.latent_channels, dtypes["dit"]),
            vae=Decoder(config.vae, dtypes["vae"]),
            tokens=tokens,
        )
