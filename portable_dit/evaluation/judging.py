"""The two passes: draw what is missing, then let a vision model score each picture by the rubric."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_dit.errors import UserError
from portable_dit.evaluation.suite import Sample, Suite
from portable_dit.image import write_atomically
from portable_dit.server.client import Client, ServerError

TRIES = 3  # of a judge that answers without a score
INSTRUCTION = (
    'Answer with one JSON object and nothing else: {"score": a number from 0 to 1, "reason": one sentence}.'
)


@dataclass(frozen=True)
class Judgement:
    """What the judge said of one sample. score: 0 to 1, None when it could not be had, and then why."""

    id: str
    type: str
    score: float | None
    reason: str


def draw_missing(
    client: Client,
    suite: Suite,
    folder: Path,
    *,
    steps: int | None = None,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> None:
    """Draws every sample that has no picture in the folder yet. Raises ServerError, and can then go on later.

    A folder is of one server's model and one suite; another one is refused.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--pictures {folder}: cannot be made ({error.strerror}). Name a folder.") from error
    _require_same(folder, suite, client, steps)
    for sample in suite.samples:
        target = folder / f"{sample.id}.png"
        if not target.is_file():
            on_sample(sample)
            data = client.draw(
                sample.prompt,
                [path.read_bytes() for path in sample.references],
                size=suite.size,
                seed=sample.seed,
                num_inference_steps=steps or suite.steps,
                guidance_scale=suite.guidance_scale,
            )
            write_atomically(target, data)


def _require_same(folder: Path, suite: Suite, client: Client, steps: int | None) -> None:
    """Notes beside the pictures what they are of, or refuses a folder that holds others."""
    facts: dict[str, Any] = {
        "suite": suite.name,
        "size": suite.size,
        "steps": steps or suite.steps,
        "model": client.model(),
        "samples": {s.id: [s.prompt, s.seed, [path.name for path in s.references]] for s in suite.samples},
    }
    note = folder / "evaluation.json"
    if note.is_file():
        old = json.loads(note.read_text(encoding="utf-8"))
        shared = set(old["samples"]) & set(facts["samples"])
        same = all(old[name] == facts[name] for name in ("suite", "size", "steps", "model"))
        if not same or any(old["samples"][id] != facts["samples"][id] for id in shared):
            raise UserError(
                f"--pictures {folder}: holds pictures of another suite or model. Name another folder."
            )
        facts["samples"] |= old["samples"]
    write_atomically(note, json.dumps(facts, indent=1).encode())


def judge_all(
    judge: Client,
    suite: Suite,
    folder: Path,
    *,
    model: str | None = None,
    on_sample: Callable[[Sample], None] = lambda sample: None,
) -> list[Judgement]:
    """What the judge says of every picture in the folder. model: as the judge names it, None = its first."""
    missing = [sample.id for sample in suite.samples if not (folder / f"{sample.id}.png").is_file()]
    if missing:
        raise UserError(
            f"--pictures {folder}: {len(missing)} of {len(suite.samples)} pictures are not there, such as "
            f"{missing[0]}.png. Give --server too, and they are drawn."
        )
    name = model or judge.model()
    judgements = []
    for sample in suite.samples:
        on_sample(sample)
        judgements.append(_judge(judge, name, suite, sample, (folder / f"{sample.id}.png").read_bytes()))
    return judgements


def _judge(judge: Client, model: str, suite: Suite, sample: Sample, picture: bytes) -> Judgement:
    body = {
        "model": model,
        "temperature": 0,
        "messages": [
            {"role": "system", "content": f"{suite.rubric}\n\n{INSTRUCTION}"},
            {"role": "user", "content": question(sample, picture)},
        ],
    }
    reason = ""
    for _ in range(TRIES):
        try:
            text = judge.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        except (ServerError, KeyError, IndexError, TypeError) as error:
            return Judgement(sample.id, sample.type, None, f"the judge did not answer: {error}")
        score, reason = read_score(str(text))
        if score is not None:
            return Judgement(sample.id, sample.type, score, reason)
    return Judgement(sample.id, sample.type, None, f"the judge gave no score: {reason}")


def question(sample: Sample, picture: bytes) -> list[dict[str, Any]]:
    """The parts of the message: what was asked for, the references, and last the picture."""
    words = f"Asked for: {sample.prompt}"
    if sample.expect:
        words += f"\nLook for: {sample.expect}"
    count = len(sample.references)
    if count:
        words += f"\nThe first {count} pictures are the references; the last is to be scored."
    files = [*(path.read_bytes() for path in sample.references), picture]
    return [
        {"type": "text", "text": words},
        *({"type": "image_url", "image_url": {"url": _url(f)}} for f in files),
    ]


def _url(data: bytes) -> str:
    kind = "png" if data.startswith(b"\x89PNG") else "webp" if data[8:12] == b"WEBP" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def read_score(text: str) -> tuple[float | None, str]:
    """(score, reason) of a judge's answer: of the first JSON object in it that has a score from 0 to 1."""
    for found in re.finditer(r"\{[^{}]*\}", text):
        try:
            answer = json.loads(found[0])
        except ValueError:
            continue
        score = answer.get("score")
        if isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score):
            if 0 <= score <= 1:
                return float(score), str(answer.get("reason", ""))
            return None, f"a score of {score:g}, and 0 to 1 was asked for"
    return None, text[:200]
