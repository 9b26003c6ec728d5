"""Dialects of a checkpoint: every one gives the same parameters, and nothing is guessed in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from h3_tiny import CONFIG, DIT, VAE, randomize
from torch import Tensor

from portable_dit.errors import WeightsError
from portable_dit.models.h3_image.checkpoint import (
    TensorMap,
    interleave_qkv_rows,
    last_tap,
    stack_qkv_rows,
    tensor_map,
)
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.vae import ImageVAE

STACKED = replace(CONFIG, dit=replace(DIT, qkv_rows="stacked"), vae=replace(VAE, qkv_rows="stacked"))
HEADS = ("final_layer.heads.weight", "final_layer.heads.bias")
BASE = ("final_layer.video_out.weight", "final_layer.video_out.bias")


def ours(seed: int = 0) -> dict[str, Tensor]:
    """Parameters of the tiny transformer under our own names."""
    model = H3Transformer(DIT)
    randomize(model, seed)
    return dict(model.state_dict())


def read(plan: TensorMap, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: source.make(*[stored[n] for n in source.names]) for name, source in plan.sources.items()}


def mapped(component: str, stored: Mapping[str, Tensor], config: object = CONFIG) -> dict[str, Tensor]:
    return read(tensor_map(component, {name: tuple(t.shape) for name, t in stored.items()}, config), stored)


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def original(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the original files are: rows of a fused projection interleaved by head, and the frequencies
    stored.
    """
    interleaved = {
        name: interleave_qkv_rows(t, DIT.num_attention_heads) if name.endswith("qkv_proj.weight") else t
        for name, t in parameters.items()
    }
    return {**interleaved, "rope.inv_freq": torch.ones(2)}


@pytest.mark.parametrize("tail", [(), (5,)])
def test_stacking_rows_undoes_interleaving_them(tail: tuple[int, ...]) -> None:
    rows = torch.arange(2 * 3 * 4 * 5)[: 24 if not tail else None].reshape(24, *tail)
    assert torch.equal(stack_qkv_rows(interleave_qkv_rows(rows, 2), 2), rows)
    assert torch.equal(interleave_qkv_rows(stack_qkv_rows(rows, 2), 2), rows)


def test_interleaved_rows_are_query_key_value_of_one_head_after_the_other() -> None:
    rows = torch.tensor(
        [10, 11, 20, 21, 30, 31, 12, 13, 22, 23, 32, 33]
    )  # 2 heads of 2 channels; 1x q, 2x k, 3x v
    assert stack_qkv_rows(rows, 2).tolist() == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]


def test_original_files_give_our_parameters() -> None:
    assert_same(mapped("dit", original(ours())), ours())


def test_our_own_files_are_taken_as_they_are() -> None:
    assert_same(mapped("dit", ours(), STACKED), ours())


def test_a_config_written_from_our_modules_says_that_rows_are_stacked() -> None:
    assert type(DIT).from_dict(DIT.to_dict()).qkv_rows == "stacked"
    assert type(VAE).from_dict(VAE.to_dict()).qkv_rows == "stacked"


def test_files_with_a_modulation_curve_have_stacked_rows() -> None:
    curve = replace(CONFIG, dit=replace(DIT, adaln_form="curve"))
    model = H3Transformer(curve.dit)
    randomize(model)
    assert_same(mapped("dit", dict(model.state_dict()), curve), dict(model.state_dict()))


@pytest.mark.parametrize("with_base", [False, True], ids=["six heads", "base and six heads"])
def test_heads_are_found_as_a_stack_whatever_its_name(with_base: bool) -> None:
    expected = original(ours())
    stored = {name: t for name, t in expected.items() if name not in HEADS}
    for leaf, head, base in zip(("weight", "bias"), HEADS, BASE, strict=True):
        stack = [expected[base][None], expected[head]] if with_base else [expected[head]]
        stored[f"unheard_of.{leaf}"] = torch.cat(stack)
    assert_same(mapped("dit", stored), ours())


@pytest.mark.parametrize("with_base", [False, True], ids=["six heads", "base and six heads"])
def test_heads_are_found_as_single_layers_in_order_of_their_numbers(with_base: bool) -> None:
    expected = original(ours())
    stored = {name: t for name, t in expected.items() if name not in HEADS}
    for leaf, head, base in zip(("weight", "bias"), HEADS, BASE, strict=True):
        layers = [expected[base], *expected[head]] if with_base else list(expected[head])
        for step in reversed(range(len(layers))):
            stored[f"steps.{step + 6}.out.{leaf}"] = layers[step]  # 6 .. 12: as text, 10 sorts before 6
    assert_same(mapped("dit", stored), ours())


@pytest.mark.parametrize("with_base", [False, True], ids=["six heads", "base and six heads"])
@pytest.mark.parametrize("offsets", [False, True], ids=["whole", "offsets"])
def test_heads_are_found_as_a_bank_in_the_base_layer(offsets: bool, with_base: bool) -> None:
    """Offsets are to the first entry: the base layer, or the head of the first step."""
    expected = ours()
    for head, base in zip(HEADS, BASE, strict=True):
        size = 0.05 if offsets else 1.0
        noise = torch.randn(expected[head].shape, generator=torch.Generator().manual_seed(3))
        expected[head] = expected[base] + size * noise * expected[base].abs().mean()
    if not with_base:
        expected |= {base: expected[head][0] for head, base in zip(HEADS, BASE, strict=True)}
    stored = {name: t for name, t in original(expected).items() if name not in HEADS}
    for head, base in zip(HEADS, BASE, strict=True):
        others = expected[head] if with_base else expected[head][1:]
        rest = others - expected[base][None] if offsets else others
        stored[base] = torch.cat([expected[base][None], rest]).flatten(0, 1)
    found = mapped("dit", stored)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-6), name


@pytest.mark.parametrize("count", [3, 5, 8])
def test_a_number_of_heads_that_fits_no_reading_is_refused(count: int) -> None:
    stored = {name: t for name, t in original(ours()).items() if name not in HEADS}
    stored["unheard_of.weight"] = torch.zeros(count, DIT.row_size, DIT.hidden_size)
    stored["unheard_of.bias"] = torch.zeros(count, DIT.row_size)
    with pytest.raises(WeightsError, match=f"holds {count} output heads, its config asks for 6"):
        mapped("dit", stored)


def test_tensors_that_no_dialect_knows_are_left_for_the_loader_to_report() -> None:
    stored = {**original(ours()), "blocks.0.surprise.weight": torch.zeros(3)}
    plan = tensor_map("dit", {name: tuple(t.shape) for name, t in stored.items()}, CONFIG)
    assert plan.unused == {"rope.inv_freq"}
    assert "blocks.0.surprise.weight" in plan.sources
    assert "blocks.0.surprise.weight" not in ours()


def test_a_missing_third_of_a_split_projection_is_missing_and_not_made_up() -> None:
    stored = {f"transformer_blocks.0.attn.to_{part}.weight": torch.zeros(32, 24) for part in "qk"}
    assert mapped("dit", stored) == {}


def test_original_vae_files_give_our_parameters() -> None:
    model = ImageVAE(VAE)
    randomize(model)
    expected = dict(model.state_dict())
    stored = {"decoder.mask_token": torch.zeros(1, 1, 16)}
    for name, tensor in expected.items():
        if ".attn.to_qkv." in name:
            stored[name] = interleave_qkv_rows(tensor, VAE.decoder_num_attention_heads)
        elif name.startswith(("encoder", "quant_conv", "post_quant_conv")) and tensor.ndim == 4:
            taps = 3 if tensor.shape[-1] == 3 else 1
            stored[name] = torch.cat(
                [torch.randn(*tensor.shape[:2], taps - 1, *tensor.shape[2:]), tensor[:, :, None]], 2
            )
        else:
            stored[name] = tensor
    assert_same(mapped("vae", stored), expected)


def test_a_kernel_without_time_is_taken_as_it_is() -> None:
    kernel = torch.randn(4, 3, 3, 3)
    assert torch.equal(last_tap(kernel), kernel)
