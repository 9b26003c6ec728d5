"""The compiler's work ahead of time, in processes of their own, through its disk cache."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch
from torch import Tensor

from training.capture import prepare_compiler
from training.distil import distil_loss
from training.dit import flow_loss, new_model, random_batch
from training.model import is_muon_matrix
from training.optim import FlatOptimizer
from training.presets import Preset
from training.sample import shifted

log = logging.getLogger("training")


def prepare(device: torch.device) -> None:
    """Process-wide choices: compiler room, convolution algorithms, TF32 for the few float32 products."""
    prepare_compiler()
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")


PARTS = ("small", "large", "teacher")


def precompile(preset: Preset, part: str, table: Tensor, device: torch.device) -> None:
    """Run the compiled shapes of one part once, so that the compiler's disk cache is warm.

    Two blocks stand for all, since blocks share one compiled version a shape. small, large: training steps,
    which the student's distillation shares. teacher: what runs without gradients in distillation.
    """
    prepare(device)
    text = replace(preset.config.text, vocab_size=len(table))
    config = replace(preset.config, text=text, dit=replace(preset.config.dit, num_layers=2))
    model = new_model(config, table, seed=0, compile_blocks=True, device=device)
    if part == "teacher":
        model.requires_grad_(False)
    else:
        FlatOptimizer(model.named_parameters(), is_matrix=is_muon_matrix, settings=preset.dit.optim)
    begin = time.monotonic()
    sides = {"small": (preset.dit.small,), "large": (preset.dit.large,)}
    for buckets in sides.get(part, (preset.dit.small, preset.dit.large)):
        batches = {b.name: random_batch(b, row_size=config.dit.row_size, device=device) for b in buckets}
        if part == "teacher":
            levels = torch.tensor(shifted(config.dit.pdd_heads, config.scheduler.shift), device=device)
            with torch.no_grad():
                distil_loss(model, model, batches, levels, replace(preset.distil, substeps=1))
        else:
            flow_loss(model, batches, preset.dit)[0].backward()
        log.info("precompiled %s in %.1f s", "+".join(batches), time.monotonic() - begin)
