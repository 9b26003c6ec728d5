"""Checkpoints from a hub: `weights: ORG/NAME`, `ORG/NAME@REVISION`, `ORG/NAME@REVISION:FOLDER/INSIDE`.

Downloads go through huggingface_hub into its own cache, so that what other programs fetched is found and an
interrupted download goes on where it stopped. A checkpoint repository may hold the same weights several
times; the family says which files make one, and only those are fetched. What is in the cache and whole is
used without asking the hub. The library is imported when a hub is named, and not before.
"""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_dit.errors import WeightsError
from portable_dit.lora import CONFIG, SUFFIX, adapter_among, has_config
from portable_dit.models.spec import Family, HubFiles

DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class HubRef:
    """A place on a hub. revision: branch, tag or commit. inside: a folder or file of it, "" = all.

    key: of the recipe, which asks for it.
    """

    repo: str
    revision: str = DEFAULT_REVISION
    inside: str = ""
    key: str = "weights"

    @classmethod
    def parse(cls, words: str, key: str = "weights") -> HubRef:
        """From ORG/NAME[@REVISION][:INSIDE], which `models.HUB_ID` has matched."""
        rest, _, inside = words.partition(":")
        repo, _, revision = rest.partition("@")
        return cls(repo, revision or DEFAULT_REVISION, inside.strip("/"), key)

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repo}{revision}{':' if self.inside else ''}{self.inside}"


def cached(words: str) -> Path | None:
    """The folder or file of a hub reference that is on this machine and whole; None when it is not."""
    ref = HubRef.parse(words)
    try:
        library = _library(ref)
    except WeightsError:
        return None
    try:
        # No patterns: where the snapshot lies, whether or not all of the repository was fetched.
        found = library.snapshot_download(
            ref.repo, revision=ref.revision, local_files_only=True, allow_patterns=[]
        )
    except library.errors.LocalEntryNotFoundError:
        return None
    place = Path(found) / ref.inside
    return place if place.exists() and _is_whole(place) else None


def elsewhere(checkpoint: Path, family: Family, *, dialect: str) -> dict[str, Path]:
    """Components that a fetched checkpoint takes from other repositories, as far as they are here."""
    names = [path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()]
    found = {}
    for component, (repo, inside) in family.hub_files(names, dialect=dialect).elsewhere.items():
        place = cached(f"{repo}:{inside}")
        if place is not None:
            found[component] = place
    return found


def fetch_checkpoint(
    words: str,
    family: Family,
    *,
    dialect: str,
    without: Collection[str] = (),
    configs_only: bool = False,
) -> tuple[Path, dict[str, Path]]:
    """The folder of a checkpoint, and of components it lacks, downloaded as far as they are not here yet.

    dialect: which copy of the weights, where there are several. without: components that come from other
    places. configs_only: leave the weights for later. Raises WeightsError that says what stands in the way.
    """
    ref = HubRef.parse(words)
    files = HubFiles(())

    def choose(names: Sequence[str]) -> Sequence[str]:
        nonlocal files
        inside = [n.removeprefix(f"{ref.inside}/") for n in names if n.startswith(ref.inside)]
        if ref.inside in names:
            return [ref.inside]
        try:
            files = family.hub_files(inside, dialect=dialect)
        except WeightsError as error:
            raise WeightsError(f"weights: {ref}: {error}") from error
        return [f"{ref.inside}/{n}" if ref.inside else n for n in files.names]

    folder = _fetch(ref, choose, configs_only)
    others = {
        component: fetch_component(f"{repo}:{part}", configs_only=configs_only)
        for component, (repo, part) in files.elsewhere.items()
        if component not in without
    }
    return folder, others


def fetch_component(words: str, *, configs_only: bool = False) -> Path:
    """The folder or file of one component, with the tokenizer and processor that lie beside it."""
    ref = HubRef.parse(words)
    above = ref.inside.rpartition("/")[0]
    beside = tuple(f"{above}/{name}/".lstrip("/") for name in ("tokenizer", "processor"))

    def choose(names: Sequence[str]) -> Sequence[str]:
        if ref.inside in names:
            return [ref.inside]
        wanted = [name for name in names if not ref.inside or name.startswith(f"{ref.inside}/")]
        if not any(name.endswith(".safetensors") for name in wanted):
            raise WeightsError(
                f"{ref}: no .safetensors files there. The repository has the folders "
                f"{', '.join(sorted({n.rpartition('/')[0] for n in names if '/' in n})) or 'of nothing'}."
            )
        return [*wanted, *(name for name in names if name.startswith(beside))]

    return _fetch(ref, choose, configs_only)


def fetch_adapter(words: str) -> Path:
    """The folder or file of a LoRA adapter, with what its trainer says beside it and nothing else."""
    ref = HubRef.parse(words, "lora")
    folder, _, file = ref.inside.rpartition("/") if ref.inside.endswith(SUFFIX) else (ref.inside, "", "")
    inside = f"{folder}/" if folder else ""

    def choose(names: Sequence[str]) -> Sequence[str]:
        there = [name.removeprefix(inside) for name in names if name.rpartition("/")[0] == folder]
        if file and file not in there:
            raise WeightsError(f"lora: {ref}: no such {SUFFIX} file in the repository.")
        found = file or adapter_among(there, str(ref))
        config = [CONFIG] if CONFIG in there and has_config(found, there) else []
        return [f"{inside}{name}" for name in (found, *config)]

    return _fetch(ref, choose, configs_only=False)


def _fetch(ref: HubRef, choose: Callable[[Sequence[str]], Sequence[str]], configs_only: bool) -> Path:
    """Downloads the chosen files of a repository; gives the folder or file that `ref` names."""
    library = _library(ref)
    with _explained(ref, library):
        info = library.HfApi().model_info(ref.repo, revision=ref.revision, files_metadata=True)
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
        names = choose(sorted(sizes))
        if configs_only:
            names = [name for name in names if not name.endswith(".safetensors")]
        _require_space(ref, sum(sizes[name] for name in names), library)
        patterns = [glob.escape(name) for name in names]
        folder = library.snapshot_download(ref.repo, revision=ref.revision, allow_patterns=patterns)
    return Path(folder) / ref.inside


def _require_space(ref: HubRef, need: int, library: Any) -> None:
    """Refuses a download that the disk of the cache cannot hold, as far as nothing of it is there."""
    cache = Path(library.constants.HF_HUB_CACHE)
    there = cache / f"models--{ref.repo.replace('/', '--')}" / "blobs"
    have = sum(path.stat().st_size for path in there.glob("*")) if there.is_dir() else 0
    disk = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(disk).free
    if free < need - have:
        raise WeightsError(
            f"{ref.key}: {ref}: {need - have:,} bytes are to be downloaded, and {cache} has {free:,} free. "
            "Make room, or set HF_HOME to a larger disk."
        )


@contextmanager
def _explained(ref: HubRef, library: Any) -> Iterator[None]:
    """Turns what the library raises into what was asked, the rule, and the way out."""
    errors = library.errors
    by_hand = f"Or fetch it elsewhere (hf download {ref.repo} --local-dir FOLDER) and say {ref.key}: FOLDER."
    try:
        yield
    except errors.GatedRepoError as error:
        raise WeightsError(
            f"{ref.key}: {ref}: the repository is gated. Accept its licence on its page, then `hf auth "
            "login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise WeightsError(
            f"{ref.key}: {ref}: the repository has no revision {ref.revision!r}. Name a branch, tag or "
            "commit after the @, or leave it out."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise WeightsError(
            f"{ref.key}: {ref}: the hub has no such repository, or it is private. Check the name; for a "
            "private one `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.HfHubHTTPError as error:
        raise WeightsError(f"{ref.key}: {ref}: the hub refused ({_first_line(error)}). {by_hand}") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HTTPError) as error:
        raise WeightsError(
            f"{ref.key}: {ref}: not whole on this machine, and the hub cannot be reached "
            f"({_first_line(error)}). Connect, and unset HF_HUB_OFFLINE. {by_hand}"
        ) from error
    except OSError as error:
        raise WeightsError(
            f"{ref.key}: {ref}: the download stopped ({error}). Run again to go on where it stopped."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _library(ref: HubRef) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise WeightsError(
            f"{ref.key}: {ref}: a hub needs the package huggingface_hub. Type: pip install huggingface_hub"
        ) from error
    return huggingface_hub


def _is_whole(place: Path) -> bool:
    """Whether all files that the indexes in a folder name are there, and there are weights at all."""
    if place.is_file():
        return True
    for index in place.rglob("*.safetensors.index.json"):
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError):
            return False
        if not all((index.parent / str(name)).is_file() for name in names):
            return False
    return any(place.rglob("*.safetensors"))
