"""The built-in model through the command line, as a user meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import portable_dit
from portable_dit.image import read_record

BUILTIN = Path(portable_dit.__file__).parent / "models" / "h3_mini" / "transformer"
pytestmark = pytest.mark.skipif(
    not BUILTIN.is_dir(), reason="the built-in weights are not in this checkout yet"
)


def run(*arguments, **options):
    command = [sys.executable, "-m", "portable_dit", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, **options)


def test_the_first_picture_needs_no_network_and_shows_its_background(tmp_path):
    out = tmp_path / "out.png"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "https_proxy": "http://127.0.0.1:9"}
    answer = run("run", "--prompt", "a red apple on a sky blue background", "-o", out, "--json", env=offline)
    image = json.loads(answer.stdout)["images"][0]
    assert (image["width"], image["height"]) == (512, 512)
    pixels = np.asarray(Image.open(out)).astype(int)
    border = np.concatenate([pixels[:8].reshape(-1, 3), pixels[-8:].reshape(-1, 3)])
    red, green, blue = np.median(border, axis=0)
    assert blue > green > red
    assert pixels[160:352, 160:352].std() > 10


def test_one_line_of_python_draws_and_saves(tmp_path):
    saved = portable_dit.generate("a red apple on a sky blue background", size=(256, 256)).save(
        tmp_path / "x.png"
    )
    assert saved[0].path.is_file()
    assert read_record(saved[0].path)["model"] == "h3-mini"


def test_an_edit_keeps_the_size_of_its_reference_and_changes_the_picture(tmp_path):
    out, edited = tmp_path / "out.png", tmp_path / "edited.png"
    run("run", "-p", "a red apple on a sky blue background", "--size", "256x256", "-o", out)
    run("run", "-p", "make the background yellow", "--image", out, "-o", edited)
    before, after = (np.asarray(Image.open(path)).astype(int) for path in (out, edited))
    assert before.shape == after.shape
    assert np.abs(before - after).mean() > 5


def test_the_shipped_files_are_those_of_the_manifest():
    answer = json.loads(run("weights", "verify", "builtin", "--json").stdout)
    assert answer["manifest"] is True
    assert answer["bytes"] < 30_000_000


def test_a_cold_picture_at_512_pixels_stays_below_the_memory_that_was_promised(tmp_path):
    answer = json.loads(run("run", "-p", "a red apple", "-o", tmp_path / "a.png", "--json").stdout)
    assert answer["peak_bytes"] <= 1.2e9
