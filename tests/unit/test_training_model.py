"""The padded batches of training against the engine's own forward pass, and the flat optimiser."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from portable_dit.models.h3_image.dit import H3Transformer
from portable_dit.models.h3_image.packing import pack

pytest.importorskip("training.model")

from training.checkpoint import decode, encode
from training.model import Batch, H3Mini, make_layout, tiny_config
from training.optim import FlatOptimizer, OptimSettings, newton_schulz

GRIDS, REFERENCES, LENGTHS = ((4, 6), (5, 4), (3, 3)), (3, 1, 0), (7, 12, 3)
TIMES, WINDOWS = (0.2, 0.7, 0.9995), (1, 4, 0)


@pytest.fixture(scope="module")
def model() -> H3Mini:
    """A tiny model with every parameter away from its silent start."""
    generator = torch.Generator().manual_seed(0)
    config = tiny_config()
    mini = H3Mini(replace(config, text=replace(config.text, vocab_size=50)))
    mini.start(torch.randn(50, 64, generator=generator))
    with torch.no_grad():
        for parameter in mini.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return mini.requires_grad_(False)


def padded_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(
        ids=torch.randint(0, 50, (3, 32), generator=generator),
        length=torch.tensor(LENGTHS),
        grid=torch.tensor(GRIDS),
        target=torch.randn(3, 24, 96, generator=generator),
        references=torch.randn(3, 3, 24, 96, generator=generator),
        num_references=torch.tensor(REFERENCES),
    )


@pytest.mark.parametrize("distilled", [False, True])
def test_a_padded_sample_gets_the_velocity_of_the_engine_without_padding(
    model: H3Mini, distilled: bool
) -> None:
    batch = padded_batch()
    windows = torch.nn.functional.one_hot(torch.tensor(WINDOWS), 6).float() if distilled else None
    words = model.word_rows(batch.ids, batch.length)
    layout = make_layout(model, batch, batch.length)
    velocity = model.velocity(
        batch.target, words, batch.references, layout, torch.tensor(TIMES), windows=windows
    )
    engine = H3Transformer(model.config.dit)
    engine.load_state_dict(model.transformer.state_dict())
    for i, ((height, width), count, length) in enumerate(zip(GRIDS, REFERENCES, LENGTHS, strict=True)):
        rows, shape = height * width, (2 * height, 2 * width)
        packing = pack(torch.ones(length, dtype=torch.long), [shape] * count, shape)
        shown = [batch.references[i : i + 1, j, :rows] for j in range(count)]
        with torch.no_grad():
            expected = engine(
                batch.target[i : i + 1, :rows],
                model.text_encoder(batch.ids[i : i + 1, :length]),
                times=torch.tensor([[TIMES[i], max(TIMES[i], 0.999)]]),
                row_times=packing.row_times[None],
                tags=packing.tags[None],
                positions=packing.positions[None],
                references=torch.cat(shown, dim=1) if shown else None,
                step=WINDOWS[i] if distilled else None,
            )
        assert (velocity[i, :rows] - expected[0]).abs().max() < 2e-5 * expected.abs().max()


def test_a_non_finite_gradient_changes_no_weight_and_is_counted() -> None:
    layer = nn.Linear(8, 8)
    optimizer = FlatOptimizer(
        layer.named_parameters(), is_matrix=lambda name, p: p.ndim == 2, settings=OptimSettings()
    )
    before = optimizer.weight.clone()
    optimizer.grad[3] = float("nan")
    optimizer.step()
    assert torch.equal(optimizer.weight, before)
    assert float(optimizer.skipped) == 1


def test_flat_optimizer_moves_the_modules_own_parameters_downhill() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    optimizer = FlatOptimizer(
        layer.named_parameters(),
        is_matrix=lambda name, p: p.ndim == 2,
        settings=OptimSettings(muon_rate=0.05, adam_rate=0.01),
    )
    x = torch.randn(64, 16)
    wanted = x @ torch.randn(16, 16)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert layer.weight.data_ptr() == optimizer.weight.data_ptr()


def test_newton_schulz_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(2, 24, 64)).float())
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_int8_rows_come_back_within_half_a_step() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    stored = encode({"layer.weight": weight}, "int8")
    assert stored["layer.weight"].dtype == torch.int8
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((decode(stored)["layer.weight"] - weight).abs() <= 0.6 * step).all()
