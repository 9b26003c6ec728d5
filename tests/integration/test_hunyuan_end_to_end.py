"""HunyuanImage-3.0 as a user meets it: commands as processes, and the benchmark that a GPU gets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hunyuan") / "tiny"
    words = ("weights", "init", "--model", "hunyuan-image-3", "--config", "tiny", "-o", folder)
    made = run("-m", "portable_dit", *words)
    assert made.returncode == 0, made.stderr
    return folder


def test_the_h200_recipe_draws_with_a_made_up_checkpoint_on_any_machine(checkpoint, tmp_path):
    out = tmp_path / "out.png"
    drawn = run(
        *("-m", "portable_dit", "run", "--recipe", "nvidia/h200/hunyuan-image-3-1x-fp8"),
        *("--set", f"weights={checkpoint}", "--set", "device.backend=cpu", "--set", "precision=auto"),
        *("--prompt", "a lighthouse", "--aspect-ratio", "16:9", "--num-inference-steps", 2),
        *("--guidance-scale", 5, "--use-system-prompt", "en_unified", "--seed", 42, "-o", out, "--json"),
    )
    assert drawn.returncode == 0, drawn.stderr
    answer = json.loads(drawn.stdout)
    assert answer["kernels"]["dit"]["experts:fp8_row"] == "each_emulated"
    picture = np.asarray(Image.open(out))
    assert picture.shape[2] == 3
    assert picture.shape[1] > picture.shape[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--size", "300x200"), "The nearest is 304x208"),
        (("--use-system-prompt", "en_unifed"), "Did you mean 'en_unified'"),
        (("--guidance-scale", "200"), "a number from 0 to 100"),
        (("--guidance-rescale", "2"), "a number from 0 to 1"),
        (("--image", str(ROOT / "docs" / "images" / "first-picture.png")), "takes none"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_wish_that_cannot_be_met_ends_with_one_sentence(cli, checkpoint, tmp_path, words, said):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: hunyuan-image-3\nweights: {checkpoint}\ndevice: {{backend: cpu}}\n")
    refused = cli("run", "--recipe", recipe, "--prompt", "x", "-o", tmp_path / "x.png", *words)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert not (tmp_path / "x.png").exists()


def test_the_benchmark_runs_at_the_size_of_the_tests(tmp_path):
    out = tmp_path / "report.md"
    words = ("--tiny", "--backend", "cpu", "--requests", 1, "--rounds", 1, "--steps", 2)
    done = run(ROOT / "docs" / "benchmarks" / "hunyuan_h200.py", *words, "--load-layers", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    report = out.read_text()
    for part in (
        "2 steps, guidance 5",
        "skewed router",
        "One layer, 514 rows",
        "Busiest expert",
        "Load: 1 layers",
    ):
        assert part in report
