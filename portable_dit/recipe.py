"""Recipe: what to run, on what, and how, as one strict YAML file per machine and model.

    recipe = load_recipe("cpu/h3-mini", {"layout.tensor": 2})

All mistakes are reported together, each with its dotted key and line. `Recipe.provenance` says for every key
whether its value is the default, stands in the recipe, or came as a flag.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError

from portable_dit.errors import RecipeError, at_most, near
from portable_dit.paths import kind_of
from portable_dit.refused_values import MOST_NEAR, place_of, why_refused
from portable_dit.yaml_lines import Document, Mistake, read_document

Provenance = Literal["default", "recipe", "flag"]
Precision = Literal["auto", "bfloat16", "float32", "float16"]
Format = Literal[
    "fp8_row",
    "fp8_tensor",
    "fp8_block128",
    "mxfp8",
    "int8_row",
    "int8_row_rotated",
    "fp8_weight_only",
    "int8_weight_only",
]
Placement = Literal["none", "component", "layerwise"]
Switch = Literal["auto", True, False]
Dialect = Literal["auto", "original", "diffusers", "comfy"]
Executor = Literal["auto", "inline", "mp", "torchrun", "ray"]
FORMATS: tuple[str, ...] = get_args(Format)

Text = Annotated[str, Field(min_length=1)]
Degree = Annotated[int, Field(ge=1, le=4096)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # YAML gives a list; what is kept cannot change


class Section(BaseModel):
    """Strict and frozen: an unknown key or a value of another type is a mistake, never a guess."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class DeviceSection(Section):
    backend: Text | None = None
    """Which backend runs it, as `portable-dit backends` lists them; null takes the one this machine has."""
    name: Text | None = None
    """The device the recipe was written for; shown to people, never matched."""
    count: Degree | None = None
    """How many devices the layout uses in all; null takes as many as it needs."""
    memory_gib: Annotated[float, Field(gt=0, le=2**20)] | None = None
    """Memory per device to plan with, and the most to take where the backend can hold to it; null takes what
    the device has."""


class QuantizationSection(Section):
    dit: Format | None = None
    """Number format of the DiT's linear layers; null keeps them in `precision`."""
    text_encoder: Format | None = None
    """Number format of the text encoder's linear layers."""
    vae: Format | None = None
    """Number format of the VAE's linear layers."""
    keep: Texts | None = None
    """Names or globs of layers that are never quantised; null takes the model's own list."""


class ComponentsSection(Section):
    dit: Text | None = None
    """Folder, .safetensors file or hub id of the DiT's weights, when they are not among `weights`."""
    vae: Text | None = None
    """The same for the VAE."""
    text_encoder: Text | None = None
    """The same for the text encoder; a hub id may end in :folder/inside."""


class LayoutSection(Section):
    tensor: Degree = 1
    """Tensor parallel: every layer of the DiT split over this many devices."""
    ulysses: Degree = 1
    """Sequence parallel by heads (all-to-all)."""
    ring: Degree = 1
    """Sequence parallel by passing keys and values around."""
    guidance: Degree = 1
    """The two guidance branches on separate devices."""
    expert: Degree = 1
    """Experts of a mixture-of-experts model split over this many devices."""
    data: Degree = 1
    """Whole replicas, each with requests of its own."""
    text_encoder_tensor: Degree = 1
    """Tensor parallel of the text encoder alone."""
    vae_tiles: Degree = 1
    """Tiles of the VAE decoded on this many devices."""


class OffloadSection(Section):
    dit: Placement = "none"
    """none = on the device, component = on the host between its stages, layerwise = block by block.

    Left out, with a note, on a device that shares the host's memory.
    """
    text_encoder: Placement = "none"
    """Where the text encoder rests, as for the DiT."""
    vae: Placement = "none"
    """Where the VAE rests; it has no layerwise form."""
    resident_blocks: Annotated[int, Field(ge=0)] | None = None
    """With layerwise offload: how many DiT blocks stay on the device; null keeps as many as leave room for
    the largest request."""


class GraphsSection(Section):
    dit: Switch = "auto"
    """Captured graphs for the denoise step; auto follows the backend."""
    vae: Switch = "auto"
    """Captured graphs for the VAE's tile batch."""
    memory_gib: Annotated[float, Field(gt=0, le=2**20)] | None = None
    """Memory of each device that captured calls may hold between them, planned with; null takes what the plan
    leaves free, at most a quarter of the device's."""


class SamplingSection(Section):
    steps: Annotated[int, Field(ge=1)] | None = None
    """Denoise steps; null takes the model's own count."""
    guidance_scale: Annotated[float, Field(ge=0)] | None = None
    """Classifier-free guidance; null takes the model's own, which may be none."""


class Recipe(Section):
    """One recipe. Make it with `load_recipe`, or directly in Python with the same keys."""

    model_config = ConfigDict(title="portable-dit recipe")

    description: str = ""
    """One line for people."""
    model: Text
    """Which model: h3-mini, h3-image, ..."""
    weights: Text = "builtin"
    """builtin (shipped in the package), random (right shapes, no meaning), a folder, a .safetensors file,
    or a hub id, which may pin a revision: ORG/NAME@REVISION."""
    components: ComponentsSection = ComponentsSection()
    lora: Texts = ()
    """LoRA adapters that are added to the DiT's weights while these are loaded: a file, a folder or a hub id,
    with a scale behind a colon where it is not 1."""
    checkpoint_dialect: Dialect = "auto"
    """How the checkpoint names and orders its tensors; auto reads it off the names, where they tell."""
    cache: bool = False
    """Keep quantised weights on disk for the next load; see `portable-dit weights cache`."""
    device: DeviceSection = DeviceSection()
    precision: Precision = "auto"
    """Activation type; auto is bfloat16 where the device computes in it, else float32."""
    quantization: QuantizationSection = QuantizationSection()
    layout: LayoutSection = LayoutSection()
    offload: OffloadSection = OffloadSection()
    attention: Text = "auto"
    """auto, or the id of one attention kernel, as `portable-dit plan` lists them."""
    graphs: GraphsSection = GraphsSection()
    vae_tiling: Switch = "auto"
    """Pictures decoded in overlapping tiles: less memory, and work for several devices, but faint borders
    where a model was not trained on tiles. auto does what the model's publishers do."""
    sampling: SamplingSection = SamplingSection()
    batch: Annotated[int, Field(ge=1, le=64)] = 1
    """Most pictures of one shape that are denoised side by side, of one request or of several that wait; only
    where a drawing on random numbers shows that no bit of any changes. 1 = one at a time."""
    prompt_cache_mib: Annotated[int, Field(ge=0, le=65_536)] = 64
    """Host memory for text states of earlier prompts, which are then not encoded again; 0 keeps none. Bench
    keeps none unless this is given."""
    executor: Executor = "auto"
    """inline = this process; mp, torchrun, ray = one process per device; auto = inline for one device, else
    mp."""
    rank_timeout_seconds: Annotated[float, Field(gt=0, le=7 * 24 * 3600)] = 300.0
    """With several processes: a request is given up when none of them makes progress for so long."""
    measured: dict[str, JsonValue] = {}
    """What was measured with this recipe, where and when; empty until it was."""
    reference: dict[str, JsonValue] = {}
    """Figures that others published for such a set-up, with their source."""

    _flags: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def digest(self) -> str:
        """sha256 over what decides the picture and its cost: neither words for people nor figures."""
        words: Any = {"description": True, "measured": True, "reference": True, "device": {"name": True}}
        words |= {} if self.lora else {"lora": True}
        words |= {"cache": True, "batch": True, "prompt_cache_mib": True, "rank_timeout_seconds": True}
        content = self.model_dump(mode="json", exclude=words)
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def provenance(self) -> Mapping[str, Provenance]:
        """Where each value came from, by dotted key."""
        return {key: self._origin(key, given) for key, _, given in _leaves(self, "", given=True)}

    def values(self) -> dict[str, Any]:
        """Every value by dotted key, in the order of the file format."""
        return {key: value for key, value, _ in _leaves(self, "", given=True)}

    def _origin(self, key: str, given: bool) -> Provenance:
        if any(key == flag or key.startswith(f"{flag}.") for flag in self._flags):
            return "flag"
        return "recipe" if given else "default"


def load_recipe(
    ref: str | Path, overrides: Mapping[str, Any] | None = None, *, folders: Sequence[Path] = ()
) -> Recipe:
    """The recipe at a path, or a packaged one by name ("cpu/h3-mini"), with dotted overrides from flags.

    folders: more places to look names up, after the packaged ones. Raises RecipeError that lists every
    mistake in the file and in the overrides.
    """
    return check_recipe(read_document(find_recipe(ref, folders)), overrides, title=str(ref))


def make_recipe(values: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Recipe:
    """A recipe from nested data instead of a file, checked the same way."""
    return check_recipe(Document(dict(values), {}, ()), overrides, title="recipe")


def find_recipe(ref: str | Path, folders: Sequence[Path] = ()) -> Path:
    """The file that a path or a name means. Raises RecipeError with the near name if there is none."""
    if not isinstance(ref, str | Path):
        raise RecipeError(
            f"recipe: a name or a path is needed, not {type(ref).__name__}. make_recipe takes nested data."
        )
    path = Path(ref)
    kind = kind_of(path)
    if kind == "folder":
        raise RecipeError(f"recipe {ref}: this is a folder. Name one of the .yaml files in it.")
    if kind != "missing":
        return path
    named = named_recipes(folders)
    if str(ref) in named:
        return named[str(ref)]
    bare = str(ref).removeprefix("recipes/").removesuffix(".yaml")
    if bare in named:
        raise RecipeError(f"recipe {ref}: there is no such file here. The packaged one is called {bare!r}.")
    hint = near(bare, list(named), listed_by="portable-dit recipes list")
    raise RecipeError(f"recipe {ref}: neither a file nor a recipe's name.{hint}")


def named_recipes(folders: Sequence[Path] = ()) -> dict[str, Path]:
    """Every recipe that is found by name, sorted by name; packaged ones win over those in `folders`."""
    found: dict[str, Path] = {}
    for folder in (_folder(), *folders):
        for path in folder.rglob("*.yaml"):
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return dict(sorted(found.items()))


def recipe_schema() -> dict[str, Any]:
    """The JSON Schema of a recipe file, for editors and other tools."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def check_recipe(document: Document, overrides: Mapping[str, Any] | None, *, title: str) -> Recipe:
    """A document and its overrides as a Recipe, or RecipeError with all mistakes."""
    overrides = overrides or {}
    mistakes = list(document.mistakes)
    if not document.data and mistakes:
        raise _error(title, mistakes)
    data = _copy(document.data)
    for key, value in overrides.items():
        mistakes += _put(data, key, value)
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        told = {mistake.key for mistake in mistakes if mistake.key}
        mistakes += [found for found in _explain(error, document, overrides) if found.key not in told]
    if mistakes:
        raise _error(title, mistakes)
    recipe._flags = frozenset(overrides)
    return recipe


def _folder() -> Path:
    """Packaged recipes lie inside the package when installed and beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def _leaves(section: Section, prefix: str, *, given: bool) -> Iterator[tuple[str, Any, bool]]:
    """(dotted key, value, whether somebody gave it) for every key that is not itself a section."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        here = given and name in section.model_fields_set
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.", given=here)
        else:
            yield f"{prefix}{name}", value, here


def _copy(data: Any) -> Any:
    return {k: _copy(v) for k, v in data.items()} if isinstance(data, dict) else data


def _put(data: dict[str, Any], key: str, value: Any) -> list[Mistake]:
    """Writes a dotted override into the nested data; what is in the way is the mistake returned."""
    if not isinstance(key, str):
        return [Mistake(repr(key), None, "a key must be text, as in 'layout.tensor'")]
    *above, last = key.split(".")
    for depth, name in enumerate(above):
        inner = data.setdefault(name, {})
        if not isinstance(inner, dict):
            return [
                Mistake(key, None, f"{'.'.join(above[: depth + 1])} is a single value, it has no keys inside")
            ]
        data = inner
    data[last] = value
    return []


def _explain(error: ValidationError, document: Document, overrides: Mapping[str, Any]) -> list[Mistake]:
    found: dict[str, Mistake] = {}
    for number, item in enumerate(error.errors(include_url=False)):
        names, section = place_of(item, Recipe)
        key = ".".join(names)
        by_flag = any(
            key == flag or key.startswith(f"{flag}.") or flag.startswith(f"{key}.") for flag in overrides
        )
        line = None if by_flag else document.line_of(key)
        why = _why(key, item, section if number < MOST_NEAR else None)
        found.setdefault(key, Mistake(key, line, why + (" (given as a flag)" if by_flag else "")))
    return list(found.values())


def _why(key: str, item: Any, section: type | None) -> str:
    """The rule that a value breaks, in our words: what was asked, the rule, the way out."""
    if item["type"] == "missing" and key == "model":
        return "missing. Every recipe says it, for example `model: h3-mini`"
    quoted = item["type"] == "string_type" and item["input"] is not None
    quotes = "; put it in quotes" if quoted else ""
    return why_refused(item, section) + quotes


def _error(title: str, mistakes: list[Mistake]) -> RecipeError:
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    ordered = sorted(mistakes, key=lambda m: (m.line is None, m.line or 0))
    return RecipeError(f"recipe {title}: {count}\n" + at_most([f"  {mistake}" for mistake in ordered]))
