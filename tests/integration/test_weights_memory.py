"""Loading costs the memory of the model and a few tensors, not of the file a second time."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from dataclasses import dataclass
from pathlib import Path
from torch import nn
from portable_dit import host
from portable_dit.safetensors_file import stored_tensors
from portable_dit.weights import load_component

@dataclass(frozen=True)
class Whole:
    names: tuple[str, ...]
    by_rows: bool = False
    def make(self, tensor):
        return tensor

with torch.device("meta"):
    module = nn.ModuleList(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(96))
torch.ones(64, 64) @ torch.ones(64, 64)
stored = stored_tensors(Path(sys.argv[1]))
host.peak_bytes(reset=True)
before = host.peak_bytes()
load_component(module, stored, sources={n: Whole((n,)) for n in stored}, device=lambda name: "cpu")
print(host.peak_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory can only be reset on Linux")
def test_the_peak_of_loading_is_the_model_and_a_few_tensors(tmp_path):
    import torch
    from safetensors.torch import save_file

    file_bytes = 96 * 4 * 1024 * 1024
    save_file({f"{k}.weight": torch.ones(1024, 1024) for k in range(96)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", CODE, tmp_path], capture_output=True, text=True, check=True)
    model_bytes = file_bytes // 2
    assert model_bytes <= int(done.stdout) < model_bytes + 64 * 1024 * 1024
