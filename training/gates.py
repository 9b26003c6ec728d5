"""The quality gates of h3-mini: fixed cases, scores by judge and by rule, verdicts.

Nothing here knows how pictures are made: `evaluate` takes a function that turns records into pictures.

    python -m training.gates ceiling        what real pictures score, and what doing nothing scores
    python -m training.gates export-tests   a small set of cases with pictures for the test-suite
"""

import argparse
import dataclasses
import random
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from portable_dit.evaluation.builtin.cases import CASES
from portable_dit.evaluation.builtin.judge import Judge, judge_images, label, load_judge
from portable_dit.evaluation.builtin.scenes import Record, Scene
from portable_dit.evaluation.builtin.scores import (
    CHUNK,
    EDIT_GATES,
    T2I_GATES,
    UNTOUCHED_SHARE,
    Score,
    border_right,
    concepts_right,
    psnr,
    score_edits,
    score_t2i,
)
from training.render import Atlas, render
from training.scenes import EDIT_MIX, THREE_MIX, TWO_MIX, Concepts, sample_records

Generate = Callable[[list[Record], int], Tensor]
"""Records and a size in pixels -> pictures float [B, 3, size, size] in 0..1."""

MULTI_KINDS = (*TWO_MIX, *THREE_MIX)
MOST_POINTS_LOST_AT_512 = 2.0


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
    parser.add_argument("--out", type=Path, default=CASES)
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
