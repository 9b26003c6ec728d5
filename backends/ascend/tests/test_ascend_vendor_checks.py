"""Our calls before the vendor's own checks: the real torch_npu over empty driver libraries. Optional.

    PORTABLE_DIT_TORCH_NPU=FOLDER python -m pytest backends/ascend/tests/test_ascend_vendor_checks.py

FOLDER is an unpacked torch_npu wheel of this torch's number (`pip download torch-npu==... --no-deps`, unzip);
gcc and binutils are needed. The vendor's meta kernels refuse wrong keywords, types and shapes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
WHEEL = os.environ.get("PORTABLE_DIT_TORCH_NPU")

CALLS = """
import json
import torch, torch_npu
from portable_dit_ascend.attention import FusedInferAttention
from portable_dit_ascend.fusions import head_norm_rotary, rms_norm, swiglu
from portable_dit_ascend.linear import Int8Linear, Int8WeightLinear, Mxfp8Linear
from portable_dit.formats import encode
from portable_dit.masks import KeyPadding, NO_MASK
from portable_dit.ops import Rotary

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

told = {}
def note(name, call):
    try:
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        told[name] = [list(out.shape), str(out.dtype)]
    except Exception as error:
        told[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"

q, k, v = meta(2, 48, 8, 128), meta(2, 64, 4, 128), meta(2, 64, 4, 128)
for kernel in (FusedInferAttention(),):  # the check of npu_fusion_attention wants a device
    note(f"{kernel.id} plain", lambda: kernel.whole(q, k, v, causal=False, scale=0.1))
    note(f"{kernel.id} causal", lambda: kernel.whole(q, k, v, causal=True, scale=0.1))
    note(f"{kernel.id} padded", lambda: kernel.padded(q, k, v, meta(2, 64, dtype=torch.bool), scale=0.1))
for kernel in (Int8Linear(), Mxfp8Linear(), Int8WeightLinear()):
    weight = encode(torch.randn(256, 320), kernel.format.name)
    packed = {name: tensor.to("meta") for name, tensor in kernel.pack(weight, torch.bfloat16).items()}
    note(kernel.format.name, lambda: kernel.apply(meta(17, 320), packed, meta(256)))
note("rms_norm", lambda: rms_norm(meta(2, 48, 512), meta(512), 1e-6))
note("swiglu", lambda: swiglu(meta(2, 48, 512)))
rotary = Rotary(meta(1, 48, 48), meta(1, 48, 48))
note("rotary", lambda: head_norm_rotary(meta(2, 48, 8, 128), meta(128), 1e-6, rotary))
note("misspelt", lambda: torch.ops.npu.npu_swiglu(meta(2, 8), dimension=-1))
note("without output_dtype", lambda: torch.ops.npu.npu_quant_matmul(
    meta(17, 320, dtype=torch.int8), meta(320, 256, dtype=torch.int8), meta(256, dtype=torch.float32),
    pertoken_scale=meta(17, dtype=torch.float32)))
print(json.dumps(told))
import os
os._exit(0)  # the vendor's shutdown looks for a device
"""


@pytest.mark.skipif(WHEEL is None, reason="set PORTABLE_DIT_TORCH_NPU to an unpacked torch_npu wheel")
def test_the_vendors_own_checks_take_every_call(tmp_path):
    assert WHEEL is not None
    stubs = [sys.executable, str(HOME / "tests" / "driver_stubs.py"), WHEEL, str(tmp_path)]
    subprocess.run(stubs, check=True, stdout=subprocess.DEVNULL)
    path = os.pathsep.join([WHEEL, str(HOME), str(HOME.parents[1])])
    settings = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for case in ("plain", "causal", "padded"):
        assert told[f"fused_infer {case}"] == [[2, 48, 8, 128], "torch.bfloat16"], told
    for format in ("int8_row", "mxfp8", "int8_weight_only"):
        assert told[format] == [[17, 256], "torch.bfloat16"], told
    assert told["rms_norm"][0] == [2, 48, 512]
    assert told["swiglu"][0] == [2, 48, 256]
    assert told["rotary"][0] == [2, 48, 8, 128]
    assert "Unknown keyword" in told["misspelt"]
    assert told["without output_dtype"] == [[17, 256], "torch.int8"]
