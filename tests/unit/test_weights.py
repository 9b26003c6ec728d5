"""Weights from disk: everything wrong is told, and what is right arrives bit for bit."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from portable_dit.errors import WeightsError
from portable_dit.manifest import make_manifest, read_manifest, verify
from portable_dit.models.spec import TensorSource
from portable_dit.safetensors_file import open_tensor_file, stored_tensors
from portable_dit.weights import Checkpoint, _joined_as_shapes, fill_random, load_component


def whole(name: str) -> TensorSource:
    """A parameter that is stored under one name."""
    return TensorSource((name,), lambda tensor: tensor)


class Small(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(6, 4, dtype=dtype)
        self.second = nn.Linear(4, 3, bias=False, dtype=dtype)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def on_meta(dtype=torch.float32) -> Small:
    with torch.device("meta"):
        return Small(dtype)


def filled() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = Small().state_dict()
    state["count"] = torch.tensor([3, 4])
    return {name: tensor.clone() for name, tensor in state.items()}


def load(module, folder, sources=None, unused=()):
    stored = stored_tensors(folder)
    names = {n for n in stored if not n.endswith("_scale") and n not in unused}
    sources = sources or {name: whole(name) for name in names}
    return load_component(
        module, stored, sources=sources, device=lambda name: "cpu", unused=unused, title="small"
    )


def save(folder, state, name="model.safetensors"):
    folder.mkdir(exist_ok=True, parents=True)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / name)
    return folder / name


def test_every_tensor_arrives_bit_for_bit(tmp_path):
    save(tmp_path, filled())
    module = on_meta()
    load(module, tmp_path)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, filled()[name])
    assert not any(p.requires_grad for p in module.parameters())


def test_a_constant_that_is_in_no_file_goes_where_the_weights_go(tmp_path):
    save(tmp_path, filled())
    module, stored = on_meta(), stored_tensors(tmp_path)
    module.first.register_buffer("frequencies", torch.ones(2), persistent=False)
    sources = {name: whole(name) for name in stored}
    load_component(module, stored, sources=sources, device=lambda name: "meta")
    assert module.first.frequencies.is_meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_module_says_the_dtype(tmp_path, dtype, stored):
    state = {n: t.to(stored) if t.is_floating_point() else t for n, t in filled().items()}
    save(tmp_path, state)
    module = on_meta(dtype)
    load(module, tmp_path)
    assert torch.equal(module.first.weight, state["first.weight"].to(dtype))


def test_an_eight_bit_weight_is_expanded_by_its_row_scale(tmp_path):
    state = filled()
    values = torch.randint(-127, 128, (4, 6), dtype=torch.int8)
    scale = torch.rand(4).half()
    save(tmp_path, {**state, "first.weight": values, "first.weight_scale": scale})
    module = on_meta()
    load(module, tmp_path)
    assert torch.equal(module.first.weight, values.float() * scale.float()[:, None])


def test_a_parameter_may_be_made_of_several_tensors(tmp_path):
    state = filled()
    weight = state.pop("first.weight")
    save(tmp_path, {**state, "top": weight[:1], "rest": weight[1:]})
    sources = {name: whole(name) for name in state} | {
        "first.weight": TensorSource(("top", "rest"), lambda *tensors: torch.cat(tensors))
    }
    module = on_meta()
    load(module, tmp_path, sources)
    assert torch.equal(module.first.weight, weight)


def test_missing_unexpected_and_mismatched_tensors_are_listed_together(tmp_path):
    state = filled()
    del state["first.bias"]
    state["second.weight"] = torch.zeros(3, 5)
    state["count"] = torch.zeros(2)
    state["stranger"] = torch.zeros(1)
    save(tmp_path, state)
    with pytest.raises(WeightsError) as caught:
        load(on_meta(), tmp_path)
    message = str(caught.value)
    assert "1 missing:\n  first.bias" in message
    assert "1 unexpected:\n  stranger" in message
    assert "2 mismatched:" in message
    assert "second.weight F32 [3, 5] stored, [3, 4] expected" in message
    assert "count F32 [2] stored, int64 expected" in message
    assert "one and the same checkpoint" in message


def test_a_scale_of_the_wrong_length_is_a_mismatch(tmp_path):
    values = torch.zeros(4, 6, dtype=torch.int8)
    save(tmp_path, {**filled(), "first.weight": values, "first.weight_scale": torch.ones(3)})
    with pytest.raises(WeightsError, match=r"first\.weight_scale: \[3\] stored, \[4\] expected"):
        load(on_meta(), tmp_path)


def test_unused_tensors_are_passed_over(tmp_path):
    save(tmp_path, {**filled(), "rope.inv_freq": torch.ones(3)})
    load(on_meta(), tmp_path, unused=("rope.inv_freq",))


@pytest.mark.parametrize("value", [1e39, -1e300, 3.4028235677973366e38])
def test_float64_values_that_float32_makes_infinite_are_refused_with_their_names(tmp_path, value):
    state = {**filled(), "first.bias": torch.tensor([0.0, 1.0, value, 2.0], dtype=torch.float64)}
    assert state["first.bias"].isfinite().all()
    assert not state["first.bias"].float().isfinite().all()
    save(tmp_path, state)
    with pytest.raises(WeightsError, match=r"1 tensor holds .*beyond float32.*\n  first\.bias"):
        load(on_meta(), tmp_path)


def test_float64_values_that_float32_holds_are_loaded(tmp_path):
    largest = torch.finfo(torch.float32).max
    state = {**filled(), "first.bias": torch.tensor([largest, -largest, 0.5, 1e-50], dtype=torch.float64)}
    save(tmp_path, state)
    module = on_meta()
    load(module, tmp_path)
    assert module.first.bias.tolist() == [largest, -largest, 0.5, 0.0]


def test_values_that_a_modules_own_type_makes_infinite_are_refused(tmp_path):
    state = {**filled(), "first.bias": torch.tensor([0.0, 1.0, 65520.0, 2.0])}
    save(tmp_path, state)
    with pytest.raises(WeightsError, match=r"first\.bias: it has values beyond float16"):
        load(on_meta().half(), tmp_path)
    module = on_meta().half()
    save(tmp_path, {**state, "first.bias": torch.tensor([0.0, 1.0, 65504.0, 2.0])})
    load(module, tmp_path)
    assert module.first.bias.tolist() == [0.0, 1.0, 65504.0, 2.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_values_that_are_not_finite_are_refused_with_every_name(tmp_path, bad, dtype):
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in filled().items()}
    state["first.bias"][2] = bad
    state["second.weight"][1, 1] = bad
    save(tmp_path, state)
    with pytest.raises(WeightsError) as caught:
        load(on_meta(), tmp_path)
    assert "2 tensors hold NaN or infinite" in str(caught.value)
    assert "first.bias" in str(caught.value)
    assert "second.weight" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_in_eight_bit_floats_is_seen(tmp_path, dtype):
    path = save(tmp_path, {"a": torch.tensor([1.0, float("nan")]).to(dtype), "b": torch.ones(2).to(dtype)})
    tensors = open_tensor_file(path).tensors
    assert not tensors["a"].is_finite()
    assert tensors["b"].is_finite()


@pytest.mark.parametrize("keep", [0, 4, 30, 200, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = save(tmp_path, filled())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"cut short|not a safetensors file"):
        load(on_meta(), tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PK\x03\x04 a pickle in a zip file", "not a safetensors file"),
        ((5).to_bytes(8, "little") + b"{nope", "no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "no JSON object"),
        ((12).to_bytes(8, "little") + b'{"a":{"b":1}', "no JSON"),
        ((13).to_bytes(8, "little") + b'{"a":{"b":1}}', "malformed"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path, content, words):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=words):
        load(on_meta(), tmp_path)


def test_a_header_whose_sizes_contradict_its_shapes_is_refused(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(WeightsError, match=r"a is F32 \[2\], 8 bytes, but the header gives it 4"):
        stored_tensors(tmp_path)


def test_a_file_whose_data_is_not_aligned_is_read(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (-len(header) % 8 + 1)
    data = torch.tensor([1.5, -2.5]).numpy().tobytes()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    with torch.device("meta"):
        module = nn.Module()
        module.a = nn.Parameter(torch.empty(2))
    load(module, tmp_path)
    assert module.a.tolist() == [1.5, -2.5]


def shards(folder):
    state = filled()
    first, second = {"first.weight", "first.bias"}, {"second.weight", "count"}
    names = {}
    for number, part in enumerate((first, second), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save(folder, {name: state[name] for name in part}, file)
        names |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return names


def test_shards_are_read_through_their_index(tmp_path):
    shards(tmp_path)
    module = on_meta()
    load(module, tmp_path)
    assert torch.equal(module.second.weight, filled()["second.weight"])


def test_missing_shards_are_named(tmp_path):
    shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"1 of 2 files are missing\.\n  model-00002-of-00002"):
        load(on_meta(), tmp_path)


def test_an_index_that_names_the_wrong_shard_or_another_folder_is_refused(tmp_path):
    names = shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**names, "count": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(WeightsError, match=r"not in the files that the index names\.\n  count"):
        load(on_meta(), tmp_path)
    index.write_text(json.dumps({"weight_map": {"count": "../secret.safetensors"}}))
    with pytest.raises(WeightsError, match="not an index"):
        load(on_meta(), tmp_path)


def test_two_forms_of_the_weights_in_one_folder_are_refused(tmp_path):
    save(tmp_path, filled())
    save(tmp_path, filled(), "model.fp16.safetensors")
    with pytest.raises(WeightsError, match="Keep one form"):
        load(on_meta(), tmp_path)


def test_other_formats_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(WeightsError, match=r"no \.safetensors file.*can run code"):
        load(on_meta(), tmp_path)


def test_random_weights_fill_everything_and_repeat(tmp_path):
    modules = [on_meta(torch.bfloat16) for _ in range(2)]
    for module in modules:
        fill_random(module, device=lambda name: "cpu", seed=3)
    assert torch.equal(modules[0].first.weight, modules[1].first.weight)
    assert modules[0].first.weight.dtype == torch.bfloat16
    assert modules[0].first.bias.eq(0).all()
    assert not any(tensor.is_meta for tensor in modules[0].state_dict().values())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(300, 40), (200, 300)),
        (nn.Conv2d(64, 32, 3), (1, 64, 30, 30)),
        (nn.Conv3d(8, 16, 3), (1, 8, 9, 30, 30)),
    ],
)
def test_random_weights_keep_the_scale_of_what_passes_them(layer, shape):
    fill_random(layer, device=lambda name: "cpu")
    with torch.no_grad():
        assert layer(torch.randn(shape)).std().item() == pytest.approx(1.0, rel=0.15)


# The manifest


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "transformer", filled())
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "manifest.json").write_text(json.dumps(make_manifest(tmp_path)))
    return tmp_path


def test_a_whole_folder_verifies(folder):
    seen = []
    report = verify(folder, on_file=seen.append)
    assert report.has_manifest
    assert report.files == ("model_index.json", "transformer/model.safetensors") == tuple(seen)
    assert report.tensors == 4
    assert set(read_manifest(folder)) == set(report.files)


def test_one_flipped_bit_is_found_by_verify_and_by_opening(folder):
    path = folder / "transformer" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    for check in (verify, Checkpoint.open):
        with pytest.raises(WeightsError, match=r"model\.safetensors: right size, wrong content"):
            check(folder)


def test_missing_short_and_extra_files_are_told_together(folder):
    (folder / "model_index.json").unlink()
    path = folder / "transformer" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    save(folder / "vae", filled())
    with pytest.raises(WeightsError) as caught:
        verify(folder)
    message = str(caught.value)
    assert "3 of 3 files" in message
    assert "model_index.json: missing" in message
    assert "transformer/model.safetensors:" in message
    assert "vae/model.safetensors: not in manifest.json" in message


def test_without_a_manifest_headers_values_and_shards_are_still_checked(folder):
    (folder / "manifest.json").unlink()
    assert not verify(folder).has_manifest
    shards(folder / "vae")
    (folder / "vae" / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(WeightsError, match="files are missing"):
        verify(folder)
    shutil.rmtree(folder / "vae")
    state = filled()
    state["first.bias"][0] = float("nan")
    save(folder / "transformer", state)
    with pytest.raises(WeightsError, match=r"NaN or infinite values, .* in first\.bias"):
        verify(folder)


def test_a_broken_manifest_and_an_empty_folder_are_refused(folder, tmp_path_factory):
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(WeightsError, match="not a manifest"):
        verify(folder)
    with pytest.raises(WeightsError, match="Is it a checkpoint"):
        verify(tmp_path_factory.mktemp("empty"))
    with pytest.raises(WeightsError, match="no such folder"):
        verify(folder / "nowhere")


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tensors_without_values_are_joined_as_torch_joins_those_with_values(dim):
    parts = [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3)]
    with _joined_as_shapes():
        made = torch.cat([part.to("meta") for part in parts], dim=dim)
        there = torch.cat(parts, dim=dim)
        with pytest.raises(RuntimeError, match="cannot join"):
            torch.cat([torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")], dim=dim)
    wanted = torch.cat(parts, dim=dim)
    assert (made.shape, made.dtype, made.is_meta) == (wanted.shape, wanted.dtype, True)
    assert torch.equal(there, wanted)
