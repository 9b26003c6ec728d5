"""`portable-dit serve`: pictures over HTTP, for OpenAI's clients, curl and browsers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from portable_dit.cli.options import RecipeWish, StrictFlag, recipe_flags
from portable_dit.cli.terminal import tell
from portable_dit.errors import UserError

if TYPE_CHECKING:
    from portable_dit.server.settings import Settings

MIB = 2**20
MOST_SECONDS = 7 * 24 * 3600.0
MOST_HOURS = 10 * 365 * 24.0
TRACE = Path("portable-dit-trace.json")


@dataclass(frozen=True)
class Flags:
    """What a server is told beside its recipe."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one and says which.")] = 8091
    jobs: Annotated[
        Path | None,
        typer.Option(readable=False, metavar="FILE", help="Where jobs and their pictures are kept."),
    ] = None
    served_model_name: Annotated[str | None, typer.Option(help="What callers name the model.")] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            readable=False, metavar="FILE", help="API keys, one a line; also PORTABLE_DIT_API_KEYS."
        ),
    ] = None
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 64
    max_images: Annotated[int, typer.Option(min=1, max=128, help="Pictures in one request.")] = 10
    max_pixels: Annotated[
        int | None, typer.Option(min=1, help="Pixels of one picture; else what the model draws.")
    ] = None
    max_body_mib: Annotated[int, typer.Option(min=1, max=65_536, help="Size of a request's body.")] = 96
    deadline: Annotated[
        float, typer.Option(min=0.1, max=MOST_SECONDS, help="Seconds from acceptance to the answer.")
    ] = 900.0
    keep_hours: Annotated[
        float, typer.Option(min=0.0, max=MOST_HOURS, help="How long pictures of jobs are kept.")
    ] = 24.0
    allow_image_host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Fetch references from it; also *.domain or a network."),
    ] = None
    allowed_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name that this server is called by.")
    ] = None
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="A site whose pages may call this server.")
    ] = None
    enable_diffusion_pipeline_profiler: Annotated[
        bool, typer.Option(help="Log the time of each part of the model, and write a Chrome trace.")
    ] = False
    profile: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            metavar="FILE",
            help="Where the profiler writes its trace; else portable-dit-trace.json.",
        ),
    ] = None
    quiet: Annotated[bool, typer.Option(help="Do not log every request.")] = False


@recipe_flags
def serve(wish: RecipeWish, flags: Flags, strict: StrictFlag = False) -> None:
    """Serve a recipe until stopped; SIGTERM or Ctrl-C finishes what was accepted first."""
    try:
        from portable_dit.server.serving import serve as run
    except ModuleNotFoundError as error:
        raise UserError(
            f"serve: needs the package {error.name}, which is not installed. "
            "Type: pip install 'portable-dit[serve]', or pip install '.[serve]' in a clone."
        ) from error
    recipe = wish.load()
    if recipe.executor == "torchrun":
        raise UserError(
            "executor=torchrun: the server starts its own processes, and torchrun would start many servers. "
            "Use --distributed-executor-backend mp, or ray for several hosts."
        )
    settings = _settings(flags, strict=strict)
    if not settings.is_loopback and not settings.keys:
        reached = f"{flags.host} can be reached from other machines"
        tell(f"note: {reached}, and without --api-key-file anybody may draw.")

    def log(line: str) -> None:
        if not flags.quiet or line.startswith(("worker", "error", "SIG")):
            tell(line)

    def bound(port: int) -> None:
        name = f"[{flags.host}]" if ":" in flags.host else flags.host
        typer.echo(f"http://{name}:{port}")
        sys.stdout.flush()

    run(recipe, settings, log=log, on_bound=bound)


def _settings(flags: Flags, *, strict: bool) -> Settings:
    """What the flags say of the server. Raises UserError."""
    from portable_dit.server.settings import (
        Limits,
        Settings,
        check_host,
        check_origin,
        default_jobs_file,
        read_keys,
    )

    if flags.profile is not None and not flags.enable_diffusion_pipeline_profiler:
        rule = "says where a trace goes. Say --enable-diffusion-pipeline-profiler too."
        raise UserError(f"--profile {flags.profile}: {rule}")
    limits = Limits(
        body_bytes=flags.max_body_mib * MIB,
        images=flags.max_images,
        pixels=flags.max_pixels,
        queue=flags.max_queue,
        deadline_seconds=flags.deadline,
    )
    return Settings(
        host=flags.host,
        port=flags.port,
        jobs=flags.jobs or default_jobs_file(flags.port),
        model_name=flags.served_model_name,
        keys=read_keys(flags.api_key_file),
        limits=limits,
        keep_seconds=flags.keep_hours * 3600,
        image_hosts=tuple(check_host(name, "--allow-image-host") for name in flags.allow_image_host or ()),
        allowed_hosts=tuple(check_host(name, "--allowed-host") for name in flags.allowed_host or ()),
        cors_origins=tuple(check_origin(site) for site in flags.cors_origin or ()),
        strict=strict,
        profile=(flags.profile or TRACE) if flags.enable_diffusion_pipeline_profiler else None,
    )
