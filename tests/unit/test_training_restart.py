"""Training goes on from what there is: the shipped checkpoint, or the packed files of another run."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from portable_dit.models.h3_image.config import H3Config
from training.checkpoint import decode, load_set, save_set
from training.dit import is_finished, load_trained
from training.model import H3Mini
from training.pack import pack
from training.presets import further
from training.restart import sets_from_shipped
from training.run_all import own_gpu, unpack
from training.vae import load_vae

SHIPPED = Path(__file__).parents[2] / "portable_dit" / "models" / "h3_mini"


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    sets_from_shipped(SHIPPED, folder)
    return folder


def test_the_shipped_transformer_becomes_a_teacher_that_mixed_training_continues(restarted: Path) -> None:
    model = H3Mini(H3Config.from_folder(SHIPPED))
    load_trained(model, restarted)
    shipped = decode(load_file(SHIPPED / "transformer" / "model.safetensors"))
    for name, tensor in model.transformer.state_dict().items():
        torch.testing.assert_close(tensor, shipped[name], rtol=1e-3, atol=1e-6)  # float16 sets
    assert not is_finished(restarted, "mixed")


def test_the_shipped_vae_keeps_its_latent_space(restarted: Path) -> None:
    config = H3Config.from_folder(SHIPPED)
    vae = load_vae(restarted, config.vae, torch.device("cpu"))
    assert vae.config.latents_mean == config.vae.latents_mean
    assert vae.config.latents_std == config.vae.latents_std


def test_a_packed_run_comes_back_as_it_was(restarted: Path, tmp_path: Path) -> None:
    save_set(restarted, "student", {"weight": torch.eye(3)}, step=7, note={"done": False})
    files = pack(restarted, tmp_path / "packed")
    assert max(path.stat().st_size for path in files) <= 16 * 2**20
    assert len(files) <= 8
    (tmp_path / "again").mkdir()
    unpack(tmp_path / "packed", tmp_path / "again")
    tensors, index = load_set(tmp_path / "again", "student")
    assert torch.equal(tensors["weight"], torch.eye(3))
    assert index["step"] == 7
    assert load_set(tmp_path / "again", "dit")[1]["note"]["stage"] == "dit256"


@pytest.mark.parametrize(
    ("visible", "rank", "own"), [(None, 1, "1"), ("", 0, "0"), ("4,6", 1, "6"), ("GPU-a, GPU-b", 1, "GPU-b")]
)
def test_every_process_sees_its_own_gpu_alone(visible: str | None, rank: int, own: str) -> None:
    assert own_gpu(visible, rank) == own


def test_further_training_leaves_the_vae_alone() -> None:
    preset = further()
    assert preset.stages == ("mixed", "distil", "eval")
    assert set(preset.stages) <= set(preset.minutes)
