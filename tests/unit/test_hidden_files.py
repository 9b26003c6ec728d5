"""Files and folders that may not be read: who may not is told which, in one line, and never a traceback."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

RECIPES = {
    "h3-image": "nvidia/h200/h3-image-1x-bf16",
    "hunyuan-image-3": "nvidia/h200/hunyuan-image-3-1x-fp8",
}
LIBC = ctypes.CDLL(None, use_errno=True)
CAPABILITIES_VERSION = 0x20080522  # the third, of two sets of 32 bits
PASSES_MODES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@pytest.fixture(scope="module")
def checkpoints(cli, tmp_path_factory) -> dict[str, Path]:
    """One of each large model with random weights."""
    base = tmp_path_factory.mktemp("hidden")
    (base / "drawn").mkdir()
    for model in RECIPES:
        done = cli("weights", "init", "--model", model, "--config", "tiny", "-o", base / model)
        assert done.exit_code == 0, done.stderr
    return {model: base / model for model in RECIPES}


def draw(cli, checkpoint: Path, output: Path):
    wish = ("--set", f"weights={checkpoint}", "--set", "device.backend=cpu", "--set", "precision=auto")
    recipe = RECIPES[checkpoint.name]
    steps = ("--num-inference-steps", 2) if checkpoint.name == "hunyuan-image-3" else ("--size", "256x256")
    return cli("run", "--recipe", recipe, *wish, *steps, "--prompt", "a", "-o", output)


@contextmanager
def as_one_who_may_not(path: Path, mode: int) -> Iterator[None]:
    """The path has this mode, and we heed it, as root does not by itself."""
    before = path.stat().st_mode & 0o777
    path.chmod(mode)
    try:
        with heeding_modes():
            yield
    finally:
        path.chmod(before)


@contextmanager
def heeding_modes() -> Iterator[None]:
    """This thread, and what it starts, without the two capabilities that pass over modes."""
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0)  # of this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable; twice
    assert LIBC.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    effective = sets[0]
    sets[0] = effective & ~PASSES_MODES
    assert LIBC.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = effective
        assert LIBC.capset(header, sets) == 0, os.strerror(ctypes.get_errno())


@pytest.mark.parametrize(
    ("model", "hidden"),
    [
        ("h3-image", ["", "transformer", "vae", "tokenizer", "scheduler"]),
        ("h3-image", ["model_index.json", "vae/config.json", "transformer/model.safetensors.index.json"]),
        ("hunyuan-image-3", ["", "system_prompt.py", "model.safetensors.index.json"]),
    ],
)
def test_what_of_a_checkpoint_may_not_be_read_is_named(cli, checkpoints, model, hidden):
    for name in hidden:
        path = checkpoints[model] / name
        with as_one_who_may_not(path, 0):
            done = draw(cli, checkpoints[model], checkpoints[model].parent / "drawn" / "out.png")
        assert done.exit_code == 2, (name, done.stderr)
        assert str(path) in done.stderr, name
        assert "may not be read (Permission denied). Change its mode" in done.stderr, name


def test_a_folder_that_may_be_entered_and_not_listed_is_not_called_empty(cli, checkpoints):
    with as_one_who_may_not(checkpoints["h3-image"] / "transformer", 0o311):
        done = cli("weights", "verify", checkpoints["h3-image"] / "transformer")
    assert done.exit_code == 2, done.stdout
    assert "transformer: may not be read" in done.stderr


def test_a_checkpoint_behind_a_closed_folder_is_not_said_to_be_missing(cli, checkpoints):
    base = checkpoints["h3-image"].parent
    with as_one_who_may_not(base, 0):
        done = draw(cli, checkpoints["h3-image"], base / "drawn" / "out.png")
    assert done.exit_code == 2
    assert f"weights: {checkpoints['h3-image']}: may not be looked at (Permission denied)." in done.stderr


def test_a_folder_of_an_adapter_that_may_not_be_read_is_named(cli, tmp_path):
    with as_one_who_may_not(tmp_path, 0):
        done = cli("plan", "--lora", tmp_path)
    assert (done.exit_code, f"{tmp_path}: may not be read (Permission denied)." in done.stderr) == (2, True)


def test_a_checkpoint_that_may_not_be_read_cannot_be_verified(cli, checkpoints):
    with as_one_who_may_not(checkpoints["h3-image"], 0):
        done = cli("weights", "verify", checkpoints["h3-image"])
    assert (done.exit_code, "may not be read" in done.stderr) == (2, True)


def test_a_file_that_may_not_be_read_is_replaced_and_not_shown(cli, checkpoints):
    """What is written over need not be read first."""
    file = checkpoints["h3-image"].parent / "drawn" / "out.png"
    file.write_bytes(b"old")
    with as_one_who_may_not(file, 0):
        shown = cli("inspect", file)
        drawn = draw(cli, checkpoints["h3-image"], file)
    assert (shown.exit_code, "may not be read (Permission denied)" in shown.stderr) == (2, True)
    assert drawn.exit_code == 0, drawn.stderr
    assert file.read_bytes().startswith(b"\x89PNG")
