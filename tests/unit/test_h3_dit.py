"""The transformer by itself; its numbers against another library are in tests/parity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from h3_tiny import DIT, randomize
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from portable_dit.models.h3_image.config import DiTConfig
from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.packing import pack, patchify

FLOAT32_LAYERS = ("video_patch_proj", "time_embedder", "final_layer.video_out", "final_layer.heads")
TIMES = (0.0, 0.0163934, 0.04, 0.0769231, 0.1428572, 0.2941177, 0.999)


def tiny(config: DiTConfig = DIT, dtype: torch.dtype = torch.float32) -> H3Transformer:
    model = H3Transformer(config, dtype).eval()
    randomize(model)
    return model


def count(model: H3Transformer, dtype: torch.dtype, within: str = "") -> int:
    return sum(p.numel() for n, p in model.named_parameters() if p.dtype == dtype and within in n)


def test_the_full_model_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = H3Transformer(DiTConfig(), torch.bfloat16)
    assert count(model, torch.bfloat16) == 33_105_770_752
    assert count(model, torch.float32) == 16_356_480 + 7 * 516_192
    assert sum(p.numel() for n, p in model.blocks.named_parameters() if "adaln_proj" in n) == 13_010_457_600
    assert sum(p.nbytes for p in model.parameters()) == 66_291_420_800


def test_modulation_as_a_curve_has_the_published_size() -> None:
    with torch.device("meta"):
        model = H3Transformer(replace(DiTConfig(), adaln_form="curve"), torch.bfloat16)
    names = ("adaln_t_table", "adaln_proj")
    assert (
        sum(p.nbytes for n, p in model.named_parameters() if any(name in n for name in names)) == 174_602_272
    )
    assert not any(name.startswith("time_embedder") for name, _ in model.named_parameters())


def test_one_time_of_the_full_model_is_a_table_of_nine_mebibytes() -> None:
    config = DiTConfig()
    values = config.num_layers * config.num_tags * 6 * config.hidden_size + 2 * config.hidden_size
    assert values * 2 / 2**20 == pytest.approx(9.25, abs=0.01)


def test_only_the_named_layers_stay_in_float32() -> None:
    for name, parameter in tiny(dtype=torch.bfloat16).named_parameters():
        expected = torch.float32 if name.startswith(FLOAT32_LAYERS) else torch.bfloat16
        assert parameter.dtype == expected, name


def test_low_precision_gives_a_float32_velocity_near_the_float32_one() -> None:
    case = inputs()
    reference = tiny()(*case[0], **case[1])
    low = tiny(dtype=torch.bfloat16)(*case[0], **case[1])
    assert low.dtype == torch.float32
    error = (low - reference).norm() / reference.norm()
    assert 0 < error < 0.03


@torch.no_grad()
def test_fixed_tables_equal_tables_made_for_each_step_to_the_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(dtype=dtype)
        fixed = model.modulation_tables(TIMES)
        for place, time in enumerate(TIMES):
            embedding = model.time_embedding(torch.tensor([time]))
            for block, table in zip(model.blocks, fixed.blocks, strict=True):
                assert torch.equal(table[3 * place : 3 * place + 3], block.table(embedding))
            assert torch.equal(fixed.final[place : place + 1], model.final_layer.table(embedding))


@torch.no_grad()
def test_fixed_tables_are_made_on_the_device_while_the_weights_wait_elsewhere() -> None:
    """Made where the weights are, an offloaded model would draw with other last bits."""
    tables = tiny(replace(DIT, adaln_form="curve")).modulation_tables(TIMES, "meta")
    assert all(table.is_meta for table in (*tables.blocks, tables.final))


@torch.no_grad()
def test_modulation_weights_that_wait_elsewhere_visit_once_for_all_times() -> None:
    """They are 26 GB: once for each of seven times took 21 s."""

    class Visits(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and out.is_meta and not args[0].is_meta:
                self.numbers += out.numel()
            return out

    model = tiny(replace(DIT, adaln_form="curve"))
    waiting = sum(p.numel() for name, p in model.named_parameters() if "adaln_proj" in name)
    with Visits() as seen:
        model.modulation_tables(TIMES, "meta")
    assert waiting <= seen.numbers <= waiting + model.adaln_t_table.numel() * len(TIMES)


def test_dropping_modulation_weights_frees_them_and_nothing_else() -> None:
    model = tiny()
    before = {name for name, _ in model.named_parameters()}
    model.drop_adaln()
    gone = before - {name for name, _ in model.named_parameters()}
    assert gone == {name for name in before if "adaln_proj" in name}


@torch.no_grad()
def test_a_curve_at_its_grid_points_is_its_rows_and_is_straight_between() -> None:
    model = tiny(replace(DIT, adaln_form="curve", curve_dim=4, curve_grid=9))
    rows = model.adaln_t_table
    assert torch.equal(model.time_embedding(torch.arange(9) / 8), rows)
    between = model.time_embedding(torch.tensor([0.5 / 8, 7.25 / 8]))
    assert torch.allclose(between[0], (rows[0] + rows[1]) / 2)
    assert torch.allclose(between[1], 0.75 * rows[7] + 0.25 * rows[8])


def test_an_initialised_model_starts_as_identity_and_learns_everywhere() -> None:
    """Zero output at the start, yet a step on the outputs opens a gradient to every weight that has a use."""
    model = H3Transformer(replace(DIT, pdd_heads=0))
    model.init_weights(torch.Generator().manual_seed(0))
    args, kwargs = inputs()
    assert model(*args, **{**kwargs, "step": None}).abs().max() == 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "adaln_proj" in name or "final_layer" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model(*args, **{**kwargs, "step": None}).square().mean().backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert silent == []


def test_references_reach_the_target() -> None:
    model = tiny()
    with torch.no_grad():
        args, kwargs = inputs(references=[(4, 4)])
        plain = model(*args, **kwargs)
        changed = model(*args, **{**kwargs, "references": kwargs["references"] + 1})
    assert (changed - plain).abs().max() > 1e-3


def inputs(
    references: list[tuple[int, int]] | None = None, batch: int = 1
) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
    references = references or []
    generator = torch.Generator().manual_seed(2)
    packing = pack(torch.ones(3, dtype=torch.long), references, (4, 4))
    pictures = [patchify(torch.randn(batch, 24, h, w, generator=generator)) for h, w in references]
    args = (
        patchify(torch.randn(batch, 24, 4, 4, generator=generator)),
        torch.randn(batch, 3, DIT.text_dim, generator=generator),
    )
    return args, {
        "times": torch.tensor([[0.25, 0.999]]).expand(batch, -1),
        "row_times": packing.row_times.expand(batch, -1),
        "tags": packing.tags.expand(batch, -1),
        "positions": packing.positions.expand(batch, -1, -1),
        "references": torch.cat(pictures, dim=1) if pictures else None,
        "step": 2,
    }
