"""Setup: everything that is decided for a recipe on this machine, before a byte is loaded.

A wish that cannot be met is refused here: recipe, spec, backend, plan, and whether a request fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_dit import host
from portable_dit.capabilities import Capabilities, Device
from portable_dit.catalog import fetch_spec, fetch_weights, find_family, is_remote, load_recipe, read_spec
from portable_dit.errors import DoesNotFitError, RecipeError, RequestError
from portable_dit.models import RANDOM
from portable_dit.models.spec import Family, ModelSpec
from portable_dit.paths import told_what_is_hidden
from portable_dit.plan import Plan, make_plan
from portable_dit.plugins import select_backend
from portable_dit.recipe import Recipe
from portable_dit.recipe_rules import FREE_MEMORY, layout_of
from portable_dit.request import Request, ResolvedRequest, validate_request

if TYPE_CHECKING:
    from portable_dit.backend import Backend

HOST = "cpu"  # what torch calls the memory that offloaded weights rest in
# Of a device's memory: less than this in use is the driver's own, which differs by so much between versions.
NEGLIGIBLE_SHARE = 0.01
BYTES_A_TOKEN = 3  # of words in UTF-8; fewer than English (4 to 5) and Chinese (about 4) have


@dataclass(frozen=True)
class Setup:
    """Everything that was decided for a recipe on this machine, before anything is loaded."""

    recipe: Recipe
    family: Family
    spec: ModelSpec
    backend: Backend
    device: Device
    capabilities: Capabilities
    plan: Plan
    strict: bool

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything a person may want to know of how the recipe is met; `changes` are among them."""
        return (*(note.text for note in self.plan.notes if not note.changed), *self.changes)

    @property
    def lasting_notes(self) -> tuple[str, ...]:
        """Those of the notes that are the same at every start."""
        passing = {note.text for note in self.plan.notes if note.code in FREE_MEMORY}
        return tuple(note for note in self.notes if note not in passing)

    @property
    def changes(self) -> tuple[str, ...]:
        """Wishes that are met in another way than they were written."""
        return tuple(note.text for note in self.plan.notes if note.changed)

    def resolve(self, request: Request) -> ResolvedRequest:
        """The request with all defaults filled in, refused when it breaks a rule or does not fit."""
        resolved = resolve_request(request, self.recipe, self.spec, strict=self.strict)
        self.require_fit(resolved)
        return resolved

    def require_fit(self, request: ResolvedRequest) -> None:
        """Raises DoesNotFitError when this request needs more memory than there is.

        Strict, RequestError when its images do not fit side by side as the recipe wants them.
        """
        plan = self.plan_of(request)
        require_fit(plan)
        wanted, fits = min(self.recipe.batch, request.images), plan.workload.batch
        if self.strict and fits < wanted:
            at = f"{request.width}x{request.height}"
            problem = f"strict: batch={wanted}: {fits} of {at} fit side by side. Say batch={fits}."
            raise RequestError(problem, [("images", problem)])

    def plan_of(self, request: ResolvedRequest) -> Plan:
        """The plan as it is for this request, whose memory may differ from that of the default picture."""
        workload = replace(
            self.plan.workload,
            width=request.width,
            height=request.height,
            prompt_tokens=max(self.spec.prompt_tokens, _tokens(request)),
            reference_sizes=tuple(reference.size for reference in request.references),
        )
        if workload == self.plan.workload:
            return self.plan
        recipe, offload = self.recipe, self.plan.offload
        if offload.dit == "layerwise":  # blocks stay where they were loaded
            stay = recipe.offload.model_copy(update={"resident_blocks": offload.resident_blocks})
            recipe = recipe.model_copy(update={"offload": stay})
        kernels, strict = self.backend.kernel_lists(), self.strict
        return make_plan(recipe, self.spec, self.capabilities, kernels, workload, strict=strict)


@told_what_is_hidden()
def resolve_request(
    request: Request, recipe: Recipe, spec: ModelSpec, *, strict: bool = False
) -> ResolvedRequest:
    """The request with the defaults of recipe and model filled in. Raises RequestError. Torch-free."""
    steps, scale = recipe.sampling.steps, recipe.sampling.guidance_scale
    request = replace(
        request,
        steps=steps if request.steps is None else request.steps,
        guidance_scale=scale if request.guidance_scale is None else request.guidance_scale,
    )
    resolved = validate_request(request, spec)
    if strict and resolved.notes:
        raise RequestError("\n".join(f"strict: {note}" for note in resolved.notes))
    return resolved


def set_up(
    recipe: Recipe | str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    strict: bool = False,
    rank: int = 0,
) -> Setup:
    """The decisions for a recipe, or one error that says all that is wrong with it. Loads nothing.

    rank: which of this host's devices it is for, where the layout has several; counted anew beyond the last.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise RecipeError("overrides: this recipe is loaded already. Give them to load_recipe.")
    spec = read_spec(recipe)
    backend = select_backend(recipe.device.backend)
    if backend.id != HOST:  # on the host pictures come and go, and keep a third more memory with large pages
        host.ask_for_huge_pages()
    devices = backend.devices()
    device = devices[rank % len(devices)]
    capabilities = look_at(backend, device, recipe)
    plan = make_plan(recipe, spec, capabilities, backend.kernel_lists(), strict=strict)
    require_packages(spec)
    if plan.executor == "ray" and find_spec("ray") is None:
        raise RecipeError(
            "executor=ray: the package ray is not installed. Type: pip install 'portable-dit[ray]', or "
            "pip install '.[ray]' in a clone; or say executor=mp, which needs no more than one host."
        )
    return Setup(recipe, find_family(recipe.model), spec, backend, device, capabilities, plan, strict)


def look_at(backend: Backend, device: Device, recipe: Recipe) -> Capabilities:
    """What the device can do, and what of its memory is in use already.

    Where several devices share a model nobody looks: their ranks must all decide alike.
    """
    capabilities = backend.capabilities(device)
    is_shared = capabilities.host_shares_memory or layout_of(recipe).world > 1
    memory = None if is_shared else backend.memory(device)
    if memory is None:
        return capabilities
    free, total = memory
    used = total - free - capabilities.runtime_bytes
    return replace(capabilities, used_bytes=used if used > NEGLIGIBLE_SHARE * total else 0)


def fetch(setup: Setup) -> Setup:
    """The setup with its weights on this machine: downloaded if they are on a hub and not here yet.

    What was decided from published sizes is decided anew from the checkpoint's own configs, which come first,
    so that what does not fit is refused before the weights are downloaded.
    """
    if setup.recipe.weights == RANDOM or not is_remote(setup.recipe):
        return setup
    spec = fetch_spec(setup.recipe)
    if spec is not None:
        kernels = setup.backend.kernel_lists()
        require_fit(make_plan(setup.recipe, spec, setup.capabilities, kernels, strict=setup.strict))
    fetch_weights(setup.recipe)
    return set_up(setup.recipe, strict=setup.strict)


def _tokens(request: ResolvedRequest) -> int:
    """About how many tokens the request's texts are, rather too many than too few.

    Digits and signs count one for each byte: tokenizers have a token for each digit, and for most signs.
    """
    text = request.prompt + (request.system_prompt or "")
    words = "".join(letter for letter in text if letter.isalpha() or letter.isspace())
    word_bytes, all_bytes = len(words.encode()), len(text.encode())
    return all_bytes - word_bytes - (-word_bytes // BYTES_A_TOKEN)


def require_packages(spec: ModelSpec) -> None:
    """Raises RecipeError when a package that the model runs on is not installed here."""
    for module, advice in spec.requires.items():
        if find_spec(module) is None:
            raise RecipeError(
                f"model: {spec.id} runs on the package {module}, which is not installed. Type: {advice}"
            )


def require_fit(plan: Plan) -> None:
    """Raises DoesNotFitError with the plan's verdict when it does not fit."""
    if not plan.fits:
        workload = plan.workload
        raise DoesNotFitError(
            f"{plan.model} at {workload.width}x{workload.height} on {plan.device} {plan.verdict}"
        )
