"""Pictures from records during training: Euler steps in latent rows, then the VAE.

Letters: B batch, P rows of one picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from portable_dit.evaluation.builtin.scenes import Record
from portable_dit.models.h3_image.packing import patchify, unpatchify
from portable_dit.models.h3_image.vae import ImageVAE
from portable_dit.pixels import to_pixels
from training.captions import Tokenizer
from training.feed import pack_records
from training.gates import contact_sheet
from training.model import CONDITION_TIME, Batch, H3Mini, make_layout
from training.pool import Encoder, as_batch, encode_chunk
from training.render import Atlas, render

TEXT_GUIDANCE, EDIT_GUIDANCE = 3.0, 2.0  # measured in the probe that embedded-default.md reports


def shifted(steps: int, shift: float) -> list[float]:
    """Noise levels 1 -> 0 of a uniform grid under a shift, one more than steps."""
    uniform = [1 - i / steps for i in range(steps + 1)]
    return [shift * u / (1 + (shift - 1) * u) for u in uniform]


def mix_references(references: Tensor) -> Tensor:
    """References as the transformer is fed them: almost clean."""
    return CONDITION_TIME * references + (1 - CONDITION_TIME) * torch.randn_like(references)


@torch.no_grad()
def euler(
    model: H3Mini,
    batch: Batch,
    noise: Tensor,
    sigmas: Sequence[float],
    *,
    guidance: float | None,
    distilled: bool,
) -> Tensor:
    """Denoised rows float32 [B, P, 96].

    guidance None = one evaluation a step. distilled: step k uses head k.
    """
    device = noise.device
    words = model.word_rows(batch.ids, batch.length, plain=True)
    layout = make_layout(model, batch, batch.length)
    empty = make_layout(model, batch, torch.zeros_like(batch.length))
    references = mix_references(batch.references)
    x = noise
    for k, (sigma, following) in enumerate(pairwise(sigmas)):
        times = torch.full((len(x),), 1 - sigma, device=device)
        windows = None
        if distilled:
            windows = torch.zeros(len(x), model.config.dit.pdd_heads, device=device)
            windows[:, k] = 1.0
        v = model.velocity(x, words, references, layout, times, windows=windows, plain=True)
        if guidance is not None:
            v_empty = model.velocity(x, words, references, empty, times, windows=windows, plain=True)
            v = v_empty + guidance * (v - v_empty)
        x = x + (sigma - following) * v
    return x


@dataclass(frozen=True)
class Painter:
    """Draws records with a model: callable as training.gates wants it.

    guidance: whether to use guidance (a teacher needs it, a distilled model does not).
    """

    model: H3Mini
    vae: ImageVAE
    atlas: Atlas
    tokenizer: Tokenizer
    steps: int = 8
    guidance: bool = True
    distilled: bool = False
    batch: int = 128

    def __call__(self, records: Sequence[Record], size: int) -> Tensor:
        """float32 [n, 3, size, size] in 0..1 on the CPU; noise depends on the place in the list."""
        return self.paint(records, size, size)

    @torch.no_grad()
    def paint(self, records: Sequence[Record], width: int, height: int) -> Tensor:
        pictures = torch.zeros(len(records), 3, height, width)
        at_once = max(1, self.batch * 256 * 256 // (width * height))
        for slots in (0, 1, 3):
            wanted = {0: (0,), 1: (1,), 3: (2, 3)}[slots]
            places = [i for i, record in enumerate(records) if len(record.references) in wanted]
            for begin in range(0, len(places), at_once):
                some = places[begin : begin + at_once]
                pictures[some] = self._some([records[i] for i in some], some, slots, width, height).cpu()
        return pictures

    def _some(self, records: list[Record], places: list[int], slots: int, width: int, height: int) -> Tensor:
        device = self.atlas.device
        chunk = pack_records(
            records, name="", slots=slots, width=width, height=height, tokenizer=self.tokenizer
        )
        rows = (width // 32) * (height // 32)
        encoder = Encoder(self.vae, device=device, tiles=32, use_graphs=False)
        batch = as_batch(encode_chunk(chunk, self.atlas, encoder, picture_rows=rows))
        h, w = height // 16, width // 16
        shape = (self.vae.config.latent_channels, h, w)
        noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in places])
        guidance = None if not self.guidance else EDIT_GUIDANCE if slots else TEXT_GUIDANCE
        with self.model.autocast(device):
            sigmas = shifted(self.steps, self.model.config.scheduler.shift)
            result = euler(
                self.model,
                batch,
                patchify(noise).to(device),
                sigmas,
                guidance=guidance,
                distilled=self.distilled,
            )
        pixels = to_pixels(self.vae.decode(unpatchify(result, h, w), max_tiles=64))
        return pixels.permute(0, 3, 1, 2).float() / 255


def distilled(painter: Painter, model: H3Mini) -> Painter:
    """The same painter for a six-step student."""
    return replace(painter, model=model, steps=model.config.dit.pdd_heads, guidance=False, distilled=True)


def sheet(painter: Painter, records: Sequence[Record], path: Path, *, width: int, height: int) -> None:
    """A contact sheet: for edits, the references, the exact target and what was drawn."""
    drawn = painter.paint(records, width, height)
    rows: list[Tensor] = []
    for record, picture in zip(records, drawn, strict=True):
        scenes = [*record.references, record.target] if record.references else [record.target]
        exact = render(scenes, painter.atlas, width=width, height=height).cpu()
        rows.append(torch.cat([exact, picture[None]]))
    for widest, name in ((2, "text"), (3, "edit"), (5, "more")):
        chosen = [i for i, row in enumerate(rows) if len(row) == widest or (widest == 5 and len(row) == 4)]
        if not chosen:
            continue
        final = path.with_name(f"{path.stem}-{name}.png")
        temporary = final.with_name("." + final.name)
        captions = [records[i].caption for i in chosen]
        contact_sheet([rows[i] for i in chosen], captions, temporary, columns=4 * widest)
        temporary.replace(final)
