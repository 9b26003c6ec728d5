"""The backend on mocked machines: commands, the conformance suite, and faults that it must see."""

from __future__ import annotations

import json

import pytest
from mock_vendor.mutants import assert_all_seen
from mock_vendor.pictures import assert_all_draw_as_the_host, write_tiny
from mock_vendor.process import Mutation

BEST = "gfx942"


def test_the_conformance_suite_passes_with_every_vendor_function_called(mocked):
    machine = mocked(BEST)
    report = machine.folder / "report.json"
    done = machine.command("conformance", "rocm", "--repeats", "1", "--soak", "2", "--json", report)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["ok"]
    assert {"aiter", "flash-attn"} == set(found["libraries"])
    for category, outcomes in found["outcomes"].items():
        assert any(o["status"] == "pass" for o in outcomes), category
    assert machine.called() >= {
        "aiter.flash_attn_func",
        "aiter.gemm_a8w8",
        "aiter.gemm_a8w8_blockscale",
        "aiter.rms_norm",
        "aiter.silu_and_mul",
        "flash_attn.flash_attn_func",
        "aten::scaled_dot_product_attention",
        "aten::_scaled_mm_v2",
        "torch.cuda.graph",
    }
    assert machine.unbound_calls() == []


@pytest.mark.parametrize(
    ("variant", "category"),
    [("gfx950", "linear"), ("gfx950+aiter0.1.7", "attention"), ("gfx1100+bare", "attention")],
)
def test_other_chips_and_versions_pass_too(mocked, variant, category):
    done = mocked(variant).command("conformance", "rocm", "--only", category, "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert mocked(variant).unbound_calls() == []


def test_the_large_models_in_small_draw_what_the_host_draws(mocked, tmp_path):
    models = {name: write_tiny(name, tmp_path / name) for name in ("h3-image", "hunyuan-image-3")}
    wish = {"precision": "bfloat16"}
    for said in assert_all_draw_as_the_host(mocked(BEST), [], models=models, models_wish=wish):
        assert said["kernels"]["dit"]["attention"] == "aiter"


def test_the_package_of_the_same_name_is_not_taken_for_the_library(mocked):
    done = mocked("gfx942+impostor").python("-m", "portable_dit_rocm")
    assert done.returncode == 0, done.stderr
    assert "aiter has no flash_attn_func" in done.stdout
    assert "gfx942" in done.stdout


def test_doctor_names_the_device_and_finds_its_kernels_right(mocked):
    machine = mocked("gfx942+bare")
    listed = machine.command("backends", "--json")
    assert listed.returncode == 0, listed.stderr
    status = {s["name"]: s for s in json.loads(listed.stdout)["plugins"]}["rocm"]
    assert (status["ok"], status["devices"]) == (True, ["AMD Instinct MI325X"] * 2)


MUTATIONS = [
    Mutation("attention.py", "softmax_scale=scale, causal=causal)", "causal=causal)", "attention", "aiter"),
    Mutation(
        "attention.py", "softmax_scale=scale, causal=causal)", "softmax_scale=scale)", "attention", "aiter"
    ),
    Mutation(
        "attention.py", "return result[0], result[1]", "return result[0], -result[1]", "attention", "aiter"
    ),
    Mutation(
        "linear.py",
        'return {"values": to_fnuz(packed["values"]), "scales": packed["scales"] * 2}',
        'return {"values": to_fnuz(packed["values"]), "scales": packed["scales"]}',
        "linear",
        "scaled_mm_fnuz",
    ),
    Mutation("fnuz.py", "torch.where(bits == NEGATIVE_ZERO, 0, bits)", "bits", "linear", "scaled_mm_fnuz"),
    Mutation(
        "linear.py",
        "return to_fnuz(values), scales * 2\n\n\nclass",
        "return values, scales\n\n\nclass",
        "linear",
        "scaled_mm_fnuz",
    ),
    Mutation(
        "linear.py",
        "dtype=dtype)\n        return out if bias",
        "dtype=torch.float16)\n        return out if bias",
        "linear",
        "aiter",
    ),
    Mutation("linear.py", "return out if bias is None else out + bias", "return out", "linear", "aiter"),
    Mutation(
        "fusions.py",
        'library_function("aiter", "rms_norm")(rows, gain, eps)',
        'library_function("aiter", "rms_norm")(rows, gain, 0.1)',
        "fused",
        "aiter",
    ),
]


def test_faults_in_the_package_do_not_go_unseen(mocked):
    assert_all_seen(mocked("gfx942+aiter0.1.7"), MUTATIONS)
