"""The model as the engine drives it, from a tiny checkpoint on disk with random weights."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from h3_tiny import CONFIG, FLOAT32, load, write_checkpoint
from torch import Tensor

from portable_dit.errors import RequestError, WeightsError
from portable_dit.models.h3_image.config import H3Config, SchedulerConfig
from portable_dit.models.h3_image.model import H3Image, build
from portable_dit.models.h3_image.packing import pack, patchify, unpatchify
from portable_dit.sampling import denoise, draw_noise, euler_step, predict, run_together

WIDTH, HEIGHT = 96, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("h3"))


@pytest.fixture(scope="module")
def model(folder: Path) -> H3Image:
    return load(folder)


def reference(seed: int, height: int = 64, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@torch.no_grad()
def draw(
    model: H3Image,
    *,
    prompt: str = "a red cat",
    references: tuple[np.ndarray, ...] = (),
    seeds: tuple[int, ...] = (0,),
) -> Tensor:
    """Latents of one picture for each seed, side by side where there are several."""
    schedule = model.schedule(6)
    states = model.encode_prompt(prompt, references)
    denoisers = [model.prepare(states, references, WIDTH, HEIGHT, schedule, seed) for seed in seeds]
    noises = [draw_noise((1, *model.latent_shape(WIDTH, HEIGHT)), seed) for seed in seeds]
    return torch.cat(list(denoise(denoisers, noises, schedule, run=run_together).values()))


def test_the_same_request_twice_is_the_same_to_the_bit(model: H3Image) -> None:
    assert torch.equal(draw(model), draw(model))
    assert torch.equal(draw(model, references=(reference(1),)), draw(model, references=(reference(1),)))


def test_seed_prompt_and_references_each_change_the_picture(model: H3Image) -> None:
    plain = draw(model)
    others = [
        draw(model, seeds=(1,)),
        draw(model, prompt="a blue dog"),
        draw(model, references=(reference(1),)),
        draw(model, references=(reference(2),)),
        draw(model, references=(reference(1), reference(2))),
        draw(model, references=(reference(2), reference(1))),
    ]
    for i, other in enumerate(others):
        assert (other - plain).abs().max() > 1e-3, i
    assert (others[4] - others[5]).abs().max() > 1e-3  # picture 1 is not picture 2


def test_a_picture_does_not_depend_on_its_batch_mates(model: H3Image) -> None:
    for pictures in ((), (reference(1),)):  # whose noise is the seed's
        both = draw(model, references=pictures, seeds=(3, 4))
        for i, seed in enumerate((3, 4)):
            alone = draw(model, references=pictures, seeds=(seed,))
            assert torch.allclose(both[i : i + 1], alone, atol=1e-4)


@torch.no_grad()
def test_fixed_modulation_draws_the_same_as_modulation_made_anew_to_the_bit(
    model: H3Image, folder: Path
) -> None:
    """The loop as the paper has it: the whole network at every step, with its modulation weights."""
    uncached = load(folder, finish=False).dit
    schedule = model.schedule(6)
    text = model.encode_prompt("a red cat", ())
    channels, h, w = model.latent_shape(WIDTH, HEIGHT)
    packing = pack(text.tags, [], (h, w))
    latents = draw_noise((1, channels, h, w), 0)
    for step, time in enumerate(schedule.times):
        rows = uncached(
            patchify(latents),
            text.states[None],
            times=torch.tensor([[time]]),
            row_times=packing.row_times[None],
            tags=packing.tags[None],
            positions=packing.positions[None],
            step=step,
        )
        sigma, sigma_next = schedule.sigmas[step : step + 2]
        latents = euler_step(latents, unpatchify(rows, h, w), time=time, sigma=sigma, sigma_next=sigma_next)
    assert torch.equal(latents, draw(model))


def test_every_step_has_its_own_head(folder: Path) -> None:
    """Silencing head k changes the picture from step k on, and no other head is used there."""
    plain = steps_of(load(folder))
    for silent in range(6):
        model = load(folder)
        assert model.dit.final_layer.heads is not None
        model.dit.final_layer.heads.weight[silent] = 0
        changed = [not torch.equal(a, b) for a, b in zip(plain, steps_of(model), strict=True)]
        assert changed == [step >= silent for step in range(6)]


@torch.no_grad()
def steps_of(model: H3Image) -> list[Tensor]:
    schedule, seen = model.schedule(6), []
    denoiser = model.prepare(model.encode_prompt("a cat", ()), (), WIDTH, HEIGHT, schedule, 0)
    noise = draw_noise((1, *model.latent_shape(WIDTH, HEIGHT)), 0)
    denoise([denoiser], [noise], schedule, on_step=lambda step, latents: seen.append(latents[0]))
    return seen


def test_pixels_have_the_size_that_was_asked_for(model: H3Image) -> None:
    assert model.decode(draw(model)).shape == (3, HEIGHT, WIDTH)


def test_a_preview_is_the_picture_made_small(model: H3Image) -> None:
    large = torch.randn(1, 24, 64, 96)
    assert model.preview(large).shape == (3, 11 * 16, 16 * 16)
    small = torch.randn(1, 24, 4, 4)
    assert torch.equal(model.preview(small), model.decode(small))


def test_read_only_references_are_taken_and_left_alone(model: H3Image) -> None:
    picture = reference(1)
    picture.flags.writeable = False
    before = picture.copy()
    draw(model, references=(picture,))
    assert np.array_equal(picture, before)


def test_references_may_have_sizes_of_their_own(model: H3Image) -> None:
    latents = draw(model, references=(reference(1, 32, 128), reference(2, 96, 32)))
    assert latents.shape == (1, 24, HEIGHT // 16, WIDTH // 16)
    assert latents.isfinite().all()


def test_modulation_weights_are_gone_after_loading(model: H3Image) -> None:
    assert not [name for name, _ in model.dit.named_parameters() if "adaln_proj" in name]


def test_tables_are_made_where_the_transformer_computes_of_weights_that_wait_on_the_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device stands for an accelerator: as with a real one, mixing it with the host fails."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it knows no meta device
    model = load(folder, finish=False)
    owners = (*model.dit.blocks, model.dit.final_layer)
    waiting = [owner.adaln_proj for owner in owners]
    for owner in owners:
        owner.adaln_proj = None
    model.dit.to("meta")
    for owner, projection in zip(owners, waiting, strict=True):
        owner.adaln_proj = projection
    schedule = model.schedule(6)
    model.finish_loading(schedule)
    pictures = (reference(1),)
    prompt = model.encode_prompt("a red cat", pictures)
    denoiser = model.prepare(prompt, pictures, WIDTH, HEIGHT, schedule, 0)
    assert all(block.table.is_meta for block in denoiser.blocks)
    latents = torch.empty(1, *model.latent_shape(WIDTH, HEIGHT), device="meta")
    for step in range(6):
        assert predict([denoiser], [latents], step)[0].is_meta


def test_another_number_of_steps_is_refused(model: H3Image) -> None:
    with pytest.raises(RequestError, match="exactly 6"):
        model.schedule(5)


def test_heads_that_do_not_match_the_steps_are_refused(folder: Path) -> None:
    config = replace(H3Config.from_folder(folder), scheduler=SchedulerConfig(num_inference_steps=4))
    with pytest.raises(WeightsError, match=r"6 output heads .* for 4 steps"):
        build(config, {})


def test_the_small_text_encoder_needs_its_word_list(folder: Path) -> None:
    config = H3Config.from_folder(folder)
    with pytest.raises(WeightsError, match="needs its word list"):
        build(replace(config, folder=None), FLOAT32)


def test_components_are_reached_by_name(model: H3Image) -> None:
    assert model.component("dit") is model.dit
    with pytest.raises(ValueError, match=r"component 'vea'.*Did you mean 'vae'"):
        model.component("vea")
    assert CONFIG.dit.pdd_heads == 6
