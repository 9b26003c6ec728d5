"""Request: one wish for pictures, and its check against what a model can draw.

`validate_request` fills in the model's own defaults, reads the references, and reports all problems at once,
each with the value that was given, the rule and the nearest value that would do. Nothing is loaded before it
has passed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from portable_dit.errors import ImageError, RequestError, at_most, near
from portable_dit.image import FORMATS, Pixels, ReadImage, check_size, read_image, resize

if TYPE_CHECKING:
    from portable_dit.models.sizes import SizeRules, Tier
    from portable_dit.models.spec import ModelSpec

MAX_IMAGES = 128
MAX_SEED = 2**63 - 1
MAX_STEPS = 1000
MAX_GUIDANCE = 100.0

ReferenceSource = str | Path | bytes | Pixels
Problem = tuple[str, str]  # a field of `Request`, and a sentence that begins with its name if it can


@dataclass(frozen=True, eq=False)
class Request:
    """What to draw. None means the model's own default.

    size: width, height; without one, an edit has that of its first reference, as far as the model draws it.
    aspect_ratio: "16:9", at the model's default area, or at that of `resolution`, "1K", "2K" or "4K"; not
    together with size. resolution alone keeps the ratio of the first reference, else that of the default.
    seed: of the first image; image k uses seed + k. references: paths, file bytes or uint8 RGB [H, W, 3], in
    the order that prompts call them. guidance_rescale: 0 to 1, how much of guidance's widening of the
    picture's contrast is taken back. use_system_prompt: the name of one that comes with the checkpoint;
    system_prompt: one of your own, not together with it. format: png, jpeg or webp encodes the files while
    the next image is drawn; None leaves that to `save`.
    """

    prompt: str
    _: KW_ONLY
    size: tuple[int, int] | None = None
    aspect_ratio: str | None = None
    resolution: str | None = None
    steps: int | None = None
    guidance_scale: float | None = None
    guidance_rescale: float = 0.0
    seed: int = 0
    images: int = 1
    references: Sequence[ReferenceSource] = ()
    use_system_prompt: str | None = None
    system_prompt: str | None = None
    format: str | None = None


@dataclass(frozen=True, eq=False)
class Reference:
    """A reference as the model takes it: uint8 RGB [H, W, 3] at the model's size, and the size it had."""

    name: str
    pixels: Pixels
    original_size: tuple[int, int]

    @property
    def size(self) -> tuple[int, int]:
        height, width, _ = self.pixels.shape
        return width, height


@dataclass(frozen=True, eq=False)
class ResolvedRequest:
    """A request with every default filled in and every reference read; what the engine draws from.

    width, height: of the canvas that is drawn. output_size: (width, height) of the picture that is given,
    smaller where a model draws small pictures large and resizes them.
    """

    prompt: str
    width: int
    height: int
    output_size: tuple[int, int]
    steps: int
    guidance_scale: float | None
    guidance_rescale: float
    seed: int
    images: int
    references: tuple[Reference, ...]
    system_prompt: str | None
    format: str | None
    notes: tuple[str, ...]

    @property
    def shape(self) -> tuple[object, ...]:
        """What requests have in common that may be denoised side by side; how many rows their prompts take
        must be the same too, which the text encoder says.
        """
        sizes = tuple(reference.size for reference in self.references)
        return self.width, self.height, self.steps, self.guidance_scale, self.guidance_rescale, sizes

    def without_pixels(self) -> ResolvedRequest:
        """The same to plan with: references keep their sizes and are black at no cost of memory."""
        black = np.zeros((), np.uint8)
        kept = (replace(r, pixels=np.broadcast_to(black, r.pixels.shape)) for r in self.references)
        return replace(self, references=tuple(kept))


def validate_request(request: Request, spec: ModelSpec) -> ResolvedRequest:
    """The request with the model's defaults filled in. Raises RequestError that lists every problem."""
    problems = [("prompt", problem) for problem in _prompt_problems(request.prompt, spec)]
    problems += _number_problems(request, spec)
    problems += _system_problems(request, spec)
    images, notes = _read_references(request.references, spec, problems)
    width, height = output = _output_size(request, spec, images, problems, notes)
    tier = None if problems else _tier(request, spec.sizes, problems)
    if tier is not None:
        output = width // tier.shrink, height // tier.shrink
    elif not problems:
        width, height = spec.sizes.enlarged(width, height)
    if problems:
        raise RequestError(listed([text for _, text in problems]), problems)
    references = tuple(_sized(name, pixels, spec, (width, height)) for name, pixels in images)
    if references and (problem := spec.prompt_problem(request.prompt, [r.size for r in references])):
        raise RequestError(problem, [("prompt", problem)])
    guidance = request.guidance_scale if spec.has_guidance else None
    return ResolvedRequest(
        prompt=request.prompt,
        width=width,
        height=height,
        output_size=output,
        steps=int(request.steps or (spec.steps[0] if spec.steps else spec.default_steps)),
        guidance_scale=spec.default_guidance if guidance is None else float(guidance),
        guidance_rescale=float(request.guidance_rescale),
        seed=int(request.seed),
        images=int(request.images),
        references=references,
        system_prompt=_system_prompt(request, spec),
        format=request.format,
        notes=tuple(notes),
    )


def size_problem(width: int, height: int, rules: SizeRules) -> str | None:
    """Why a canvas is not drawn and the nearest one that is, or None when it is legal."""
    broken = []
    if width < 1 or height < 1:
        broken.append("both sides must be positive")
    else:
        if width % rules.multiple or height % rules.multiple:
            broken.append(f"both sides must be multiples of {rules.multiple}")
        if min(width, height) < rules.min_side:
            broken.append(f"the shorter side must be at least {rules.min_side}")
        if max(width, height) > rules.max_side:
            broken.append(f"the longer side may be at most {rules.max_side}")
        if width * height > rules.max_pixels:
            broken.append(f"{width * height:,} pixels are over this model's {rules.max_pixels:,}")
        if max(width, height) > rules.max_ratio * min(width, height):
            broken.append(f"the sides may differ by {rules.max_ratio:g}:1 at most")
    if not broken and rules.canvases and (width, height) not in rules.canvases:
        broken.append(f"this model draws {len(rules.canvases)} sizes and this is none of them")
    if not broken:
        return None
    nearest = rules.closest(width, height)
    return f"size={width}x{height}: {'; '.join(broken)}. The nearest is {nearest[0]}x{nearest[1]}."


def parse_size(text: str) -> tuple[int, int]:
    """ "640x512" as (640, 512). Raises RequestError."""
    match = re.fullmatch(r"\s*(-?\d{1,9})\s*[xX×*]\s*(-?\d{1,9})\s*", text)
    if match is None:
        raise RequestError(f"size={text}: give width x height in pixels, as in 512x512.")
    return int(match[1]), int(match[2])


def parse_aspect_ratio(text: str) -> tuple[float, float]:
    """ "16:9" as (16.0, 9.0). Raises RequestError."""
    match = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*[:/]\s*(\d{1,6}(?:\.\d{1,6})?)\s*", str(text))
    if match is None or float(match[1]) == 0 or float(match[2]) == 0:
        raise RequestError(f"aspect_ratio={text}: give two positive numbers, as in 16:9.")
    return float(match[1]), float(match[2])


def _prompt_problems(prompt: str, spec: ModelSpec) -> list[str]:
    if not isinstance(prompt, str):
        return [f"prompt: text is needed, not {type(prompt).__name__}."]
    if not prompt.strip():
        return ["prompt: empty. Say what to draw, as in 'a red apple on a blue background'."]
    if len(prompt) > spec.max_prompt_characters:
        return [
            f"prompt: {len(prompt):,} characters; {spec.id} takes at most {spec.max_prompt_characters:,}. "
            "Shorten it."
        ]
    if "\0" in prompt or any("\ud800" <= letter <= "\udfff" for letter in prompt):
        return ["prompt: holds NUL or bytes that are not UTF-8 text. Save it as UTF-8."]
    problem = spec.prompt_problem(prompt, ())
    return [problem] if problem else []


def _system_problems(request: Request, spec: ModelSpec) -> list[Problem]:
    """Problems of the system prompt, of the request's own or the checkpoint's."""
    name, text, known = request.use_system_prompt, request.system_prompt, spec.system_prompts
    given = "use_system_prompt" if text is None else "system_prompt"
    if name is None and text is None:
        return []
    if known is None:
        return [(given, f"{given}: {spec.id} takes no system prompt. Leave it out.")]
    if name is not None and text is not None:
        return [(given, "use_system_prompt and system_prompt: both were given. Leave one out.")]
    if name is not None and name not in known:
        have = near(str(name), list(known)) if known else " The checkpoint brings none; say system_prompt."
        return [(given, f"use_system_prompt={name}: not one of the checkpoint's.{have}")]
    if text is not None and (not isinstance(text, str) or "\0" in text):
        return [(given, "system_prompt: text without NUL is needed.")]
    return []


def _system_prompt(request: Request, spec: ModelSpec) -> str | None:
    """The text, without the space around it, which no publisher's pipeline keeps; None = none."""
    named = (
        None if request.use_system_prompt is None else (spec.system_prompts or {})[request.use_system_prompt]
    )
    text = named if request.system_prompt is None else request.system_prompt
    return (text or "").strip() or None


def _number_problems(request: Request, spec: ModelSpec) -> list[Problem]:
    """Problems of steps, guidance, seed, image count and format."""
    problems: list[Problem] = []
    if request.steps is not None:
        problems += _steps_problems(request.steps, spec)
    if request.guidance_scale is not None:
        problems += _guidance_problems(request.guidance_scale, spec)
    problems += _rescale_problems(request, spec)
    if not _whole(request.images) or not 1 <= request.images <= MAX_IMAGES:
        rule = f"1 to {MAX_IMAGES} in one request. Make several requests for more."
        problems.append(("images", f"images={request.images}: {rule}"))
    elif not _whole(request.seed) or not 0 <= int(request.seed) <= MAX_SEED - int(request.images):
        rule = "a whole number from 0 to 2**63 - 1 - images. Try 0."
        problems.append(("seed", f"seed={request.seed}: {rule}"))
    if request.format is not None and request.format not in tuple(FORMATS):
        hint = near(str(request.format), tuple(FORMATS))
        problems.append(("format", f"format={request.format}: not one that is written.{hint}"))
    return problems


def _steps_problems(steps: int, spec: ModelSpec) -> list[Problem]:
    if spec.steps and steps not in spec.steps:
        allowed = " or ".join(str(count) for count in spec.steps)
        rule = f"{spec.id} was trained for {allowed} steps. Leave it out, or say {allowed}."
        return [("steps", f"steps={steps}: {rule}")]
    if not _whole(steps) or not 1 <= steps <= MAX_STEPS:
        rule = f"a whole number from 1 to {MAX_STEPS}. Leave it out for the model's own."
        return [("steps", f"steps={steps}: {rule}")]
    return []


def _guidance_problems(scale: float, spec: ModelSpec) -> list[Problem]:
    number = isinstance(scale, Real) and not isinstance(scale, bool) and math.isfinite(scale)
    if not spec.has_guidance and not (number and scale == 1):  # a scale of 1 is no guidance
        rule = f"{spec.id} is distilled and has no guidance. Leave it out."
    elif not number or not 0 <= scale <= MAX_GUIDANCE:
        rule = f"a number from 0 to {MAX_GUIDANCE:g}. Leave it out for the model's own."
    else:
        return []
    return [("guidance_scale", f"guidance_scale={scale}: {rule}")]


def _rescale_problems(request: Request, spec: ModelSpec) -> list[Problem]:
    """Problems of a wish to take guidance back, which needs guidance of two branches."""
    amount, scale = request.guidance_rescale, request.guidance_scale
    if not (isinstance(amount, Real) and not isinstance(amount, bool) and 0 <= amount <= 1):
        rule = "a number from 0 to 1. Leave it out for none."
        return [("guidance_rescale", f"guidance_rescale={amount}: {rule}")]
    scale = spec.default_guidance if scale is None else scale
    if amount and not (isinstance(scale, Real) and spec.branches(float(scale)) > 1):
        rule = (
            "takes back what guidance of two branches widens, and this request has none. Leave it out, or "
            "say a guidance_scale above 1 where the model has branches."
        )
        return [("guidance_rescale", f"guidance_rescale={amount}: {rule}")]
    return []


def _read_references(
    sources: Sequence[ReferenceSource], spec: ModelSpec, problems: list[Problem]
) -> tuple[list[tuple[str, Pixels]], list[str]]:
    """Names and pixels as they were given, and notes on what was changed; problems go to `problems`."""
    if isinstance(sources, bytes | str) or not isinstance(sources, Sequence):
        rule = f"a tuple of images is needed, not {type(sources).__name__}. Say references=(image,)."
        problems.append(("references", f"references: {rule}"))
        return [], []
    if len(sources) > spec.max_references:
        most = f"at most {spec.max_references}" if spec.max_references else "none"
        out = "Leave some out." if spec.max_references else "Leave them out."
        rule = f"{len(sources)} were given and {spec.id} takes {most}. {out}"
        problems.append(("references", f"references: {rule}"))
        return [], []
    images: list[tuple[str, Pixels]] = []
    notes: list[str] = []
    for number, source in enumerate(sources, 1):
        name = str(source) if isinstance(source, str | Path) else f"reference {number}"
        try:
            image = _read_reference(source, name)
        except ImageError as error:
            problems.append(("references", str(error)))
            continue
        height, width, _ = image.pixels.shape
        limit = spec.max_reference_ratio
        if max(width, height) > limit * min(width, height):
            rule = f"{width}x{height}; its sides may differ by {limit:g}:1 at most. Crop it."
            problems.append(("references", f"{name}: {rule}"))
            continue
        notes += image.notes
        images.append((name, image.pixels))
    return images, notes


def _sized(name: str, pixels: Pixels, spec: ModelSpec, canvas: tuple[int, int]) -> Reference:
    height, width, _ = pixels.shape
    size = spec.reference_size(width, height, canvas=canvas)
    return Reference(name, resize(pixels, *size), (width, height))


def _read_reference(source: ReferenceSource, name: str) -> ReadImage:
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or source.size == 0:
            raise ImageError(
                f"{name}: an array of {source.dtype} {list(source.shape)}; uint8 RGB [H, W, 3] is needed."
            )
        height, width, _ = source.shape
        check_size((width, height), name)
        return ReadImage(source)
    if not isinstance(source, str | Path | bytes):
        raise ImageError(
            f"{name}: {type(source).__name__} is none of path, file bytes and uint8 RGB array [H, W, 3]. "
            "Of a Pillow image, give numpy.asarray(image.convert('RGB'))."
        )
    return read_image(Path(source) if isinstance(source, str) else source, name=name)


def _output_size(
    request: Request,
    spec: ModelSpec,
    images: Sequence[tuple[str, Pixels]],
    problems: list[Problem],
    notes: list[str],
) -> tuple[int, int]:
    """Width and height: as asked, by ratio, after the first reference, or the model's default.

    With a resolution they are those of the canvas that is drawn for it.
    """
    rules = spec.sizes
    if request.size is not None and (request.aspect_ratio or request.resolution) is not None:
        other = "resolution" if request.aspect_ratio is None else "aspect_ratio"
        problems.append(("size", f"size and {other}: both were given. Leave one out."))
    elif request.size is not None:
        width, height = _pair(request.size)
        if width is None or height is None:
            rule = "(width, height) in whole pixels, as in (512, 512)."
            problems.append(("size", f"size={request.size}: {rule}"))
        elif problem := size_problem(width, height, rules):
            problems.append(("size", problem))
        else:
            return width, height
    elif request.aspect_ratio is not None or request.resolution is not None:
        return _canvas_of_ratio(request, rules, images, problems)
    elif images:
        return _canvas_of_reference(*images[0], spec, notes)
    return rules.default


def _pair(size: object) -> tuple[int, int] | tuple[None, None]:
    """Width and height as int, or two None when it is something else."""
    sides = tuple(size) if isinstance(size, Iterable) else ()
    whole = [int(side) for side in sides if _whole(side)]
    return (whole[0], whole[1]) if len(whole) == len(sides) == 2 else (None, None)


def _canvas_of_reference(name: str, pixels: Pixels, spec: ModelSpec, notes: list[str]) -> tuple[int, int]:
    """What an edit of the first reference wants, or the nearest legal canvas, with a note."""
    height, width, _ = pixels.shape
    size = spec.edit_size(width, height)
    nearest = spec.sizes.nearest(*size)
    if size_problem(*size, spec.sizes):
        notes.append(
            f"size {nearest[0]}x{nearest[1]}: {name} would give {size[0]}x{size[1]}, which this "
            "model does not draw. Say a size to choose another."
        )
    return nearest


def _tier(request: Request, rules: SizeRules, problems: list[Problem]) -> Tier | None:
    """The class of sizes that was asked for by name."""
    if request.resolution is None:
        return None
    named = {tier.name: tier for tier in rules.tiers}
    if str(request.resolution).upper() in named:
        return named[str(request.resolution).upper()]
    if named:
        rule = f"not a size.{near(str(request.resolution), tuple(named))}"
    else:
        rule = "this model has no sizes with a name. Say a size."
    problems.append(("resolution", f"resolution={request.resolution}: {rule}"))
    return None


def _canvas_of_ratio(
    request: Request, rules: SizeRules, images: Sequence[tuple[str, Pixels]], problems: list[Problem]
) -> tuple[int, int]:
    """The legal canvas of the ratio and the resolution; either may be left out."""
    tier = _tier(request, rules, problems)
    area = rules.default[0] * rules.default[1] if tier is None else tier.area
    text = request.aspect_ratio
    if text is None:
        down, across = images[0][1].shape[:2] if images else rules.default[::-1]
        ratio = min(max(across / down, 1 / rules.max_ratio), rules.max_ratio)
        return rules.of_ratio(area, ratio)
    try:
        across, down = parse_aspect_ratio(text)
    except RequestError as error:
        problems.append(("aspect_ratio", str(error)))
        return rules.default
    if max(across, down) > rules.max_ratio * min(across, down):
        most = f"{rules.max_ratio:g}"
        rule = f"the sides may differ by {most}:1 at most. Try {most}:1 or 1:{most}."
        problems.append(("aspect_ratio", f"aspect_ratio={text}: {rule}"))
        return rules.default
    return rules.of_ratio(area, across / down)


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's integers are some too


def listed(problems: Sequence[str]) -> str:
    """The problems of one request as one message."""
    if len(problems) == 1:
        return problems[0]
    return f"The request has {len(problems):,} problems:\n" + at_most(
        [f"  {problem}" for problem in problems]
    )
