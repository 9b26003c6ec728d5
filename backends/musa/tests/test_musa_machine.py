"""The backend on mocked machines: commands, the conformance suite, and faults that it must see."""

from __future__ import annotations

import json

import pytest
from mock_vendor.mutants import assert_all_seen
from mock_vendor.pictures import assert_all_draw_as_the_host, write_tiny
from mock_vendor.process import Mutation

BEST = "mp_31"
FORMATS = {"fp8_row": "scaled_mm", "fp8_block128": "mate"}
KERNELS = ("identity", "attention", "linear", "fused", "rng", "transfer", "graphs")


def test_everything_that_is_claimed_is_kept_with_every_vendor_function_called(mocked):
    machine = mocked(BEST)
    report = machine.folder / "report.json"
    chosen = [part for name in KERNELS for part in ("--only", name)]
    done = machine.command("conformance", "musa", *chosen, "--repeats", "1", "--json", report)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["ok"]
    assert set(found["libraries"]) == {"mate"}
    for category, outcomes in found["outcomes"].items():
        assert any(o["status"] == "pass" for o in outcomes), category
    assert machine.called() >= {
        "mate.mha_interface.flash_attn_varlen_func",
        "mate.gemm.gemm_fp8_nt_groupwise",
        "aten::scaled_dot_product_attention",
        "aten::_scaled_mm",
        "aten::_fused_rmsnorm_forward",
        "aten::swish_glu",
        "torch.musa.graph",
    }
    assert machine.unbound_calls() == []


def test_the_models_draw_what_the_host_draws_captured_streamed_and_quantised(mocked, tmp_path):
    rows, blocks = ({"precision": "bfloat16", "quantization__dit": format} for format in FORMATS)
    wishes = [
        {"precision": "float32", "graphs__dit": "true", "graphs__vae": "true"},
        {**rows, "offload__dit": "layerwise", "offload__vae": "component"},
        blocks,
    ]
    models = {name: write_tiny(name, tmp_path / name) for name in ("h3-image", "hunyuan-image-3")}
    rounded = {"precision": "bfloat16"}
    said = assert_all_draw_as_the_host(mocked(BEST), wishes, models=models, models_wish=rounded)
    assert not [note for note in said[0]["notes"] if "eager" in note]
    kernels = [one["kernels"]["dit"] for one in said]
    assert {found["attention"] for found in kernels[1:]} == {"mate"}
    for found, (format, kernel) in zip(kernels[1:], FORMATS.items(), strict=False):
        assert found[f"linear:{format}"] == kernel


@pytest.mark.parametrize("variant", ["mp_22", "mp_31+mate99bbf1f"])
def test_other_chips_and_versions_pass_too(mocked, variant):
    done = mocked(variant).command("conformance", "musa", "--only", "attention", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert mocked(variant).unbound_calls() == []


def test_the_package_of_the_same_name_is_not_taken_for_the_library(mocked):
    done = mocked("mp_31+impostor").python("-m", "portable_dit_musa")
    assert done.returncode == 0, done.stderr
    assert "mate.mha_interface is not installed" in done.stdout
    assert "mp_31" in done.stdout


MUTATIONS = [
    Mutation(
        "attention.py", "v=v, softmax_scale=scale, causal=causal)", "v=v, causal=causal)", "attention", "mate"
    ),
    Mutation("attention.py", "seqused_k=used,", "", "attention", "mate"),
    Mutation(
        "attention.py", "cu_seqlens_k=steps * rows_k", "cu_seqlens_k=steps * rows_q", "attention", "mate"
    ),
    Mutation(
        "attention.py",
        "causal=False, return_softmax_lse=True)",
        "causal=True, return_softmax_lse=True)",
        "attention",
        "mate",
    ),
    Mutation("attention.py", "SDPBackend.FLASH_ATTENTION", "SDPBackend.MATH", "attention", "sdpa_mudnn"),
    Mutation("attention.py", "grouped=False", "grouped=True", "attention", "sdpa_mudnn"),
    Mutation(
        "linear.py", "out_dtype=dtype,\n            use_fast_accum", "use_fast_accum", "linear", "scaled_mm"
    ),
    Mutation("linear.py", "F.pad(x, (0, 0, 0, -x.shape[0] % ROWS))", "x", "linear", "scaled_mm"),
    Mutation("linear.py", "scale_a=scales,", "scale_a=scales.flip(0),", "linear", "scaled_mm"),
    Mutation("linear.py", 'packed["values"].t()', 'packed["values"].t().contiguous()', "linear", "scaled_mm"),
    Mutation("linear.py", "return out if bias is None else out + bias", "return out", "linear", "mate"),
    Mutation("fusions.py", "eps, weight)[0]", "eps, None)[0]", "fused", "mudnn"),
]


def test_faults_in_the_package_do_not_go_unseen(mocked):
    assert_all_seen(mocked("mp_31+mate99bbf1f"), MUTATIONS)


def test_captures_share_a_stream_since_libraries_keep_a_workspace_for_each(mocked):
    code = """
import torch
from mock_vendor.streams import STREAMS
from portable_dit_musa import MusaBackend
backend = MusaBackend()
device = backend.devices()[0]
backend.activate(device)
x = torch.ones(4, device=device.torch_device)
counts = []
for _ in range(4):
    call = backend.graph(lambda x: x + 1, [x])
    assert call(x).sum().item() == 8
    del call  # the pool is given back, and the next capture has another
    counts.append(len(STREAMS))
refused = backend.graph(lambda x: x * x.sum().item(), [x])
print(counts[3] - counts[0], refused is None, backend.graph(lambda x: x + 1, [x])(x).sum().item())
"""
    done = mocked(BEST).python("-c", code)
    assert done.stdout.split() == ["0", "True", "8.0"], done.stdout + done.stderr
