"""Scores of pictures by judge and by rule, and what each has to reach.

Letters: B batch, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from portable_dit.evaluation.builtin.judge import UNKNOWN, Judge, Labels, judge_images, label
from portable_dit.evaluation.builtin.scenes import COLORS, Record

# Least median gain in dB over returning the source, and least share of cases whose attribute is right.
EDIT_GATES = {
    "background": (10.0, 0.90),
    "black_and_white": (10.0, 0.90),
    "mirror": (10.0, 0.90),
    "remove": (10.0, 0.90),
    "replace": (4.0, 0.90),
    "add": (4.0, 0.90),
    "style": (2.0, 0.75),
    "resize": (4.0, 0.80),
}
T2I_GATES = {
    "background": 0.99,
    "single_top1": 0.95,
    "style": 0.93,
    "order_and_layout": 0.98,
    "both_of_two": 0.97,
    "held_out_style_top1": 0.90,
    "held_out_pair_both": 0.90,
}
UNTOUCHED_DB, UNTOUCHED_SHARE = 25.0, 0.85
CHUNK = 64  # pictures measured at a time


@dataclass(frozen=True)
class Score:
    """One measured number: a share of cases, or a median in dB, with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int

    @staticmethod
    def share(right: Tensor) -> Score:
        """Wilson's interval."""
        n = len(right)
        if not n:
            return Score(math.nan, 0.0, 1.0, 0)
        p, z = right.float().mean().item(), 1.96
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return Score(p, middle - half, middle + half, n)

    @staticmethod
    def median(values: Tensor) -> Score:
        """The order statistics that bracket the median."""
        n = len(values)
        if not n:
            return Score(math.nan, -math.inf, math.inf, 0)
        ordered = values.sort().values
        reach = 0.98 * math.sqrt(n)
        low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
        return Score(ordered.quantile(0.5).item(), ordered[low].item(), ordered[high].item(), n)


def score_t2i(
    records: Sequence[Record], images: Tensor, judge: Judge, *, held_out: Sequence[bool] | None = None
) -> dict[str, Score]:
    """The text to image scores. images: float [B, 3, H, W] in 0..1. held_out: cases training never showed."""
    hidden = torch.tensor(list(held_out) if held_out is not None else [False] * len(records))
    labels = label([record.target for record in records])
    answers = judge_images(judge, images)
    kinds = [record.kind for record in records]
    single, pair, counts, placed = (
        torch.tensor([k == kind for k in kinds]) for kind in ("single", "pair", "count", "placed")
    )
    solid = torch.tensor([record.target.background.kind == "solid" for record in records])
    colors = torch.tensor([record.target.background.first for record in records])
    first_right, both_right = concepts_right(answers[1], labels)
    layout_right = answers[0].argmax(1) == labels.layout
    # One object may be large or medium where the caption leaves it open.
    one = (labels.layout == 1) | (labels.layout == 2)
    layout_right |= one & ((answers[0].argmax(1) == 1) | (answers[0].argmax(1) == 2))
    style_right = (answers[2].argmax(2) == labels.styles).all(dim=1)
    order_right = in_order(answers[1], labels)
    known = ~hidden
    return {
        "background": Score.share((border_color(images) == colors)[solid]),
        "single_top1": Score.share(first_right[single & known]),
        "style": Score.share(style_right[(single | placed) & known]),
        "order_and_layout": Score.share((order_right & layout_right)[pair]),
        "both_of_two": Score.share(both_right[pair & known]),
        "held_out_style_top1": Score.share(first_right[single & hidden]),
        "held_out_style_style": Score.share(style_right[single & hidden]),
        "held_out_pair_both": Score.share(both_right[pair & hidden]),
        "pair_style": Score.share(style_right[pair & known]),
        "single_layout": Score.share(layout_right[single]),
        "count": Score.share((layout_right & first_right)[counts]),
        "placed_top1": Score.share(first_right[placed]),
    }


def score_edits(
    records: Sequence[Record], outputs: Tensor, sources: Tensor, targets: Tensor, judge: Judge
) -> dict[str, Score]:
    """The scores of one-reference edits, by kind. Pictures: float [B, 3, H, W] in 0..1, all of one size."""
    outputs, sources, targets = outputs.float().cpu(), sources.float().cpu(), targets.float().cpu()
    kinds = [record.kind for record in records]
    device = next(judge.parameters()).device
    (reached,) = in_chunks(psnr, device, outputs, targets)
    (baseline,) = in_chunks(psnr, device, sources, targets)
    gains = reached - baseline
    right = attribute_right(records, outputs, sources, targets, judge)
    untouched, has_untouched = in_chunks(untouched_psnr, device, outputs, sources, targets)
    local = has_untouched & torch.tensor([kind not in ("black_and_white", "mirror") for kind in kinds])
    scores = {}
    for kind in EDIT_GATES:
        chosen = torch.tensor([k == kind for k in kinds])
        scores[f"{kind}/gain"] = Score.median(gains[chosen])
        scores[f"{kind}/attribute"] = Score.share(right[chosen])
        scores[f"{kind}/psnr"] = Score.median(reached[chosen])
        scores[f"{kind}/untouched"] = Score.share((untouched >= UNTOUCHED_DB)[local & chosen])
    scores["untouched"] = Score.share((untouched >= UNTOUCHED_DB)[local])
    scores["untouched_psnr"] = Score.median(untouched[local])
    return scores


def concepts_right(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """Whether the first slot is right, and whether both are, in whichever order. bool [B] each."""
    answer = logits.argmax(2)
    straight = (answer == labels.concepts).all(dim=1)
    crossed = (answer.flip(1) == labels.concepts).all(dim=1)
    nothing = labels.concepts[:, 0] == UNKNOWN
    return (answer[:, 0] == labels.concepts[:, 0]) | nothing, straight | crossed | nothing


def in_order(logits: Tensor, labels: Labels) -> Tensor:
    """Whether the wanted first object is the first one, however sure the judge is of the two. bool [B]."""
    a, b = labels.concepts.clamp_min(0).unbind(1)
    scores = logits.log_softmax(2)
    rows = torch.arange(len(a))
    straight = scores[rows, 0, a] + scores[rows, 1, b]
    crossed = scores[rows, 0, b] + scores[rows, 1, a]
    return straight > crossed


def border_color(images: Tensor) -> Tensor:
    """The named colour nearest to the median of a border of 1/64, int64 [B]."""
    strip = border(images).median(dim=2).values  # [B, 3]
    palette = torch.tensor(list(COLORS.values()), dtype=torch.float32) / 255
    return torch.cdist(strip, palette).argmin(dim=1)


def border(images: Tensor) -> Tensor:
    """The outermost pixels, float32 [B, 3, P] on the CPU."""
    images = images.float().cpu()
    width = max(1, images.shape[-1] // 64)
    inner = images[:, :, width:-width]
    parts = (images[:, :, :width], images[:, :, -width:], inner[..., :width], inner[..., -width:])
    return torch.cat([part.flatten(2) for part in parts], dim=2)


def border_right(records: Sequence[Record], outputs: Tensor, targets: Tensor) -> Tensor:
    """Solid: the right named colour. Else: the border is within 0.1 of the target's, on average. bool [B]."""
    colors = torch.tensor([record.target.background.first for record in records])
    solid = torch.tensor([record.target.background.kind == "solid" for record in records])
    near = (border(outputs) - border(targets)).abs().mean(dim=(1, 2)) < 0.1
    return torch.where(solid, border_color(outputs) == colors, near)


def in_chunks(measure: Callable[..., Any], device: torch.device, *pictures: Tensor) -> tuple[Tensor, ...]:
    """What `measure` says of pictures, a few at a time on `device`; results on the CPU."""
    parts = []
    for chunk in zip(*(torch.split(tensor, CHUNK) for tensor in pictures), strict=True):
        result = measure(*(tensor.to(device) for tensor in chunk))
        parts.append(result if isinstance(result, tuple) else (result,))
    return tuple(torch.cat(column).cpu() for column in zip(*parts, strict=True))


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """dB, float32 [B]; equal pictures count as 60 dB."""
    return -10 * (a - b).square().mean(dim=(1, 2, 3)).clamp_min(1e-6).log10()


def untouched_psnr(outputs: Tensor, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """PSNR where source and target agree, 1/32 of the side away from any change, and whether 5 % are left."""
    margin = sources.shape[-1] // 32
    changed = ((sources - targets).abs().amax(dim=1, keepdim=True) > 1 / 255).float()
    grown = F.max_pool2d(changed, (2 * margin + 1, 1), stride=1, padding=(margin, 0))
    kept = 1 - F.max_pool2d(grown, (1, 2 * margin + 1), stride=1, padding=(0, margin))  # [B, 1, H, W]
    area = kept.sum(dim=(1, 2, 3))
    error = ((outputs - targets).square().mean(dim=1, keepdim=True) * kept).sum(
        dim=(1, 2, 3)
    ) / area.clamp_min(1)
    return -10 * error.clamp_min(1e-6).log10(), area >= 0.05 * kept[0].numel()


def attribute_right(
    records: Sequence[Record], outputs: Tensor, sources: Tensor, targets: Tensor, judge: Judge
) -> Tensor:
    """Whether each edit did what was asked, by the rule of its kind. bool [B]."""
    labels = label([record.target for record in records])
    before = label([record.references[0] for record in records])
    layout, concept, style = judge_images(judge, outputs)
    answer = concept.argmax(2)
    first, shown = concepts_right(concept, labels)
    shown = torch.where(labels.layout <= 2, first, shown)
    arranged = layout.argmax(1) == labels.layout
    styled = (style.argmax(2) == labels.styles).all(dim=1)
    gray = (outputs.amax(dim=1) - outputs.amin(dim=1)).mean(dim=(1, 2)) < 0.04
    nearer = psnr(outputs, targets) > psnr(outputs, sources)
    gone = torch.tensor(
        [
            not ({c for c in old if c != UNKNOWN} - set(new)) & set(now) or new[0] == UNKNOWN
            for old, new, now in zip(
                before.concepts.tolist(), labels.concepts.tolist(), answer.tolist(), strict=True
            )
        ]
    )
    rules = {
        "background": border_right(records, outputs, targets),
        "black_and_white": gray & first,
        "mirror": nearer,
        "remove": arranged & shown & gone,
        "replace": shown & gone,
        "add": shown & arranged,
        "style": styled & shown,
        "resize": arranged & shown,
    }
    return torch.stack([rules[record.kind][row] for row, record in enumerate(records)])
