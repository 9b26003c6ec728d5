"""Gate A of a set-up: what each branch of each block gives, fed the float32 reference's own inputs.

A picture mixes the errors of all blocks and steps: a barely trained model with a broken attention head still
had 29 dB, and a trained one in 8 bits has no more than 27 in its worst picture. The output of the very branch
moves by half or more when it is broken and by less than a tenth in 8 bits. So a set-up is judged by the
relative L2 error of every attention and MLP output before its residual, at two steps, for text alone and with
a reference. Gate B is the distance of whole pictures.

    python -m training.branch_check          measures both on this CPU, for docs/h3-mini

Letters: B batch, S rows, C channels, H W pixels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_dit.engine import Engine
from portable_dit.evaluation.builtin.cases import CASES, Case, Cases, load_cases
from portable_dit.evaluation.builtin.scores import psnr
from portable_dit.loading import load_model
from portable_dit.masks import NO_MASK
from portable_dit.models.h3_image.dit import ATTENTION_CHUNK, MLP_CHUNK
from portable_dit.models.h3_image.model import H3Denoiser, H3Image
from portable_dit.ops import Modulation
from portable_dit.sampling import denoise, draw_noise, run_each
from portable_dit.setup import set_up
from training.paint import paint_cases
from training.shipped import FIGURES, weights_digest

STEPS = (0, 4)  # of six: nearly all noise, and where detail is decided
# Largest relative L2 error of a branch, worst block, step and request.
LIMITS = {"float32": 1e-4, "bfloat16": 0.015, "8 bits": 0.10}
# Whole pictures in bfloat16 against float32: mean, and the worst.
TRAJECTORY_DB, WORST_DB = 40.0, 34.0


@dataclass(frozen=True)
class Wish:
    """One request to trace. references: uint8 [H, W, 3]."""

    prompt: str
    references: tuple[np.ndarray, ...] = ()
    size: tuple[int, int] = (256, 256)
    seed: int = 7


@dataclass(frozen=True)
class BlockTrace:
    """What went into a block and its MLP, and what both branches gave: [B, S, C] each."""

    hidden: Tensor
    attention: Tensor
    middle: Tensor
    mlp: Tensor


@dataclass(frozen=True)
class Trace:
    """The reference's way through one request. blocks: by step; latents: float32, before the step."""

    wish: Wish
    latents: dict[int, Tensor]
    blocks: dict[int, tuple[BlockTrace, ...]]


Where = tuple[int, int, str]
"""Step, block, "attention" or "mlp"."""


def load(keys: Mapping[str, Any]) -> H3Image:
    """The built-in model. keys: what to change in its recipe for the CPU."""
    model = load_model(set_up("cpu/h3-mini", keys)).model
    assert isinstance(model, H3Image)
    return model


@torch.no_grad()
def prepare(model: H3Image, wish: Wish) -> H3Denoiser:
    prompt = model.encode_prompt(wish.prompt, wish.references)
    return model.prepare(prompt, wish.references, *wish.size, model.schedule(6), wish.seed)


@torch.no_grad()
def trace(model: H3Image, wish: Wish, steps: Sequence[int] = STEPS) -> Trace:
    """A whole run of the reference, remembered at some steps."""
    latents: dict[int, Tensor] = {}
    blocks: dict[int, tuple[BlockTrace, ...]] = {}
    schedule = model.schedule(6)
    denoiser = prepare(model, wish)
    noise = draw_noise((1, *model.latent_shape(*wish.size)), wish.seed).to(denoiser.prefix.device)
    seen: list[Tensor] = [noise]

    def run(bound: Any, hidden: Tensor, arguments: Any) -> Tensor:
        step = len(seen) - 1
        if step not in steps:
            for block in bound:
                hidden = block(hidden, *arguments)
            return hidden
        latents[step] = seen[-1]
        traces = []
        for block in bound:
            before = hidden.clone()  # a backend's residual may write on its input
            hidden, parts = _watched(block, hidden, arguments)
            traces.append(BlockTrace(before, **parts))
        blocks[step] = tuple(traces)
        return hidden

    denoise(
        [denoiser],
        [noise],
        schedule,
        on_step=lambda done, latents: seen.append(latents[0].clone()),
        run=partial(run_each, run=run),
    )
    return Trace(wish, latents, blocks)


def _watched(bound: Any, hidden: Tensor, arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Calls a block and gives, next to its result, what its parts saw."""
    parts: dict[str, Tensor] = {}
    block = bound.block
    with ExitStack() as hooks:
        for handle in (
            block.attn.register_forward_hook(lambda m, i, out: parts.update(attention=out.clone())),
            block.norm2.register_forward_pre_hook(lambda m, args: parts.update(middle=args[0].clone())),
            block.mlp.register_forward_hook(lambda m, i, out: parts.update(mlp=out.clone())),
        ):
            hooks.callback(handle.remove)
        result = bound(hidden, *arguments)
    return result, parts


@torch.no_grad()
def branch_errors(reference: Trace, model: H3Image) -> dict[Where, float]:
    """Relative L2 error of every branch of a candidate, each fed the reference's input."""
    denoiser, dtype = prepare(model, reference.wish), model.dit.dtype
    device = denoiser.prefix.device
    errors: dict[Where, float] = {}
    for step, traces in reference.blocks.items():
        index = denoiser.indices[step]
        for number, (bound, expected) in enumerate(zip(denoiser.blocks, traces, strict=True)):
            block, modulation = bound.block, Modulation(bound.table, index)
            x = block.norm1(expected.hidden.to(device, dtype), modulation, ATTENTION_CHUNK)
            attention = block.attn(x, denoiser.rotary, NO_MASK)
            mlp = block.mlp(block.norm2(expected.middle.to(device, dtype), modulation, MLP_CHUNK))
            errors[step, number, "attention"] = relative_l2(attention, expected.attention)
            errors[step, number, "mlp"] = relative_l2(mlp, expected.mlp)
    return errors


def worst(errors: Iterable[dict[Where, float]], branch: str) -> float:
    """The largest error of one branch over requests, steps and blocks."""
    return max(error for found in errors for (_, _, kind), error in found.items() if kind == branch)


def relative_l2(value: Tensor, expected: Tensor) -> float:
    value, expected = value.float(), expected.to(value.device, torch.float32)
    return ((value - expected).norm() / expected.norm()).item()


@torch.no_grad()
def swap_two_query_heads(model: H3Image, block: int) -> None:
    """A fault that a wrong head order in a kernel makes: heads 0 and 1 ask each other's questions."""
    attention = model.dit.blocks[block].attn
    rows, size = attention.qkv_proj.weight, attention.head_dim
    rows[: 2 * size] = torch.cat([rows[size : 2 * size], rows[:size]])


@torch.no_grad()
def lose_half_of_the_output_projection(model: H3Image, block: int) -> None:
    """A fault that a lost rank of tensor parallelism makes: half of the input columns count for nothing."""
    weight = model.dit.blocks[block].attn.out_proj.weight
    weight[:, : weight.shape[1] // 2] = 0


FAULTS = (swap_two_query_heads, lose_half_of_the_output_projection)
SET_UPS: dict[str, dict[str, Any]] = {
    "float32": {"precision": "float32"},
    "bfloat16": {"precision": "bfloat16"},
    **{name: {"precision": "float32", "quantization.dit": name} for name in ("int8_row", "fp8_row", "mxfp8")},
}


def wishes(cases: Cases) -> tuple[Wish, Wish]:
    """The two requests that are traced: text alone, and an edit of one reference."""
    edit = cases.where(lambda case: case.record.kind == "replace")[0]
    text = Wish("a fox to the left of a mushroom on a teal background, flat style")
    return text, Wish(edit.record.caption, edit.references)


def prompts(cases: Cases) -> tuple[Case, ...]:
    """The text to image cases that whole pictures are compared on."""
    return cases.where(lambda case: case.record.kind in ("single", "pair") and not case.held_out)[::5]


def measure(cases: Cases) -> dict[str, Any]:
    """Gates A and B of every set-up, and by how much the injected faults miss gate A."""
    reference = load(SET_UPS["float32"])
    traces = [trace(reference, wish) for wish in wishes(cases)]
    some = prompts(cases)
    with Engine.load("cpu/h3-mini", SET_UPS["float32"]) as engine:
        expected = paint_cases(engine, some, size=256)
    rows = {}
    for name, keys in SET_UPS.items():
        errors = [branch_errors(seen, load(keys)) for seen in traces]
        with Engine.load("cpu/h3-mini", keys) as engine:
            distance = psnr(paint_cases(engine, some, size=256), expected)
        rows[name] = {
            "attention": worst(errors, "attention"),
            "mlp": worst(errors, "mlp"),
            "mean_db": distance.mean().item(),
            "worst_db": distance.min().item(),
        }
    faults = {}
    for fault in FAULTS:
        broken = [_broken(fault, block) for block in range(len(reference.dit.blocks))]
        faults[fault.__name__] = min(
            branch_errors(seen, model)[step, block, "attention"]
            for block, model in enumerate(broken)
            for seen in traces
            for step in STEPS
        )
    return {"weights": weights_digest(), "pictures": len(some), "set_ups": rows, "faults": faults}


def _broken(fault: Any, block: int) -> H3Image:
    model = load(SET_UPS["float32"])
    fault(model, block)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FIGURES / "precision.json")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    measured = measure(load_cases(CASES))
    arguments.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
