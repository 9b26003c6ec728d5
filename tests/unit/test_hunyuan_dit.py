"""The HunyuanImage-3.0 transformer against goldens that a formula defines, and faults that must move them.

The figures come from an independent implementation of the same formula. Each planted fault is a mistake that
loads and runs; how far it moves the prediction was measured there too, and must come out here.
"""

from collections.abc import Callable
from dataclasses import replace

import hunyuan_golden as golden
import pytest
import torch
from torch import Tensor

from portable_dit.masks import Causal, CausalWithFullSpans
from portable_dit.models.hunyuan_image_3 import dit as module
from portable_dit.models.hunyuan_image_3.dit import (
    HunyuanTransformer,
    image_mask,
    image_positions,
    rotary_of,
    text_positions,
)
from portable_dit.ops import rms_norm, rotate

CPU = torch.device("cpu")
CELLS = 24
PREFIX = len(golden.CONDITIONAL)
FIRST = PREFIX + 1  # of the image


def close(got: Tensor, *expected: float, tolerance: float = 1e-4) -> bool:
    return torch.allclose(got, torch.tensor(expected), rtol=0, atol=tolerance)


def number(value: float) -> Tensor:
    return torch.tensor([float(value)])


@torch.no_grad()
def whole(model: HunyuanTransformer, time: float, noisy: int, *, mask=None, image=None) -> list[Tensor]:
    """The rows after each layer and the prediction, with everything in one sequence."""
    patches = model.patch_embed(golden.latents(noisy), model.time_embed(number(time)))
    slot = model.slots(number(time), number(5), number(0))
    x = torch.cat([golden.prompts(), slot.expand(2, -1, -1), patches.expand(2, -1, -1)], dim=1)
    image = image_positions(FIRST, golden.SHAPE, CPU) if image is None else image
    rotary = rotary_of(torch.cat([text_positions(0, FIRST, CPU), image]), golden.DIT)
    found = []
    for block in model.layers:
        x, _ = block(x, rotary, mask or image_mask(PREFIX, 1, CELLS))
        found.append(x)
    return [*found, model.final_layer(x[:, FIRST:], model.time_embed_2(number(time)), golden.SHAPE)]


@torch.no_grad()
def step(model: HunyuanTransformer, time: float, noisy: int, *, mask=None, rows=slice(0, 2)) -> Tensor:
    """The prediction of a denoise step, with the prefix run before."""
    prefix = model.prefill(golden.prompts()[rows])
    patches = model.patch_embed(golden.latents(noisy), model.time_embed(number(time)))
    x = torch.cat([model.slots(number(time), number(5), number(0)), patches], dim=1)
    x = x.expand(prefix.k.shape[1], -1, -1)
    positions = torch.cat([text_positions(PREFIX, 1, CPU), image_positions(FIRST, golden.SHAPE, CPU)])
    for layer, block in enumerate(model.layers):
        x, _ = block(
            x, rotary_of(positions, golden.DIT), mask or image_mask(PREFIX, 1, CELLS), prefix.of(layer)
        )
    return model.final_layer(x[:, 1:], model.time_embed_2(number(time)), golden.SHAPE)


def test_the_formula_gives_the_weights_that_the_goldens_were_made_with():
    stored = golden.dit_values()
    assert len(stored) == 77
    assert (min(stored), max(stored)) == (
        "final_layer.model.0.emb_layers.1.bias",
        "timestep_emb.mlp.2.weight",
    )
    assert close(stored["model.wte.weight"][1, :4], 0.06207334, 0.05472159, 0.07672487, 0.02360894)
    assert sum(t.double().sum().item() for t in stored.values()) == pytest.approx(517.594502, abs=1e-4)
    assert close(golden.latents(500).flatten()[:4], -1.372549, 0.827016, 1.326956, 1.472956)


@torch.no_grad()
def test_embedders_give_the_golden_rows():
    model = golden.transformer()
    time = number(750)
    assert close(
        model.timestep_emb(time)[0, :6], -0.420784, -0.383377, -0.093123, -0.133660, -0.186179, 0.180665
    )
    rows = model.patch_embed(golden.latents(500), model.time_embed(time))[0]
    assert close(rows[0, :6], -0.252195, -0.039404, 0.198978, -0.366407, 0.089735, -0.252697)
    assert close(rows[23, :3], -0.281132, -0.250877, 0.403504)


def test_the_whole_sequence_gives_the_golden_rows_and_prediction():
    first, _, found = whole(golden.transformer(), 750, 500)
    assert close(first[0, 0, :4], -0.265569, -0.150695, 0.182904, -0.165435)
    assert close(first[0, 8, :4], -1.019749, -0.558716, -0.369306, -0.055929)
    assert close(first[0, 9, :4], -0.977519, 0.535435, 0.670676, -0.294450)
    assert close(first[1, 9, :4], -1.053513, 0.558997, 0.664811, -0.252810)
    assert close(found[0, 0, 0], -0.326860, -0.318393, -0.187580, -0.230306, -0.300169, -0.238615)
    assert close(found[0, 3, 3], -0.152749, 0.026535, 0.093342, 0.248751, -0.027330, 0.062702)
    assert close(found[1, 0, 0], -0.443238, -0.229896, -0.220738, -0.423122, -0.302816, -0.195457)
    assert close(found[1, 3, 3], -0.150082, 0.051350, 0.074056, 0.266946, 0.053491, 0.092874)


def test_a_step_behind_a_kept_prefix_gives_the_golden_prediction():
    found = step(golden.transformer(), 600, 501)
    assert close(found[0, 0, 0], 0.063098, 0.184563, 0.243901, 0.008181, -0.276642, -0.148119)
    assert close(found[0, 3, 3], -0.235443, -0.254407, 0.517812, -0.183880, -0.289944, -0.054423)
    assert close(found[1, 0, 0], -0.006850, 0.324906, 0.399078, 0.098771, -0.476473, -0.137144)
    assert close(found[1, 3, 3], -0.174811, -0.100252, 0.643272, -0.338596, -0.214495, -0.027386)


def test_a_kept_prefix_gives_what_running_it_again_gives():
    model = golden.transformer()
    for time, noisy in ((750, 500), (600, 501)):
        assert (step(model, time, noisy) - whole(model, time, noisy)[-1]).abs().max() < 2e-6


def test_a_branch_alone_gives_what_it_gives_beside_the_other():
    model = golden.transformer()
    both = step(model, 600, 501)
    for branch in (0, 1):
        alone = step(model, 600, 501, rows=slice(branch, branch + 1))
        assert (alone[0] - both[branch]).abs().max() < 2e-6


def test_positions_of_the_image_lie_centred_on_the_diagonal():
    found = image_positions(9, (4, 6), CPU)
    assert found[0].tolist() == [19, 18]
    assert found[-1].tolist() == [22, 23]
    small = image_positions(2, (2, 3), CPU)
    assert small[:, 0].tolist() == [4, 4, 4, 5, 5, 5]
    assert small[:, 1].tolist() == [3, 4, 5, 3, 4, 5]
    odd = image_positions(0, (80, 45), CPU)  # half places are cut off
    assert odd[0].tolist() == [1760, 1777]
    wide = image_positions(100, (64, 64), CPU)
    assert (wide[0].tolist(), wide[-1].tolist()) == ([2116, 2116], [2179, 2179])


# --- planted faults: what each moves the prediction by at most, at t = 750 ---


def _norm_before_rotary(model, patch):
    def run(x, weight, eps, rotary):
        return rotate(rms_norm(x.float(), weight, eps), rotary)

    for block in model.layers:
        block.self_attn.query_layernorm.run = block.self_attn.key_layernorm.run = run


def _halves_swapped(model, patch):
    for block in model.layers:
        for layer in (block.mlp.shared_mlp.gate_and_up_proj, block.mlp.experts.gate_and_up_proj):
            layer.weight.data = torch.cat(layer.weight.data.chunk(2, dim=-2)[::-1], dim=-2)


def _x_and_y_swapped(model, patch):
    made = module.rotary_of
    patch.setattr("test_hunyuan_dit.rotary_of", lambda positions, config: made(positions.flip(-1), config))


def _shares_not_scaled(model, patch):
    for block in model.layers:
        run = block.mlp.gate.run

        def raw(x, weight, top_k, run=run):
            index, _ = run(x, weight, top_k)
            return index, torch.nn.functional.linear(x, weight).softmax(-1).gather(1, index)

        block.mlp.gate.run = raw


def _no_shared_mlp(model, patch):
    for block in model.layers:
        block.mlp.shared_mlp.down_proj.weight.data.zero_()


def _sines_first(model, patch):
    for embedder in (model.timestep_emb, model.time_embed, model.time_embed_2):
        embedder.proj_in.weight.data = torch.cat(embedder.proj_in.weight.data.chunk(2, dim=1)[::-1], dim=1)


def _silu_in_the_time_mlp(model, patch):
    patch.setattr(module.F, "gelu", torch.nn.functional.silu)


def _shift_before_scale(model, patch):
    for block in (model.patch_embed.block, model.final_layer.block):
        for part in (block.time_proj.weight, block.time_proj.bias):
            part.data = torch.cat(part.data.chunk(2)[::-1])


def _rows_not_regrouped(model, patch):
    stored = golden.dit_values()
    for layer, block in enumerate(model.layers):
        block.self_attn.qkv_proj.weight.data = stored[f"model.layers.{layer}.self_attn.qkv_proj.weight"]


def _one_time_embedding_for_both_ends(model, patch):
    model.time_embed_2 = model.time_embed


FAULTS: list[tuple[Callable, float]] = [
    (_norm_before_rotary, 0.068),
    (_halves_swapped, 0.355),
    (_x_and_y_swapped, 0.199),
    (_shares_not_scaled, 0.110),
    (_no_shared_mlp, 0.458),
    (_sines_first, 0.192),
    (_silu_in_the_time_mlp, 0.038),
    (_shift_before_scale, 0.107),
    (_rows_not_regrouped, 0.441),
    (_one_time_embedding_for_both_ends, 0.101),
]


@pytest.mark.parametrize(("plant", "moves"), FAULTS, ids=[plant.__name__[1:] for plant, _ in FAULTS])
def test_a_planted_fault_moves_the_prediction_as_far_as_it_is_known_to(plant, moves, monkeypatch):
    right = whole(golden.transformer(), 750, 500)[-1]
    faulty = golden.transformer()
    plant(faulty, monkeypatch)
    assert (whole(faulty, 750, 500)[-1] - right).abs().max() == pytest.approx(moves, abs=6e-4)


@pytest.mark.parametrize(
    ("changed", "moves"),
    [
        ({"image": text_positions(FIRST, CELLS, CPU)}, 0.244),
        ({"image": image_positions(FIRST, golden.SHAPE, CPU) - torch.tensor([10.0, 9.0])}, 0.159),
        ({"mask": Causal()}, 0.345),
    ],
    ids=["text_positions_for_the_image", "grid_not_centred", "causal_image"],
)
def test_a_wrong_place_or_mask_moves_the_prediction_as_far_as_it_is_known_to(changed, moves):
    model = golden.transformer()
    off = whole(model, 750, 500, **changed)[-1] - whole(model, 750, 500)[-1]
    assert off.abs().max() == pytest.approx(moves, abs=6e-4)


def test_a_time_slot_that_sees_the_image_moves_the_next_step():
    model = golden.transformer()
    sees_all = CausalWithFullSpans(((PREFIX, FIRST + CELLS),))
    off = step(model, 600, 501, mask=sees_all) - step(model, 600, 501)
    assert off.abs().max() == pytest.approx(0.041, abs=6e-4)


def test_bfloat16_stays_near_float32():
    """Near ties of the router may fall otherwise, so single values move; the prediction as a whole does not.

    A port to a device with eight bits of mantissa reports a correlation of 0.9976 over 32 layers.
    """
    exact = step(golden.transformer(), 600, 501)
    rounded = step(golden.transformer().bfloat16(), 600, 501)
    assert rounded.dtype is torch.float32
    assert not torch.equal(exact, rounded)
    both = torch.stack([exact.flatten(), rounded.flatten()])
    assert torch.corrcoef(both)[0, 1] > 0.9976


def test_the_distil_form_has_slots_for_guidance_and_next_time():
    config = replace(golden.DIT, cfg_distilled=True, use_meanflow=True)
    model = HunyuanTransformer(config, golden.VAE.latent_channels).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.1, generator=generator)
    with torch.no_grad():
        plain = model.slots(number(750), number(2.5), number(600))
        other = model.slots(number(750), number(5), number(0))
        # 2500 is between two numbers of bfloat16, and becomes 2496.
        rounded = model.guidance_emb(number(2496))
    assert plain.shape == (1, 3, 64)
    assert torch.equal(plain[0, 0], other[0, 0])
    assert not torch.equal(plain[0, 1], other[0, 1])
    assert not torch.equal(plain[0, 2], other[0, 2])
    assert torch.equal(plain[0, 1], rounded[0])
