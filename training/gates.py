"""The quality gates of h3-mini: fixed cases, scores by judge and by rule, verdicts.

Nothing here knows how pictures are made: `evaluate` takes a function that turns records into pictures.

    python -m training.gates ceiling        what real pictures score, and what doing nothing scores
    python -m training.gates export-tests   a small set of cases with pictures for the test-suite
"""

import argparse
import dataclasses
import math
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from training.judge import UNKNOWN, Judge, Labels, judge_images, label, load_judge
from training.render import Atlas, render
from training.scenes import (
    COLORS,
    EDIT_MIX,
    THREE_MIX,
    TWO_MIX,
    Concepts,
    Record,
    Scene,
    sample_records,
)

Generate = Callable[[list[Record], int], Tensor]
"""Records and a size in pixels -> pictures float [B, 3, size, size] in 0..1."""

MULTI_KINDS = (*TWO_MIX, *THREE_MIX)
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
MOST_POINTS_LOST_AT_512 = 2.0
CHUNK = 64  # pictures measured at a time


@dataclass(frozen=True)
class Score:
    """One measured number: a share of cases, or a median in dB, with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int

    @staticmethod
    def share(right: Tensor) -> "Score":
        """Wilson's interval."""
        n = len(right)
        if not n:
            return Score(math.nan, 0.0, 1.0, 0)
        p, z = right.float().mean().item(), 1.96
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return Score(p, middle - half, middle + half, n)

    @staticmethod
    def median(values: Tensor) -> "Score":
        """The order statistics that bracket the median."""
        n = len(values)
        if not n:
            return Score(math.nan, -math.inf, math.inf, 0)
        ordered = values.sort().values
        reach = 0.98 * math.sqrt(n)
        low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
        return Score(ordered.quantile(0.5).item(), ordered[low].item(), ordered[high].item(), n)


@dataclass(frozen=True)
class Gate:
    name: str
    score: Score
    threshold: float
    unit: str  # "%" or "dB"

    @property
    def passed(self) -> bool:
        return self.score.value >= self.threshold

    @property
    def hint(self) -> str:
        """Whether the number of cases can carry the verdict."""
        if self.passed:
            return "clear" if self.score.low >= self.threshold else "within noise"
        return "clear" if self.score.high < self.threshold else "within noise"


@dataclass(frozen=True)
class Report:
    """All gates at one picture size. scores: every number measured, gated or not, by "group/name"."""

    size: int
    gates: tuple[Gate, ...]
    scores: Mapping[str, Score]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def json(self) -> dict:
        gates = [dataclasses.asdict(gate) | {"passed": gate.passed, "hint": gate.hint} for gate in self.gates]
        scores = {name: dataclasses.asdict(score) for name, score in self.scores.items()}
        return {"size": self.size, "passed": self.passed, "gates": gates, "scores": scores}

    def markdown(self) -> str:
        lines = [
            f"**h3-mini at {self.size} px: {'passed' if self.passed else 'FAILED'}**",
            "",
            "| gate | measured | 95 % interval | needed | cases | verdict |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for gate in self.gates:
            factor = 100 if gate.unit == "%" else 1
            s = gate.score
            lines.append(
                f"| {gate.name} | {s.value * factor:.1f} {gate.unit} "
                f"| {s.low * factor:.1f} .. {s.high * factor:.1f} | {gate.threshold * factor:.4g} "
                f"| {s.count} | {'pass' if gate.passed else 'FAIL'}, {gate.hint} |"
            )
        gated = {gate.name for gate in self.gates}
        lines += ["", "| other scores | measured | cases |", "| --- | --- | --- |"]
        for name, s in self.scores.items():
            if name not in gated and s.count:
                text = f"{s.value:.1f} dB" if "psnr" in name or "gain" in name else f"{100 * s.value:.1f} %"
                lines.append(f"| {name} | {text} | {s.count} |")
        return "\n".join(lines) + "\n"


def fixed_cases(seed: int, kind: str, n: int, concepts: Concepts, split: str = "train") -> list[Record]:
    """The same `n` records of one kind for the same seed and the same data, on every machine."""
    return sample_records(random.Random(f"{seed}/{kind}/{split}"), n, concepts, {kind: 1.0}, split)


def evaluate(
    generate: Generate,
    *,
    atlas: Atlas,
    concepts: Concepts,
    judge: Judge,
    size: int = 256,
    num_cases: int = 128,
    seed: int = 1,
    multi: bool = True,
) -> Report:
    """Every gate at one size: `num_cases` of each kind (text to image: twice as many)."""
    scores: dict[str, Score] = {}
    t2i: list[Record] = []
    for kind, split in (("single", "train"), ("pair", "train"), ("single", "heldout"), ("pair", "heldout")):
        t2i += fixed_cases(seed, kind, 2 * num_cases, concepts, split)
    t2i += fixed_cases(seed, "count", num_cases, concepts) + fixed_cases(seed, "placed", num_cases, concepts)
    held_out = [False] * (4 * num_cases) + [True] * (4 * num_cases) + [False] * (2 * num_cases)
    images = generate(t2i, size)
    scores |= {
        f"t2i/{name}": score for name, score in score_t2i(t2i, images, judge, held_out=held_out).items()
    }
    edits = [record for kind in EDIT_MIX for record in fixed_cases(seed, kind, num_cases, concepts)]
    sources = draw([record.references[0] for record in edits], atlas, size)
    targets = draw([record.target for record in edits], atlas, size)
    outputs = generate(edits, size)
    scores |= {
        f"edit/{name}": score for name, score in score_edits(edits, outputs, sources, targets, judge).items()
    }
    if multi:
        several = [r for kind in MULTI_KINDS for r in fixed_cases(seed, kind, num_cases // 2, concepts)]
        targets = draw([record.target for record in several], atlas, size)
        scored = score_multi(several, generate(several, size), targets, judge)
        scores |= {f"multi/{name}": score for name, score in scored.items()}
    return report(scores, size)


def draw(scenes: Sequence[Scene], atlas: Atlas, size: int) -> Tensor:
    """Exact pictures, a few at a time, float32 [B, 3, size, size] on the CPU."""
    parts = [scenes[start : start + CHUNK] for start in range(0, len(scenes), CHUNK)]
    return torch.cat([render(part, atlas, width=size, height=size).cpu() for part in parts])


def report(scores: Mapping[str, Score], size: int) -> Report:
    """Verdicts for all numbers that have a gate."""
    gates = [Gate(f"t2i/{n}", scores[f"t2i/{n}"], least, "%") for n, least in T2I_GATES.items()]
    for kind, (gain, right) in EDIT_GATES.items():
        gates.append(Gate(f"edit/{kind}/gain", scores[f"edit/{kind}/gain"], gain, "dB"))
        gates.append(Gate(f"edit/{kind}/attribute", scores[f"edit/{kind}/attribute"], right, "%"))
    gates.append(Gate("edit/untouched", scores["edit/untouched"], UNTOUCHED_SHARE, "%"))
    return Report(size, tuple(gates), dict(scores))


def against_smaller(large: Report, small: Report) -> Report:
    """The report at 512 px judged as the issue asks: every share at most 2 points below the one at 256 px."""
    allowed = MOST_POINTS_LOST_AT_512 / 100
    gates = tuple(
        Gate(gate.name, gate.score, small.scores[gate.name].value - allowed, "%")
        for gate in large.gates
        if gate.unit == "%"
    )
    return Report(large.size, gates, large.scores)


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
    for kind in EDIT_MIX:
        chosen = torch.tensor([k == kind for k in kinds])
        scores[f"{kind}/gain"] = Score.median(gains[chosen])
        scores[f"{kind}/attribute"] = Score.share(right[chosen])
        scores[f"{kind}/psnr"] = Score.median(reached[chosen])
        scores[f"{kind}/untouched"] = Score.share((untouched >= UNTOUCHED_DB)[local & chosen])
    scores["untouched"] = Score.share((untouched >= UNTOUCHED_DB)[local])
    scores["untouched_psnr"] = Score.median(untouched[local])
    return scores


def score_multi(
    records: Sequence[Record], outputs: Tensor, targets: Tensor, judge: Judge
) -> dict[str, Score]:
    """Two and three references: the distance to the exact target, and whether all that it shows is there."""
    outputs, targets = outputs.float().cpu(), targets.float().cpu()
    kinds = [record.kind for record in records]
    labels = label([record.target for record in records])
    answers = judge_images(judge, outputs)
    _, shown = concepts_right(answers[1], labels)
    layout = answers[0].argmax(1) == labels.layout
    style = (answers[2].argmax(2) == labels.styles).all(dim=1)
    background = border_right(records, outputs, targets)
    scores = {}
    for kind in dict.fromkeys(kinds):
        chosen = torch.tensor([k == kind for k in kinds])
        scores[f"{kind}/psnr"] = Score.median(psnr(outputs, targets)[chosen])
        scores[f"{kind}/objects"] = Score.share((shown & layout)[chosen])
        scores[f"{kind}/style"] = Score.share(style[chosen])
        scores[f"{kind}/background"] = Score.share(background[chosen])
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


def in_chunks(measure: Callable, device: torch.device, *pictures: Tensor) -> tuple[Tensor, ...]:
    """What `measure` says of pictures, a few at a time on `device`; results on the CPU."""
    parts = []
    for chunk in zip(*(tensor.split(CHUNK) for tensor in pictures), strict=True):
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


def contact_sheet(
    images: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    path: str | Path,
    *,
    columns: int = 6,
    side: int = 192,
) -> None:
    """A PNG to look at. images: float [B, 3, H, W], or [n, 3, H, W] a caption for n side by side."""
    groups = [group if group.ndim == 4 else group[None] for group in images]
    widest = max(len(group) for group in groups)
    columns = max(1, min(columns // widest, len(groups)))
    cell_width, cell_height = widest * (side + 4) + 8, side + 40
    sheet = Image.new("RGB", (columns * cell_width, -(-len(groups) // columns) * cell_height), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (group, caption) in enumerate(zip(groups, captions, strict=True)):
        top, left = index // columns * cell_height, index % columns * cell_width
        lines = textwrap.wrap(caption, max(16, cell_width // 6))[:3]
        draw.multiline_text((left + 2, top + 1), "\n".join(lines), fill="black", spacing=0)
        for column, image in enumerate(group):
            sheet.paste(picture(image).resize((side, side)), (left + column * (side + 4), top + 38))
    sheet.save(path)


def picture(image: Tensor) -> Image.Image:
    """A picture to save, from float [3, H, W] in 0..1."""
    pixels = (image.float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))


def ceiling(
    atlas: Atlas, concepts: Concepts, judge: Judge, *, size: int, num_cases: int
) -> tuple[Report, Report]:
    """What the exact targets score, and what returning the first reference (or plain grey) scores."""

    def exact(records: list[Record], side: int) -> Tensor:
        return draw([record.target for record in records], atlas, side)

    def nothing(records: list[Record], side: int) -> Tensor:
        if not records[0].references:
            return torch.full((len(records), 3, side, side), 0.5)
        return draw([record.references[0] for record in records], atlas, side)

    settings = {"atlas": atlas, "concepts": concepts, "judge": judge, "size": size, "num_cases": num_cases}
    return evaluate(exact, **settings), evaluate(nothing, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    build = Path(__file__).parent / "build"
    parser.add_argument("command", choices=("ceiling", "export-tests"))
    parser.add_argument("--data", type=Path, default=build)
    parser.add_argument("--judge", type=Path, default=build / "judge.safetensors")
    parser.add_argument("--out", type=Path, default=Path("tests/data/gates"))
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--num-cases", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    concepts = Concepts.load(arguments.data / "concepts.json")
    atlas = Atlas.load(arguments.data, device=arguments.device)
    if arguments.command == "export-tests":
        from training.cases import export_cases  # which imports this module

        total = export_cases(arguments.out, atlas, concepts, arguments.judge)
        print(f"{arguments.out}: {total / 1e6:.2f} MB")
        return
    judge = load_judge(arguments.judge, arguments.device)
    if len(judge.concept.weight) != len(concepts):
        concepts = concepts.first(len(judge.concept.weight))
    for name, result in zip(
        ("exact targets", "doing nothing"),
        ceiling(atlas, concepts, judge, size=arguments.size, num_cases=arguments.num_cases),
        strict=True,
    ):
        print(f"## {name}\n\n{result.markdown()}")


if __name__ == "__main__":
    main()
