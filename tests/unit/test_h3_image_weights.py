"""The large model from every kind of place, through the engine, at its tiny size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from portable_dit import Engine, Request, set_up
from portable_dit.errors import PortableDitError, RecipeError, WeightsError
from portable_dit.models.h3_image.random_checkpoint import write_random
from portable_dit.recipe import make_recipe

REQUEST = Request("a red apple", size=(256, 256))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for dialect in ("original", "diffusers", "comfy", "comfy-curve", "fp8"):
        write_random(folder / dialect, config="tiny", dialect=dialect, seed=0)
    return folder


def draw(weights: Path | str, **keys: object) -> np.ndarray:
    values = {"model": "h3-image", "weights": str(weights), "device": {"backend": "cpu"}, **keys}
    with Engine.load(make_recipe({"precision": "float32", **values})) as engine:
        return engine.generate(REQUEST).images[0].pixels


def test_original_diffusers_and_single_files_draw_the_same_picture(checkpoints):
    expected = draw(checkpoints / "original")
    (file,) = (checkpoints / "comfy" / "diffusion_models").iterdir()
    assert expected.std() > 1
    assert np.array_equal(expected, draw(checkpoints / "diffusers"))
    assert np.array_equal(expected, draw(file, checkpoint_dialect="comfy"))
    swapped = {"dit": str(file)}
    mixed = draw(checkpoints / "diffusers", components=swapped, checkpoint_dialect="comfy")
    assert np.array_equal(expected, mixed)


def test_stored_fp8_draws_the_same_expanded_and_as_it_is(checkpoints):
    (file,) = (checkpoints / "fp8" / "diffusion_models").iterdir()
    curve, expanded = draw(checkpoints / "comfy-curve"), draw(file)
    difference = np.abs(curve.astype(int) - expanded).mean()
    assert 0 < difference < 12


def test_random_weights_need_no_checkpoint(tiny_checkpoint):
    values = {"model": "h3-mini", "weights": "random", "device": {"backend": "cpu"}}
    with Engine.load(make_recipe(values)) as engine:
        assert engine.generate(Request("a red apple", size=(256, 256))).images[0].pixels.shape == (
            256,
            256,
            3,
        )


def test_quantised_weights_are_kept_and_reused_when_the_recipe_says_so(
    checkpoints, tmp_path, monkeypatch, cli
):
    monkeypatch.setenv("PORTABLE_DIT_CACHE", str(tmp_path / "cache"))
    keys = {"quantization": {"dit": "int8_row"}}
    plain = draw(checkpoints / "original", **keys)
    assert not (tmp_path / "cache").exists()
    made = draw(checkpoints / "original", cache=True, **keys)
    (entry,) = json.loads(cli("weights", "cache", "--json").stdout)["entries"]
    assert "int8_row" in entry["title"]
    assert np.array_equal(plain, made)
    stamp = Path(entry["path"]).stat().st_mtime_ns
    assert np.array_equal(made, draw(checkpoints / "original", cache=True, **keys))
    assert Path(entry["path"]).stat().st_mtime_ns == stamp
    assert f"{entry['bytes']:,} bytes freed" in cli("weights", "cache", "--clear").stdout
    assert not json.loads(cli("weights", "cache", "--json").stdout)["entries"]


def test_the_command_line_makes_up_a_checkpoint_that_verifies(tmp_path, cli):
    folder = tmp_path / "new"
    made = cli("weights", "init", "-o", str(folder), "--dialect", "w4a8", "--seed", "5", "--json")
    assert made.exit_code == 0, made.stderr
    written = json.loads(made.stdout)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.safetensors")} == {
        file["path"] for file in written["files"]
    }
    assert cli("weights", "verify", str(folder)).exit_code == 0
    again = cli("weights", "init", "-o", str(folder))
    assert again.exit_code == 2
    assert "something already" in again.stderr


def test_a_dry_run_lists_the_full_size_and_writes_nothing(tmp_path, cli):
    done = cli("weights", "init", "-o", str(tmp_path / "new"), "--config", "full", "--dry-run")
    assert "135,343,118,656 bytes, not written" in done.stdout
    assert "blocks.49.attn.qkv_proj.weight BF16 [21504, 5376]" in done.stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--config", "huge"), ("'huge' is not known", "tiny")),
        (("--dialect", "comfi"), ("'comfi' is not known", "Did you mean 'comfy'")),
        (("--model", "h3-mini"), ("'h3-mini'", "h3-image")),
    ],
)
def test_an_unknown_layout_is_refused_with_the_near_name(tmp_path, cli, flags, words):
    done = cli("weights", "init", "-o", str(tmp_path / "new"), *flags)
    assert done.exit_code == 2
    assert all(word in done.stderr for word in words)


def test_a_file_of_another_kind_is_not_read(tmp_path):
    other = tmp_path / "model.ckpt"
    other.write_bytes(b"pickle")
    with pytest.raises(RecipeError, match=r"not a \.safetensors file"):
        draw(other)


def test_a_checkpoint_without_a_part_says_which(checkpoints, tmp_path):
    for name in ("transformer", "vae", "scheduler", "model_index.json"):
        (tmp_path / name).symlink_to(checkpoints / "original" / name)
    with pytest.raises(PortableDitError, match=r"text_encoder.config\.json: missing"):
        draw(tmp_path)
    picture = draw(tmp_path, components={"text_encoder": str(checkpoints / "original" / "text_encoder")})
    assert np.array_equal(picture, draw(checkpoints / "original"))


def test_a_damaged_marker_is_named(checkpoints, tmp_path):
    from safetensors.torch import load_file, save_file

    (file,) = (checkpoints / "fp8" / "diffusion_models").iterdir()
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(".comfy_quant"))
    tensors[name] = tensors[name][:10].clone()
    damaged = tmp_path / "damaged.safetensors"
    save_file(tensors, damaged)
    with pytest.raises(WeightsError, match=r"transformer_blocks.*comfy_quant: its text .* does not name"):
        draw(checkpoints / "original", components={"dit": str(damaged)})


def test_the_progress_line_says_how_fast_weights_are_read():
    from rich.progress import Progress

    from portable_dit.cli.run import TerminalBar

    progress = Progress(disable=True)
    task = progress.add_task("loading")
    bar = TerminalBar(progress, task)
    bar.loading("dit")
    bar.start -= 2.0
    bar.read("dit", 4_000_000_000, 66_000_000_000)
    assert progress.tasks[0].description == "loading dit: 4.0 of 66.0 GB, 2.0 GB/s"


@pytest.fixture
def with_heads_apart(checkpoints, tmp_path) -> Path:
    """The original's files with the heads of the steps in a file of their own, as servers of H3 fuse them."""
    folder = tmp_path / "apart"
    shutil.copytree(checkpoints / "original", folder)
    apart: dict[str, torch.Tensor] = {}
    for file in (folder / "transformer").glob("*.safetensors"):
        tensors = load_file(file)
        apart |= {name: tensors.pop(name) for name in list(tensors) if ".pdd_heads." in name}
        save_file(tensors, file)
    for index in (folder / "transformer").glob("*.index.json"):
        index.unlink()
    (folder / "pdd").mkdir()
    fused = {
        f"video_out.{leaf}": torch.stack([apart[f"final_layer.pdd_heads.{step}.{leaf}"] for step in range(6)])
        for leaf in ("weight", "bias")
    }
    save_file(fused, folder / "pdd" / "heads.safetensors")
    (folder / "pdd" / "pdd_config.json").write_text('{"num_inference_steps": 6, "video_shift": 12.0}')
    change_json(folder / "model_index.json", _minimax_h3={"pdd_fused_heads": "pdd/heads.safetensors"})
    return folder


def change_json(path: Path, **keys: object) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **keys}))


def test_heads_in_a_file_of_their_own_draw_the_same_picture(checkpoints, with_heads_apart):
    assert np.array_equal(draw(checkpoints / "original"), draw(with_heads_apart))


@pytest.mark.parametrize(
    ("file", "keys", "said"),
    [
        ("pdd/pdd_config.json", {"num_inference_steps": 8}, "heads are for num_inference_steps 8"),
        ("pdd/pdd_config.json", {"video_shift": 3.0}, "heads are for shift 3.0"),
        ("pdd/pdd_config.json", {"sigma_max": 0.9}, "sigma_max = 0.9"),
        ("pdd/pdd_config.json", {"video_shift": "12"}, "video_shift = '12' must be a number"),
        (
            "model_index.json",
            {"_minimax_h3": {"pdd_fused_heads": "pdd/other.safetensors"}},
            "other.safetensors: missing",
        ),
        (
            "model_index.json",
            {"_minimax_h3": {"pdd_fused_heads": "../heads.safetensors"}},
            "inside the checkpoint",
        ),
        ("model_index.json", {"_minimax_h3": {"pdd_fused_heads": 7}}, "pdd_fused_heads = 7"),
        ("model_index.json", {"_minimax_h3": [1]}, "_minimax_h3 = [1] must be a JSON object"),
    ],
)
def test_heads_for_another_schedule_or_not_there_are_refused_before_loading(
    with_heads_apart, file, keys, said
):
    change_json(with_heads_apart / file, **keys)
    with pytest.raises(WeightsError) as caught:
        set_up(make_recipe({"model": "h3-image", "weights": str(with_heads_apart)}))
    assert said in str(caught.value)


def test_heads_in_two_places_are_refused(with_heads_apart):
    (file,) = (with_heads_apart / "pdd").glob("*.safetensors")
    shutil.copy(file, with_heads_apart / "transformer" / "heads.safetensors")
    with pytest.raises(
        WeightsError, match=r"heads\.safetensors: tensors that .*transformer has too:\n  video_out"
    ):
        draw(with_heads_apart)


def test_a_checkpoint_is_found_by_a_path_from_where_one_stands(tmp_path, monkeypatch):
    write_random(tmp_path / "tiny", config="tiny", dialect="diffusers", seed=0)
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe({"model": "h3-image", "weights": "tiny", "device": {"backend": "cpu"}})
    with Engine.load(recipe) as engine:
        assert engine.generate(Request("a lighthouse", size=(64, 64))).images


def test_a_dry_run_needs_no_folder_and_the_real_one_says_that_it_does(cli):
    assert cli("weights", "init", "--dry-run").exit_code == 0
    refused = cli("weights", "init")
    assert refused.exit_code == 2
    assert "-o: missing. Name a new or empty folder, or say --dry-run" in refused.stderr
