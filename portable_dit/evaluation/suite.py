"""Suite: prompts by type, with the rubric that a judge scores them by, as one YAML file.

name: posters
rubric: Score 1 when the text on the poster is spelt right, 0 when it is not, between them for parts.
gate: 0.45                    # least mean, over all and for each type
size: 1024x1024
types:
  headline:
    - {prompt: a poster that says OPEN LATE, seed: 7}
  edit:
    - {prompt: make the poster green, references: [poster.png], expect: the background is green}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from portable_dit.errors import UserError, at_most
from portable_dit.refused_values import mistakes
from portable_dit.yaml_lines import read_document

Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1, strict=False, allow_inf_nan=False)]
FILE_NAME = re.compile(r"\w[\w .-]{0,99}")
RUBRIC = (
    "Score how well the picture shows what was asked for: 1 everything is there and right, 0 nothing is, and "
    "between them in proportion. Do not score taste."
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class SampleSection(Section):
    prompt: Text
    references: list[Text] = []
    """Files, from the suite's folder."""
    expect: str | None = None
    """What the judge is told to look for, beside the prompt."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Left out, the sample's place in its type."""


class SuiteSection(Section):
    name: Text
    rubric: Text = RUBRIC
    gate: Share = 0.45
    """Least mean score, over all samples and for each type."""
    size: Text | None = None
    steps: Annotated[int, Field(ge=1)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, strict=False)] | None = None
    types: Annotated[dict[Text, list[SampleSection]], Field(min_length=1)]


@dataclass(frozen=True)
class Sample:
    """One picture to draw and score. id: also the name of its file."""

    id: str
    type: str
    prompt: str
    references: tuple[Path, ...]
    expect: str | None
    seed: int


@dataclass(frozen=True)
class Suite:
    name: str
    rubric: str
    gate: float
    size: str | None
    steps: int | None
    guidance_scale: float | None
    samples: tuple[Sample, ...]
    notes: tuple[str, ...] = ()
    """What of the file is left out."""


def read_suite(path: Path, *, types: Sequence[str] = (), samples_per_type: int | None = None) -> Suite:
    """The suite of a file, of these types alone and so many samples of each. Raises UserError."""
    document = read_document(path)
    if document.mistakes:
        raise UserError(f"--suite {path}: " + "; ".join(map(str, document.mistakes)))
    try:
        section = SuiteSection.model_validate(document.data)
    except ValidationError as error:
        lines = [f"  {mistake}" for mistake in mistakes(error, SuiteSection)]
        raise UserError(f"--suite {path}:\n{at_most(lines)}") from error
    if odd := [name for name in section.types if FILE_NAME.fullmatch(name) is None]:
        raise UserError(
            f"--suite {path}: types.{odd[0]}: names files, and must be of letters, digits, spaces, dots, - "
            "and _, a letter first."
        )
    unknown = sorted(set(types) - set(section.types))
    if unknown:
        raise UserError(f"--types {','.join(unknown)}: not in {path}. It has {', '.join(section.types)}.")
    samples = [
        _sample(name, place, entry, path.parent)
        for name, entries in section.types.items()
        if not types or name in types
        for place, entry in enumerate(entries[:samples_per_type])
    ]
    whole = sum(map(len, section.types.values()))
    missing = [str(file) for sample in samples for file in sample.references if not file.is_file()]
    if missing:
        raise UserError(f"--suite {path}: these references do not exist: {', '.join(missing)}.")
    if not samples:
        raise UserError(f"--suite {path}: holds no sample. Put one under each of its types.")
    return Suite(
        name=section.name,
        rubric=section.rubric,
        gate=section.gate,
        size=section.size,
        steps=section.steps,
        guidance_scale=section.guidance_scale,
        samples=tuple(samples),
        notes=(f"{len(samples)} of the suite's {whole} samples are judged",) if len(samples) < whole else (),
    )


def _sample(type: str, place: int, section: SampleSection, folder: Path) -> Sample:
    return Sample(
        id=f"{type}-{place:03}",
        type=type,
        prompt=section.prompt,
        references=tuple(folder / name for name in section.references),
        expect=section.expect,
        seed=place if section.seed is None else section.seed,
    )
