"""The flags of `run` that say what to draw; `jobs` makes requests of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Wishes:
    """What was given of them, each under its own name."""

    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to draw; - reads stdin, @FILE a file.")
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Several prompts, one per line; .jsonl lines may set more keys.",
        ),
    ] = None
    image: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A reference image to edit; repeatable.")
    ] = None
    size: Annotated[str | None, typer.Option(metavar="WxH", help="Size of the picture in pixels.")] = None
    width: Annotated[int | None, typer.Option(help="Width in pixels, together with --height.")] = None
    height: Annotated[int | None, typer.Option(help="Height in pixels, together with --width.")] = None
    aspect_ratio: Annotated[
        str | None, typer.Option(metavar="W:H", help="Shape at the model's default area, as in 16:9.")
    ] = None
    resolution: Annotated[
        str | None, typer.Option(metavar="1K|2K|4K", help="Area by name, alone or with --aspect-ratio.")
    ] = None
    num_inference_steps: Annotated[int | None, typer.Option(help="Denoise steps.")] = None
    guidance_scale: Annotated[float | None, typer.Option(help="Classifier-free guidance.")] = None
    guidance_rescale: Annotated[
        float, typer.Option(help="How much of guidance's added contrast to take back, 0 to 1.")
    ] = 0.0
    use_system_prompt: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A system prompt of the checkpoint's, as in en_unified."),
    ] = None
    system_prompt: Annotated[str | None, typer.Option(help="One of your own; @FILE reads a file.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the first image; image k uses seed + k.")] = 0
    num_images: Annotated[int, typer.Option("-n", "--num-images", help="Images per prompt.")] = 1
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            readable=False,
            help="Where to write, as .png, .jpg, .jpeg or .webp; several become name-1, name-2, ...",
        ),
    ] = None
    format: Annotated[
        str | None, typer.Option(help="png, jpeg or webp; else by the name of -o, without one PNG.")
    ] = None
