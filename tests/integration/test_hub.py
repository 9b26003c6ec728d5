"""Checkpoints from a hub that the tests serve: one copy is fetched, and what stands in the way is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import Hub, commit_of, serve_hub
from PIL import Image
from safetensors.torch import save_file

from portable_dit.models.h3_image.random_checkpoint import write_random

pytest.importorskip("huggingface_hub")
REPO, OTHER = "MiniMaxAI/MiniMax-H3-Image", "MiniMaxAI/MiniMax-H3"
FETCH = """
import sys
from portable_dit.catalog import checkpoint_folder, component_places, fetch_weights, is_remote, read_spec
from portable_dit.errors import PortableDitError
from portable_dit.recipe import make_recipe
from portable_dit.yaml_lines import Document
words, dialect, text = sys.argv[1:4]
recipe = make_recipe({
    "model": "h3-image", "weights": words, "checkpoint_dialect": dialect,
    "components": {"text_encoder": text} if text else {},
})
try:
    if is_remote(recipe):
        fetch_weights(recipe)
except PortableDitError as error:
    print(type(error).__name__, error)
    sys.exit(2)
read_spec(recipe)
print(checkpoint_folder(recipe), component_places(recipe).get("text_encoder", ""))
"""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the original files and diffusers' copies beside them, as the real one has."""
    folder = tmp_path_factory.mktemp("repository")
    write_random(folder / "both", config="tiny", dialect="original", seed=0)
    write_random(folder / "copies", config="tiny", dialect="diffusers", seed=0)
    for name in ("transformer_diffusers", "vae_diffusers"):
        shutil.copytree(folder / "copies" / name, folder / "both" / name)
    shutil.copy(folder / "copies" / "modular_model_index.json", folder / "both")
    return folder / "both"


@pytest.fixture
def hub(originals: Path) -> Iterator[Hub]:
    with serve_hub() as served:
        served.repos[REPO, "main"] = originals
        yield served


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path):
    def run(
        words: str, *, dialect: str = "auto", text_encoder: str = "", code: int = 0, **variables: str
    ) -> str:
        environment = {
            **os.environ,
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        done = subprocess.run(
            [sys.executable, "-c", FETCH, words, dialect, text_encoder],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout.strip()

    return run


def test_one_copy_of_the_weights_is_fetched_and_found_again_without_the_hub(hub, fetch):
    folder = fetch(REPO)
    assert commit_of(hub.repos[REPO, "main"]) in folder
    assert "transformer/config.json" in hub.downloaded()
    assert not [name for name in hub.downloaded() if "_diffusers" in name]
    hub.log.clear()
    assert fetch(REPO) == folder
    assert fetch(REPO, HF_HUB_OFFLINE="1") == folder
    assert not hub.log


def test_the_other_copy_is_fetched_when_it_is_named(hub, fetch):
    fetch(REPO, dialect="diffusers")
    assert "transformer_diffusers/config.json" in hub.downloaded()
    assert not [name for name in hub.downloaded() if name.startswith(("transformer/", "vae/"))]


def test_a_revision_can_be_pinned(hub, fetch, originals, tmp_path):
    older = tmp_path / "older"
    shutil.copytree(originals, older)
    hub.repos[REPO, "v1"] = older
    assert commit_of(older) in fetch(f"{REPO}@v1")
    assert commit_of(older) in fetch(f"{REPO}@{commit_of(older)}")
    assert commit_of(originals) in fetch(REPO)
    message = fetch(f"{REPO}@v9", code=2)
    assert "no revision 'v9'" in message


def test_a_broken_download_goes_on_where_it_stopped(hub, fetch, originals, tmp_path):
    folder = tmp_path / "large"
    shutil.copytree(originals, folder)
    name = "scheduler/large.bin"
    (folder / name).write_bytes(os.urandom(24 << 20))  # the library keeps what it has by pieces of 10 MiB
    hub.repos[REPO, "main"] = folder
    hub.breaks[name] = 15 << 20
    found, *_ = fetch(REPO).split()
    assert (Path(found) / name).read_bytes() == (folder / name).read_bytes()
    ranges = [span for verb, path, span in hub.log if verb == "GET" and path.endswith(name) and span]
    assert ranges == [f"bytes={10 << 20}-"]


def test_the_text_encoder_comes_from_the_other_repository_when_this_one_has_none(
    hub, fetch, originals, tmp_path
):
    bare, other = tmp_path / "bare", tmp_path / "other"
    shutil.copytree(originals, bare, ignore=shutil.ignore_patterns("text_encoder", "tokenizer", "processor"))
    shutil.copytree(originals / "transformer", other / "FL2VA" / "transformer")
    for name in ("text_encoder", "tokenizer", "processor"):
        shutil.copytree(originals / name, other / "FL2VA" / name)
    hub.repos[REPO, "main"] = bare
    hub.repos[OTHER, "main"] = other
    _, text = fetch(REPO).split()
    assert text.endswith("FL2VA/text_encoder")
    assert commit_of(other) in text
    assert not [name for name in hub.downloaded() if name.startswith("FL2VA/transformer")]


def test_a_component_may_be_named_on_a_hub(hub, fetch, originals, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(originals / "text_encoder", other / "inside" / "text_encoder")
    hub.repos["SOMEONE/Encoder", "main"] = other
    _, text = fetch(REPO, text_encoder="SOMEONE/Encoder:inside/text_encoder").split()
    assert commit_of(other) in text
    message = fetch(REPO, text_encoder="SOMEONE/Encoder:elsewhere", code=2)
    assert "no .safetensors files there" in message
    assert "inside/text_encoder" in message


def test_an_adapter_on_a_hub_is_fetched_with_its_config_and_nothing_else(hub, tmp_path, tiny_recipe, cli):
    style = tmp_path / "style"
    style.mkdir()
    layer = "base_model.model.blocks.0.attn.out_proj"
    matrices = {f"{layer}.lora_A.weight": torch.ones(2, 64), f"{layer}.lora_B.weight": torch.ones(64, 2)}
    save_file(matrices, style / "adapter_model.safetensors")
    (style / "adapter_config.json").write_text('{"lora_alpha": 8}')
    (style / "optimizer.pt").write_bytes(bytes(1000))
    hub.repos["SOMEONE/Style", "main"] = style
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}

    def drawn(lora: str, code: int = 0, **variables: str) -> bytes:
        words = [
            "run",
            "--recipe",
            tiny_recipe,
            "--lora",
            lora,
            "-p",
            "a red apple",
            "-o",
            tmp_path / "out.png",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "portable_dit", *map(str, words)],
            capture_output=True,
            text=True,
            env=environment | variables,
            timeout=180,
        )
        assert done.returncode == code, done.stderr
        return done.stderr.encode() if code else Image.open(tmp_path / "out.png").tobytes()

    fetched = drawn("SOMEONE/Style:0.25")
    assert set(hub.downloaded()) == {"adapter_model.safetensors", "adapter_config.json"}
    assert drawn("SOMEONE/Style:0.25", HF_HUB_OFFLINE="1") == fetched == drawn(f"{style}:0.25")
    assert drawn(f"{style}:0.5") != fetched
    before = hub.downloaded()
    shutil.copy(style / "adapter_model.safetensors", style / "other.safetensors")
    hub.repos["SOMEONE/Two", "main"] = style
    assert drawn("SOMEONE/Two:0.25") == fetched
    hub.repos["SOMEONE/Unclear", "main"] = unclear = tmp_path / "unclear"
    shutil.copytree(style, unclear)
    (unclear / "adapter_model.safetensors").rename(unclear / "another.safetensors")
    several = drawn("SOMEONE/Unclear", code=2)
    assert b"one .safetensors file is needed, and it has another.safetensors, other.safetensors" in several
    assert hub.downloaded() == before, "neither what lies beside the adapter nor anything unclear"
    missing = drawn("SOMEONE/Missing", code=2)
    assert b"lora: SOMEONE/Missing: the hub has no such repository" in missing


def test_what_stands_in_the_way_is_said(hub, fetch):
    hub.gated.add("SOMEONE/Gated")
    for words, expected in (
        ("SOMEONE/Missing", "no such repository"),
        ("SOMEONE/Gated", "is gated. Accept its licence"),
    ):
        message = fetch(words, code=2)
        assert message.startswith("WeightsError")
        assert expected in message
    message = fetch(REPO, code=2, HF_HUB_OFFLINE="1")
    assert "the hub cannot be reached" in message
    assert "--local-dir" in message
    message = fetch(REPO, code=2, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached" in message


def test_a_repository_with_an_unknown_layout_is_refused_before_a_download(hub, fetch, tmp_path):
    folder = tmp_path / "strange"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    hub.repos["SOMEONE/Strange", "main"] = folder
    assert "no dit in the repository" in fetch("SOMEONE/Strange", code=2)
    assert not hub.downloaded()


def test_the_command_line_draws_from_a_hub_as_from_a_folder(hub, originals, tmp_path, cli):
    """Also lines with references, which the fetched checkpoint's own rule sizes."""
    folder = tmp_path / "small references"
    shutil.copytree(originals, folder)
    (folder / "scheduler").mkdir(exist_ok=True)
    rule = {"reference_rule": "area", "reference_pixels": 64 * 64}
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(rule))
    hub.repos[REPO, "small"] = folder
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "a.png")
    lines = [{"prompt": f"a {animal}", "references": [str(tmp_path / "a.png")]} for animal in ("cat", "dog")]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out.png"
    flags = ["--recipe", recipe, "--prompts", tmp_path / "p.jsonl", "--size", "256x256", "-o", out]
    keys = {"model": "h3-image", "device": {"backend": "cpu"}, "precision": "float32"}

    def drawn() -> list[bytes]:
        return [Image.open(tmp_path / f"out-{k}.png").tobytes() for k in (1, 2)]

    recipe.write_text(json.dumps({**keys, "weights": f"{REPO}@small"}))
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "portable_dit", "run", *map(str, flags)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    fetched = drawn()
    recipe.write_text(json.dumps({**keys, "weights": str(folder)}))
    assert cli("run", *flags).exit_code == 0
    assert drawn() == fetched
