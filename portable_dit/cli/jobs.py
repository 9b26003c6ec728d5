"""From flags and prompt files to requests: what `run` is asked to draw, and where each picture goes.

Torch-free, and strict: an unknown key of a JSONL line is refused with the near name.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from portable_dit.cli.wishes import Wishes
from portable_dit.errors import OutputError, RequestError, UserError, at_most, near
from portable_dit.image import FORMATS, format_of
from portable_dit.paths import read_at_most
from portable_dit.refused_values import shown
from portable_dit.request import Request, parse_size
from portable_dit.result import with_number

MOST_BYTES = 16 << 20  # of a prompt or a file of prompts; no model reads as much
LINE_END = re.compile(r"\r\n|\n|\r")  # str.splitlines would also cut JSON text at U+2028
JSON_LINES = (".jsonl", ".ndjson")
STREAMS = ("-", "/dev/stdout", "/dev/stderr", "/dev/fd/1", "/dev/fd/2")

Kind = tuple[tuple[type, ...], str]
TEXT: Kind = (str,), "text"
WHOLE: Kind = (int,), "a whole number"
NUMBER: Kind = (int, float), "a number"
LIST: Kind = (list,), "a list"
# Keys of a JSONL line, and the type of each. The field's longer names are understood too.
KEYS = {
    "prompt": TEXT,
    "size": TEXT,
    "aspect_ratio": TEXT,
    "resolution": TEXT,
    "steps": WHOLE,
    "guidance_scale": NUMBER,
    "guidance_rescale": NUMBER,
    "use_system_prompt": TEXT,
    "system_prompt": TEXT,
    "seed": WHOLE,
    "images": WHOLE,
    "references": LIST,
    "output": TEXT,
    "format": TEXT,
}
OTHER_NAMES = {"num_inference_steps": "steps", "n": "images", "image": "references"}


@dataclass(frozen=True)
class Job:
    """One request and its output. place: "file:line: " for messages, empty for the only one."""

    request: Request
    output: Path
    place: str


def read_jobs(wishes: Wishes) -> tuple[Job, ...]:
    """All jobs that the flags ask for. Raises RequestError with every line that cannot be read."""
    if (wishes.prompt is None) == (wishes.prompts is None):
        raise RequestError(
            "prompt: give one of --prompt TEXT (- for stdin, @FILE for a file) and --prompts FILE, not both."
        )
    common = Request(
        "",
        size=_size(wishes),
        aspect_ratio=wishes.aspect_ratio,
        resolution=wishes.resolution,
        steps=wishes.num_inference_steps,
        guidance_scale=wishes.guidance_scale,
        guidance_rescale=wishes.guidance_rescale,
        use_system_prompt=wishes.use_system_prompt,
        system_prompt=None if wishes.system_prompt is None else read_prompt(wishes.system_prompt),
        seed=wishes.seed,
        images=wishes.num_images,
        references=tuple(wishes.image or ()),
    )
    if wishes.prompt is not None:
        job = Job(replace(common, prompt=read_prompt(wishes.prompt)), _output(wishes, wishes.format), "")
        return (_with_format(job, wishes.format),)
    assert wishes.prompts is not None
    return _jobs_of_file(wishes.prompts, common, wishes)


def read_prompt(text: str) -> str:
    """The prompt itself, or what stdin (-) or a file (@FILE) holds, without the line end."""
    if text == "-":
        return _decoded(sys.stdin.buffer.read(MOST_BYTES + 1), "stdin").rstrip("\r\n")
    if text.startswith("@"):
        return _read(
            Path(text[1:]), hint="A prompt that begins with @ goes through stdin: --prompt -"
        ).rstrip("\r\n")
    return text


def _jobs_of_file(path: Path, common: Request, wishes: Wishes) -> tuple[Job, ...]:
    """A job for each line that is not empty; outputs are numbered over the whole file."""
    if path.suffix.lower() == ".json":
        raise RequestError(f"{path}: one JSON object per line is read, from a file named {path.stem}.jsonl.")
    lines = [(k, line) for k, line in enumerate(LINE_END.split(_read(path)), 1) if line.strip()]
    if not lines:
        raise RequestError(f"{path}: holds no prompt. Write one per line.")
    jobs: list[Job] = []
    problems: list[str] = []
    base = _output(wishes, wishes.format)
    for index, (number, line) in enumerate(lines, 1):
        place = f"{path}:{number}: "
        output = with_number(base, index, len(lines)) if len(lines) > 1 else base
        found = _line_keys(line) if path.suffix.lower() in JSON_LINES else {"prompt": line.strip()}
        if isinstance(found, str):
            problems.append(place + found)
            continue
        try:
            jobs.append(_job_of_line(found, common, output, wishes.format, place))
        except UserError as error:
            problems.append(place + str(error))
    if problems:
        raise RequestError(at_most(problems))
    return tuple(jobs)


def _line_keys(line: str) -> dict[str, Any] | str:
    """The keys of a JSONL line by their short names, or what is wrong with it."""
    try:
        raw = json.loads(line, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        return f'not JSON ({error}). Write {{"prompt": "..."}} on each line.'
    if not isinstance(raw, _Pairs):
        return 'not a JSON object. Write {"prompt": "..."} on each line.'
    pairs = [(OTHER_NAMES.get(key, key), value) for key, value in raw.pairs]
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        return f"{twice[0]}: said twice in one line. Say it once."
    keys: dict[str, Any] = dict(pairs)
    for key, value in keys.items():
        if key not in KEYS:
            return f"key {key!r} is not known.{near(key, tuple(KEYS))}"
        types, kind = KEYS[key]
        if not isinstance(value, types) or isinstance(value, bool):
            return f"{key}: {shown(value)} must be {kind}."
    if not all(isinstance(name, str) for name in keys.get("references", ())):
        return "references: a list of file names."
    return keys if "prompt" in keys else "prompt is missing."


@dataclass(frozen=True)
class _Pairs:
    """A JSON object as it stands in the text, where a key may come twice."""

    pairs: Sequence[tuple[str, Any]]


def _job_of_line(
    keys: Mapping[str, Any], common: Request, output: Path, format: str | None, place: str
) -> Job:
    changes = {key: value for key, value in keys.items() if key not in ("output", "format", "size")}
    if "references" in changes:
        changes["references"] = tuple(changes["references"])
    if "system_prompt" in keys or "use_system_prompt" in keys:
        changes |= {key: keys.get(key) for key in ("system_prompt", "use_system_prompt")}
    if "size" in keys:
        changes |= {"size": parse_size(keys["size"])}
        changes |= {key: keys.get(key) for key in ("aspect_ratio", "resolution")}
    elif "aspect_ratio" in keys or "resolution" in keys:
        changes["size"] = None
    format = keys.get("format", format)
    target = Path(keys["output"]) if "output" in keys else output
    return _with_format(Job(replace(common, **changes), target, place), format)


def _with_format(job: Job, format: str | None) -> Job:
    if str(job.output) in STREAMS:
        raise OutputError(
            f"-o {job.output}: pictures are written to files, and stdout tells their paths. Name a file."
        )
    return replace(job, request=replace(job.request, format=format_of(job.output, format)))


def _output(wishes: Wishes, format: str | None) -> Path:
    return wishes.output or Path(f"out{FORMATS.get(format or 'png', '.png')}")


def _size(wishes: Wishes) -> tuple[int, int] | None:
    """The size of --size, or of --width and --height together."""
    if wishes.width is None and wishes.height is None:
        return parse_size(wishes.size) if wishes.size is not None else None
    if wishes.size is not None:
        raise RequestError("size: --size was given with --width or --height. Say the size once.")
    if wishes.width is None or wishes.height is None:
        missing = "--width" if wishes.width is None else "--height"
        raise RequestError(f"size: {missing} is missing. Give both, or --size WxH, or --aspect-ratio.")
    return wishes.width, wishes.height


def _read(path: Path, hint: str = "Check the path.") -> str:
    try:
        return _decoded(read_at_most(path, MOST_BYTES), str(path))
    except OSError as error:
        raise RequestError(f"prompt file {path}: cannot be read ({error.strerror}). {hint}") from error


def _decoded(raw: bytes, name: str) -> str:
    if len(raw) > MOST_BYTES:
        raise RequestError(f"{name}: over {MOST_BYTES:,} bytes, which is no prompt. Check the file.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name}: not UTF-8 text ({error.reason} at byte {error.start}). Save it as UTF-8."
        ) from error
