"""`portable-dit inspect` and `weights`: answers from files alone, without torch."""

import json
import subprocess
import sys

import numpy as np
import pytest

from portable_dit.image import encode

RECORD = {
    "version": "0.1.0",
    "prompt": "猫",
    "seed": 3,
    "kernels": {"dit": {"attention": "math"}},
    "notes": [],
}


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_the_record_is_shown_to_people_and_programs(cli, tmp_path, kind):
    path = tmp_path / "a"
    path.write_bytes(encode(np.zeros((4, 4, 3), np.uint8), RECORD, format=kind))
    assert json.loads(cli("inspect", path, "--json").stdout) == RECORD
    text = cli("inspect", path).stdout
    assert "prompt: 猫\nseed: 3\n" in text
    assert "attention=math" in text


def test_what_is_no_picture_of_ours_is_refused(cli, tmp_path):
    for name, content, words in (
        ("empty", b"", "not an image"),
        ("text", b"hello", "not an image"),
    ):
        (tmp_path / name).write_bytes(content)
        result = cli("inspect", tmp_path / name)
        assert result.exit_code == 2
        assert words in result.stderr
    assert "no such file" in cli("inspect", tmp_path / "missing").stderr


def test_inspecting_and_verifying_import_no_torch(tmp_path, tiny_checkpoint):
    path = tmp_path / "a.png"
    path.write_bytes(encode(np.zeros((4, 4, 3), np.uint8), RECORD))
    for arguments in (["inspect", str(path)], ["weights", "verify", str(tiny_checkpoint)]):
        code = (
            "import sys\nfrom portable_dit.cli import app\n"
            f"app({arguments!r}, standalone_mode=False)\nassert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_whole_checkpoint_is_said_to_be_right(cli, tiny_checkpoint):
    assert "all right" in cli("weights", "verify", tiny_checkpoint).stdout
    report = json.loads(cli("weights", "verify", tiny_checkpoint, "--json").stdout)
    assert report["manifest"] is True
    assert report["tensors"] > 50


def test_a_printed_manifest_is_one_that_verifies(cli, tiny_checkpoint, tmp_path):
    import shutil

    folder = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    (folder / "manifest.json").unlink()
    assert "no manifest.json" in cli("weights", "verify", folder).stderr
    (folder / "manifest.json").write_text(cli("weights", "manifest", folder).stdout)
    assert cli("weights", "verify", folder).exit_code == 0
    (folder / "vae" / "config.json").write_text("{}")
    result = cli("weights", "verify", folder)
    assert result.exit_code == 2
    assert "vae/config.json" in result.stderr
