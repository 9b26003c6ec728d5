"""The flags that choose a recipe and change it, the same on every command that takes one.

    @recipe_flags
    def plan(wish: RecipeWish, json: JsonFlag = False) -> None:
        recipe = wish.load()

The decorator swaps the parameter `wish` for the flags; the command sees a recipe's name and dotted overrides.
Any other parameter whose type is a dataclass it swaps for a flag for each field.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from portable_dit import DEFAULT_RECIPE
from portable_dit.errors import RecipeError

if TYPE_CHECKING:
    from portable_dit.recipe import Recipe

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
StrictFlag = Annotated[
    bool, typer.Option("--strict", help="Refuse what would be met in another way than it was written.")
]


_SETTING = r"[a-z_]+(?:\.[a-z_]+)*=\w+(?:\.\d+)?"
ADVICE = re.compile(rf"\b(?:Say|Try|would with) ({_SETTING}(?: {_SETTING})*)")


@dataclass(frozen=True)
class RecipeWish:
    """Which recipe was asked for, and what the flags change in it: dotted key -> value."""

    ref: str = DEFAULT_RECIPE
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Recipe:
        """The recipe with its overrides. Raises RecipeError with all mistakes."""
        from portable_dit.catalog import load_recipe

        return load_recipe(self.ref, self.overrides)


@dataclass(frozen=True)
class Flag:
    """One named flag: the parameter of the command, its type, and the keys that it sets.

    values: None sets the keys to what was given; otherwise the flag takes nothing and sets these.
    """

    parameter: str
    names: tuple[str, ...]
    keys: tuple[str, ...]
    help: str
    type: Any = str
    values: tuple[Any, ...] | None = None

    def option(self) -> inspect.Parameter:
        note = typer.Option(*self.names, help=self.help, show_default=False)
        kind: Any = Annotated[bool, note] if self.values else Annotated[self.type | None, note]
        default = False if self.values else None
        return inspect.Parameter(
            self.parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
        )

    def overrides(self, given: Any) -> dict[str, Any]:
        if given is None or given is False or given == []:
            return {}
        return dict(zip(self.keys, self.values or (given,) * len(self.keys), strict=True))


FLAGS = (
    Flag(
        "lora",
        ("--lora",),
        ("lora",),
        "A LoRA adapter, file, folder or hub id, as PATH or PATH:SCALE; repeatable.",
        list[str],
    ),
    Flag("backend", ("--backend",), ("device.backend",), "Which backend runs it."),
    Flag("precision", ("--precision",), ("precision",), "auto, bfloat16, float32 or float16."),
    Flag("quantization", ("--quantization",), ("quantization.dit",), "Number format of the DiT's layers."),
    Flag("attention_backend", ("--attention-backend",), ("attention",), "auto, or one attention kernel."),
    Flag(
        "enforce_eager",
        ("--enforce-eager",),
        ("graphs.dit", "graphs.vae"),
        "Capture no graphs.",
        values=(False, False),
    ),
    Flag(
        "enable_layerwise_offload",
        ("--enable-layerwise-offload",),
        ("offload.dit",),
        "Keep what does not fit of the DiT on the host, and bring it block by block.",
        values=("layerwise",),
    ),
    Flag(
        "max_vram",
        ("--max-vram",),
        ("device.memory_gib",),
        "GiB of each device to plan with and to hold to.",
        float,
    ),
    Flag("tensor_parallel_size", ("--tensor-parallel-size",), ("layout.tensor",), "Split every layer.", int),
    Flag(
        "ulysses_degree",
        ("--ulysses-degree", "--usp"),
        ("layout.ulysses",),
        "Split the sequence by heads.",
        int,
    ),
    Flag("ring_degree", ("--ring-degree",), ("layout.ring",), "Split the sequence in a ring.", int),
    Flag(
        "cfg_parallel_size", ("--cfg-parallel-size",), ("layout.guidance",), "Split guidance branches.", int
    ),
    Flag(
        "text_encoder_tp_size",
        ("--text-encoder-tp-size",),
        ("layout.text_encoder_tensor",),
        "Split the text encoder's layers.",
        int,
    ),
    Flag(
        "vae_patch_parallel_size",
        ("--vae-patch-parallel-size",),
        ("layout.vae_tiles",),
        "Spread the VAE's tiles.",
        int,
    ),
    Flag(
        "distributed_executor_backend",
        ("--distributed-executor-backend",),
        ("executor",),
        "inline, mp, torchrun or ray.",
    ),
)


def recipe_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with --recipe, --set and every flag of FLAGS instead of its parameter `wish`."""
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {
        name: p.annotation
        for name, p in own.parameters.items()
        if name != "wish" and isinstance(p.annotation, type) and is_dataclass(p.annotation)
    }
    parameters = [
        flag
        for name, p in own.parameters.items()
        if name != "wish"
        for flag in (_flags_of(groups[name]) if name in groups else [p])
    ]
    added = (_recipe_option(), _set_option(), *(flag.option() for flag in FLAGS))
    names = {p.name for p in added}

    @functools.wraps(command)
    def with_flags(*args: Any, **kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in names}
        overrides = collect_overrides(given, given["settings"] or [])
        for name, group in groups.items():
            kwargs[name] = group(**{one.name: kwargs.pop(one.name) for one in fields(group)})
        command(*args, wish=RecipeWish(given["recipe"], overrides), **kwargs)

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    signature = own.replace(parameters=[*added[:2], *keyword, *added[2:]])
    with_flags.__signature__ = signature  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return with_flags


def _flags_of(group: type[Any]) -> list[inspect.Parameter]:
    """A parameter for each field of a dataclass of flags."""
    kinds = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name]
        )
        for one in fields(group)
    ]


def collect_overrides(given: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Dotted overrides of the named flags in `given` and of `--set KEY=VALUE` settings.

    Raises RecipeError when a setting cannot be read or a key is set twice to different values.
    """
    mistakes: list[str] = []
    overrides: dict[str, Any] = {}
    pairs = [
        (flag.names[0], key, value)
        for flag in FLAGS
        for key, value in flag.overrides(given.get(flag.parameter)).items()
    ]
    for setting in settings:
        pair, mistake = _read_setting(setting)
        if mistake is None:
            pairs.append((f"--set {setting}", *pair))
        else:
            mistakes.append(f"  --set {setting}: {mistake}")
    for source, key, value in pairs:
        if key in overrides and overrides[key] != value:
            mistakes.append(f"  {source}: {key} was already given as {overrides[key]!r}. Say it once.")
        overrides[key] = value
    if mistakes:
        raise RecipeError("flags that change the recipe:\n" + "\n".join(mistakes))
    return overrides


def as_flags(message: str) -> str | None:
    """How the keys that a message about a recipe advises are said here; None where it advises none.

    Messages speak of `key=value`, which is right for files, Python and this command line alike.
    """
    settings: dict[str, str] = {}
    for found in ADVICE.finditer(message):
        for setting in found[1].split():
            settings.setdefault(setting.partition("=")[0], setting)  # a key can be said once
    flags = " ".join(f"--set {setting}" for setting in settings.values())
    return f"On the command line: {flags}" if flags else None


def _read_setting(setting: str) -> tuple[tuple[str, Any], str | None]:
    """((dotted key, value), None), or why the setting cannot be read."""
    from portable_dit.yaml_lines import parse_value

    key, equals, text = (part.strip() for part in setting.partition("="))
    if not equals or "" in key.split("."):
        return (key, None), "say KEY=VALUE with a dotted key, as in layout.tensor=2"
    try:
        return (key, parse_value(text)), None
    except ValueError as error:
        return (key, None), str(error)


def _recipe_option() -> inspect.Parameter:
    note = typer.Option("--recipe", metavar="NAME|FILE", help="A packaged recipe by name, or a YAML file.")
    return inspect.Parameter(
        "recipe", inspect.Parameter.KEYWORD_ONLY, default=DEFAULT_RECIPE, annotation=Annotated[str, note]
    )


def _set_option() -> inspect.Parameter:
    note = typer.Option("--set", metavar="KEY=VALUE", help="Set any key; repeatable.")
    return inspect.Parameter(
        "settings",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[list[str] | None, note],
    )
