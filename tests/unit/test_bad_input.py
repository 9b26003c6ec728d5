"""Bad input: exit code 2, what was asked, the rule and the way out, no traceback, and nothing written.

One test for each item; they go through the command line. Ctrl-C and a full disk need processes of their own
and live in tests/integration.
"""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from png_files import png_file
from safetensors.numpy import load_file, save_file

import portable_dit

BUILTIN = Path(portable_dit.__file__).parent / "models" / "h3_mini" / "transformer"


@pytest.fixture
def refuse(cli, tiny_recipe, tmp_path):
    """Runs a command that must be refused, in words that must appear; gives stderr."""
    place = tmp_path / "outputs"
    place.mkdir()

    def call(*arguments, recipe=tiny_recipe, words=(), prompt="a red apple", output=place / "out.png"):
        flags = ("--prompt", prompt, "-o", output) if prompt is not None else ("-o", output)
        result = cli("run", "--recipe", recipe, *flags, *arguments)
        assert result.exit_code == 2, result.stderr
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        for word in words:
            assert word in result.stderr, result.stderr
        assert list(place.iterdir()) == []
        return result.stderr

    return call


# Recipes


def test_a_missing_recipe(refuse):
    refuse(recipe="cpu/h3-minni", words=("cpu/h3-minni", "Did you mean 'cpu/h3-mini'"))


def test_an_unreadable_recipe(refuse, tmp_path):
    refuse(recipe=tmp_path, words=("folder",))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    refuse(recipe=tmp_path / "binary.yaml", words=("binary.yaml",))


def test_malformed_yaml(refuse, tmp_path):
    (tmp_path / "bad.yaml").write_text("model: [h3-mini\nweights: {")
    refuse(recipe=tmp_path / "bad.yaml", words=("bad.yaml", "line"))


def test_an_unknown_key_model_and_backend(refuse, tmp_path):
    (tmp_path / "a.yaml").write_text("model: h3-mini\nquantisation: {dit: fp8_row}\n")
    refuse(recipe=tmp_path / "a.yaml", words=("quantisation", "Did you mean 'quantization'"))
    refuse("--set", "model=h3-mini2", words=("h3-mini2", "Did you mean 'h3-mini'"))
    refuse("--backend", "gpu", words=("'gpu'", "not installed", "cpu"))


# Sizes and numbers


@pytest.mark.parametrize(
    ("size", "rule"),
    [
        ("0x64", "positive"),
        ("-64x64", "positive"),
        ("100x64", "multiples of 32"),
        ("32x32", "at least 64"),
        ("512x512", "262,144 pixels are over this model's 65,536"),
        ("100000x10000", "at most 512"),
        ("512x64", "2:1 at most"),
    ],
)
def test_an_illegal_size(refuse, size, rule):
    refuse(f"--size={size}", words=(f"size={size}", rule, "The nearest is"))


def test_a_size_that_is_none(refuse):
    refuse("--size", "big", words=("size=big", "as in 512x512"))
    refuse("--width", 64, words=("--height is missing",))
    refuse("--width", 64, "--height", 64, "--size", "64x64", words=("Say the size once",))
    refuse("--size", "64x64", "--aspect-ratio", "1:1", words=("Leave one out",))
    refuse("--aspect-ratio", "9:1", words=("2:1 at most",))


def test_other_steps_than_six(refuse):
    refuse("--num-inference-steps", 50, words=("steps=50", "trained for 6 steps"))


def test_guidance_on_a_model_without_it(refuse):
    refuse("--guidance-scale", 7.5, words=("guidance_scale=7.5", "has no guidance"))


def test_seed_and_count_outside_their_range(refuse):
    refuse("--seed", -1, words=("seed=-1", "from 0"))
    refuse("--seed", 2**64, words=("seed=",))
    refuse("-n", 0, words=("images=0", "1 to 128"))


# Prompts


def test_an_empty_prompt(refuse):
    refuse(prompt="  ", words=("prompt: empty",))


def test_a_prompt_of_100_kilobytes(refuse, tmp_path):
    (tmp_path / "long.txt").write_text("word " * 20_000)
    refuse(prompt=f"@{tmp_path / 'long.txt'}", words=("characters", "at most 400"))


def test_no_prompt_two_prompts_and_missing_prompt_files(refuse, tmp_path):
    refuse(prompt=None, words=("give one of --prompt",))
    refuse("--prompts", tmp_path / "no.txt", words=("not both",))
    refuse("--prompts", tmp_path / "no.txt", prompt=None, words=("no.txt", "No such file"))
    refuse(prompt=f"@{tmp_path / 'no.txt'}", words=("no.txt", "No such file", "stdin"))
    (tmp_path / "empty.txt").write_text("\n\n")
    refuse("--prompts", tmp_path / "empty.txt", prompt=None, words=("holds no prompt",))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refuse(prompt=f"@{tmp_path / 'latin.txt'}", words=("not UTF-8",))


def test_a_prompt_of_more_tokens_than_the_encoder_takes(refuse):
    refuse(prompt="a red apple " * 30, words=("prompt of 90 tokens", "at most 64", "Shorten"))


def test_a_prompt_in_which_the_encoder_finds_no_word(refuse):
    refuse(prompt="\u200b \u200b", words=("holds no words", "Say what to draw"))


def test_every_bad_line_of_a_file_of_prompts_is_told_before_weights_are_read(broken, tmp_path):
    """The weights are cut short and torch is not there: neither may matter."""
    folder, recipe = broken
    weights = folder / "vae" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red apple\n" + "green " * 65 + "\na blue apple\n\u200b\n", encoding="utf-8")
    code = "import sys; sys.modules['torch'] = None; from portable_dit.cli import main; main()"
    command = [sys.executable, "-c", code, "run", "--recipe", str(recipe), "--prompts", str(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {prompts}:2: prompt of 65 tokens")
    assert second.startswith(f"{prompts}:4: prompt '\\u200b': holds no words")
    assert not list(tmp_path.glob("out*"))


# References


def test_a_missing_reference(refuse, tmp_path):
    refuse("--image", tmp_path / "no.png", words=("no.png: no such file", "Check the path"))


def test_a_truncated_reference(refuse, tmp_path):
    out = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(out, "PNG")
    (tmp_path / "cut.png").write_bytes(out.getvalue()[:5000])
    refuse("--image", tmp_path / "cut.png", words=("cut.png", "damaged or cut short"))


def test_a_reference_of_30000_pixels_a_side_is_refused_by_its_header(refuse, tmp_path):
    for size in ((30_000, 30_000), (30_000, 300)):
        (tmp_path / "huge.png").write_bytes(png_file(*size))
        refuse("--image", tmp_path / "huge.png", words=("huge.png", "no side over 16,384", "Scale it down"))


def test_more_references_than_allowed(refuse, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    flags = [flag for _ in range(4) for flag in ("--image", tmp_path / "a.png")]
    refuse(*flags, words=("4 were given", "at most 3"))


def test_animated_cmyk_16_bit_alpha_and_rotated_references_are_drawn_from(cli, tiny_recipe, tmp_path):
    red, blue = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "blue")
    red.save(tmp_path / "moving.gif", save_all=True, append_images=[blue])
    Image.new("CMYK", (64, 64), (0, 255, 255, 0)).save(tmp_path / "print.jpg")
    Image.fromarray(np.full((64, 64), 30_000, np.uint16)).save(tmp_path / "deep.png")
    Image.new("RGBA", (64, 64), (255, 0, 0, 100)).save(tmp_path / "cut-out.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (128, 64), "red").save(tmp_path / "phone.jpg", exif=exif)
    notes = {
        "moving.gif": "2 frames",
        "print.jpg": "CMYK",
        "deep.png": "16 bits",
        "cut-out.png": "over white",
    }
    for name in (*notes, "phone.jpg"):
        flags = ("--prompt", "make it green", "--image", tmp_path / name, "-o", tmp_path / "out.png")
        result = cli("run", "--recipe", tiny_recipe, *flags)
        assert result.exit_code == 0, result.stderr
        assert notes.get(name, "") in result.stderr
    with Image.open(tmp_path / "out.png") as image:
        assert image.size == (64, 128)


# Output


def test_an_output_folder_that_is_missing(refuse, tmp_path):
    refuse(output=tmp_path / "no" / "out.png", words=("does not exist", "mkdir -p"))


def test_an_output_that_is_a_folder_or_a_device(refuse, tmp_path):
    refuse(output=tmp_path, words=("a folder",))
    refuse(output="/dev/full", words=("a device",))
    assert not os.path.isfile("/dev/full")


def test_an_output_folder_that_is_read_only(refuse):
    refuse(output="/proc/out.png", words=("/proc", "cannot be written"))


def test_an_output_of_an_unknown_or_contradicting_format(refuse, tmp_path):
    refuse(output=tmp_path / "out.bmp", words=(".bmp", "Use .png, .jpg or .webp"))
    refuse("--format", "jpeg", words=("the name says png", "out.jpg"))
    refuse("--format", "tiff", words=("tiff", "Known: jpeg, png, webp"))


# Weights


@pytest.fixture
def broken(tiny_checkpoint, tmp_path):
    """A copy of the checkpoint without its manifest, and a recipe for it; to be broken."""
    folder = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "manifest.json").unlink()
    recipe = tmp_path / "broken.yaml"
    recipe.write_text(f"model: h3-mini\nweights: {folder}\ndevice: {{backend: cpu}}\nprecision: float32\n")
    return folder, recipe


def change(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_truncated_weights(refuse, broken):
    folder, recipe = broken
    path = folder / "transformer" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refuse(recipe=recipe, words=("transformer/model.safetensors", "cut short", "again"))


def test_weights_of_the_wrong_shape_name_and_number(refuse, broken):
    folder, recipe = broken

    def edit(tensors):
        tensors["final_layer.heads.bias"] = np.zeros((6, 5), np.float32)
        tensors["blocks.0.attn.extra"] = tensors.pop("blocks.0.norm1.weight")

    change(folder / "transformer" / "model.safetensors", edit)
    refuse(
        recipe=recipe,
        words=("1 missing:\n  blocks.0.norm1.weight", "1 unexpected:\n  blocks.0.attn.extra", "1 mismatched"),
    )


def test_weights_that_hold_nan(refuse, broken):
    folder, recipe = broken

    def edit(tensors):
        tensors["decoder.x_embedder.bias"][3] = np.nan

    change(folder / "vae" / "model.safetensors", edit)
    refuse(recipe=recipe, words=("decoder.x_embedder.bias", "NaN", "Download them again"))


def test_weights_that_are_missing(refuse, broken, tmp_path):
    folder, recipe = broken
    shutil.rmtree(folder / "vae")
    refuse(recipe=recipe, words=("vae", "missing"))
    refuse("--set", f"weights={tmp_path / 'nowhere'}", words=("nowhere",))


@pytest.mark.skipif(not BUILTIN.is_dir(), reason="the built-in weights are not in this checkout yet")
def test_weights_of_a_hub_that_are_not_on_this_machine(refuse):
    refuse("--set", "weights=SOMEONE/Something", words=("SOMEONE/Something", "--local-dir"))


def test_weights_with_one_flipped_bit(refuse, tiny_checkpoint, tmp_path):
    folder = tmp_path / "flipped"
    shutil.copytree(tiny_checkpoint, folder)
    path = folder / "vae" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    recipe = tmp_path / "flipped.yaml"
    recipe.write_text(f"model: h3-mini\nweights: {folder}\ndevice: {{backend: cpu}}\n")
    refuse(recipe=recipe, words=("vae/model.safetensors: right size, wrong content",))


def test_a_config_that_is_no_json(refuse, broken):
    folder, recipe = broken
    (folder / "transformer" / "config.json").write_text("{")
    refuse(recipe=recipe, words=("transformer/config.json", "JSON"))
    config = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps({**config, "num_layers": "three"}))
    refuse(recipe=recipe, words=("num_layers",))
