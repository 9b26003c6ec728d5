"""Our transformer against diffusers' `MiniMaxH3Transformer3DModel`, float32, every parameter random."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import before_denoise
from h3_pairs import dit_pair
from torch import Tensor

from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.packing import pack, patchify, unpatchify
from portable_dit.ops import Modulation

TEXT_ROWS, TARGET = 5, (4, 6)
REFERENCES = [[], [(4, 8)], [(4, 8), (4, 4)]]
TIME, CONDITION_TIME = 0.25, 0.999


def inputs(references: list[tuple[int, int]], seed: int = 1) -> tuple[Tensor, list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    text = torch.randn(1, TEXT_ROWS, 8, generator=generator)
    pictures = [torch.randn(1, 4, h, w, generator=generator) for h, w in references]
    return text, pictures, torch.randn(1, 4, *TARGET, generator=generator)


def theirs_forward(
    model: torch.nn.Module, text: Tensor, references: list[Tensor], target: Tensor, time: float
) -> Tensor:
    """Velocity of the target rows, packed by diffusers' own helpers."""
    layout = before_denoise.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        text_token_tags=torch.ones(text.shape[1], dtype=torch.long),
        references=[SimpleNamespace(kind="image", has_audio=False) for _ in references],
        condition_latents=[reference[:, :, None] for reference in references],
        audio_condition_latents=[],
        num_latent_frames=1,
        latent_height=target.shape[-2],
        latent_width=target.shape[-1],
        num_audio_latents=0,
        patch_size=(1, 2, 2),
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
    )
    positions, tags, video, audio, text_indices, condition_rows, _ = layout
    times, time_indices = before_denoise.MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video, audio, condition_rows, 0, text.shape[1], time, time, max(time, CONDITION_TIME), 1.0
    )
    rows = [before_denoise.patchify_video_latents(z[:, :, None], (1, 2, 2)) for z in (*references, target)]
    output = model(
        hidden_states=torch.cat(rows)[None],
        audio_hidden_states=torch.zeros(1, 0, 6),
        encoder_hidden_states=text,
        timestep=times,
        timestep_indices=time_indices,
        token_tags=tags,
        position_ids=positions,
        video_indices=video,
        audio_indices=audio,
        text_indices=text_indices,
    ).sample
    return output[:, condition_rows:]


def ours_forward(
    model: H3Transformer,
    text: Tensor,
    references: list[Tensor],
    target: Tensor,
    time: float,
    step: int | None = None,
) -> Tensor:
    packing = pack(torch.ones(text.shape[1], dtype=torch.long), [z.shape[-2:] for z in references], TARGET)
    return model(
        patchify(target),
        text,
        times=torch.tensor([[time, max(time, CONDITION_TIME)]]),
        row_times=packing.row_times[None],
        tags=packing.tags[None],
        positions=packing.positions[None],
        references=torch.cat([patchify(z) for z in references], dim=1) if references else None,
        step=step,
    )


def close(ours: Tensor, theirs: Tensor) -> None:
    scale = theirs.abs().max()
    assert scale > 0.1, "the comparison would be silent"
    assert (ours - theirs).abs().max() < 1e-5 * max(float(scale), 1.0)


@pytest.mark.parametrize("references", REFERENCES, ids=["no reference", "one reference", "two references"])
@torch.no_grad()
def test_the_velocity_equals_diffusers(references: list[tuple[int, int]]) -> None:
    theirs, ours = dit_pair()
    case = inputs(references)
    close(ours_forward(ours, *case, TIME), theirs_forward(theirs, *case, TIME))


@torch.no_grad()
def test_each_step_runs_through_its_own_head() -> None:
    theirs, ours = dit_pair(heads=6)
    case = inputs([(4, 4)])
    assert ours.final_layer.heads is not None
    for step, time in enumerate((0.0, 0.02, 0.04, 0.08, 0.14, 0.3)):
        theirs.proj_out.weight.copy_(ours.final_layer.heads.weight[step])
        theirs.proj_out.bias.copy_(ours.final_layer.heads.bias[step])
        close(ours_forward(ours, *case, time, step), theirs_forward(theirs, *case, time))


@torch.no_grad()
def test_fixed_tables_with_the_three_parts_equal_diffusers() -> None:
    theirs, ours = dit_pair()
    text, references, target = inputs([(4, 8), (4, 4)])
    expected = theirs_forward(theirs, text, references, target, TIME)
    tables = ours.modulation_tables([TIME, CONDITION_TIME])
    ours.drop_adaln()
    packing = pack(torch.ones(TEXT_ROWS, dtype=torch.long), [(4, 8), (4, 4)], TARGET)
    prefix = ours.prefix(text, [patchify(z) for z in references])
    hidden, rotary = ours.embed(patchify(target), prefix), ours.rotary(packing.positions[None])
    index = (packing.row_times * 3 + packing.tags)[None]
    for block, table in zip(ours.blocks, tables.blocks, strict=True):
        hidden = block(hidden, Modulation(table, index), rotary)
    final = Modulation(tables.final, torch.zeros(1, packing.target_rows, dtype=torch.long))
    close(ours.head(hidden, packing.target_rows, final), expected)


@torch.no_grad()
def test_padding_rows_change_nothing() -> None:
    """A batch of two prompts of different length gives each the velocity it has alone."""
    theirs, ours = dit_pair()
    text, _, target = inputs([])
    short = text[:, :3]
    alone = [theirs_forward(theirs, t, [], target, TIME) for t in (text, short)]
    padded = torch.cat([short, torch.full((1, 2, 8), 7.0)], dim=1)
    layouts = [pack(torch.ones(length, dtype=torch.long), [], TARGET) for length in (5, 3)]
    positions = layouts[0].positions.repeat(2, 1, 1)
    positions[1, 5:] = layouts[1].positions[3:]
    keep = torch.ones(2, 5 + layouts[0].target_rows, dtype=torch.bool)
    keep[1, 3:5] = False
    both = ours(
        patchify(target).expand(2, -1, -1),
        torch.cat([text, padded]),
        times=torch.full((2, 1), TIME),
        row_times=torch.zeros(keep.shape, dtype=torch.long),
        tags=layouts[0].tags.expand(2, -1),
        positions=positions,
        keep=keep,
    )
    for one, expected in zip(both, alone, strict=True):
        close(one[None], expected)


@torch.no_grad()
def test_samples_of_a_batch_have_their_own_times_and_heads() -> None:
    theirs, ours = dit_pair(heads=6)
    assert ours.final_layer.heads is not None
    text, _, target = inputs([])
    packing = pack(torch.ones(TEXT_ROWS, dtype=torch.long), [], TARGET)
    times, steps = torch.tensor([[0.1], [0.7]]), torch.tensor([4, 1])
    both = ours(
        patchify(target).expand(2, -1, -1),
        text.expand(2, -1, -1),
        times=times,
        row_times=packing.row_times.expand(2, -1),
        tags=packing.tags.expand(2, -1),
        positions=packing.positions.expand(2, -1, -1),
        step=steps,
    )
    for i in range(2):
        theirs.proj_out.weight.copy_(ours.final_layer.heads.weight[steps[i]])
        theirs.proj_out.bias.copy_(ours.final_layer.heads.bias[steps[i]])
        close(both[i : i + 1], theirs_forward(theirs, text, [], target, float(times[i, 0])))


@pytest.mark.parametrize("references", REFERENCES, ids=["no reference", "one reference", "two references"])
def test_positions_and_tags_equal_diffusers_packing(references: list[tuple[int, int]]) -> None:
    tags = torch.tensor([1, 1, 0, 0, 0, 1, 1])
    theirs = before_denoise.MiniMaxH3Ref2VAPrepareLayoutStep.build_ref2va_packed_sequence(
        tags,
        [SimpleNamespace(kind="image", has_audio=False) for _ in references],
        [torch.zeros(1, 24, 1, h, w) for h, w in references],
        [],
        1,
        *TARGET,
        0,
        (1, 2, 2),
        2,
        2,
        0,
    )
    ours = pack(tags, references, TARGET)
    assert torch.equal(ours.positions, theirs[0])  # float64, to the bit
    assert torch.equal(ours.tags, theirs[1])
    assert ours.reference_rows == theirs[5]


def test_patchify_equals_diffusers_and_unpatchify_undoes_it() -> None:
    latents = torch.randn(1, 24, 6, 10)
    rows = patchify(latents)
    assert torch.equal(rows[0], before_denoise.patchify_video_latents(latents[:, :, None], (1, 2, 2)))
    assert torch.equal(unpatchify(rows, 6, 10), latents)
