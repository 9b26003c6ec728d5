"""Quantised layers take what is stored as it is, when it is what they run; and what they made can be kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from portable_dit import Engine
from portable_dit.cpu import CpuBackend
from portable_dit.errors import WeightsError
from portable_dit.formats import Encoded, encode, format_named
from portable_dit.models.spec import TensorSource
from portable_dit.quantize import quantize
from portable_dit.safetensors_file import TensorFileWriter, open_tensor_file, stored_tensors
from portable_dit.shares import Share
from portable_dit.weight_cache import CachedWeights, cache_entries, clear_cache
from portable_dit.weights import load_component

ROWS, COLUMNS = 8, 32


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(COLUMNS, ROWS, bias=False)
        self.second = nn.Linear(COLUMNS, ROWS, bias=False)


def quantized(format: str) -> Pair:
    backend = CpuBackend()
    with torch.device("meta"):
        module = Pair()
    kernel = backend.linear_kernels()[format][-1].id
    quantize(module, format=format, keep=("second",), backend=backend, kernel_id=kernel)
    return module


def same(tensor):
    return tensor


def turned(rows):
    return torch.cat([rows[4:], rows[:4]])


def stored_weight(dtype: torch.dtype, scales: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values none of whose rows reaches the largest number, so that encoding anew would change them."""
    torch.manual_seed(0)
    values = torch.randint(-90, 90, (ROWS, COLUMNS)).to(dtype)
    return values, torch.rand(scales) * 0.01 + 0.001


def load(module: Pair, folder: Path, make=same, *, by_rows: bool = True, **options) -> Pair:
    stored = stored_tensors(folder)
    sources = {
        "first.weight": TensorSource(("first.weight",), make, by_rows=by_rows),
        "second.weight": TensorSource(("second.weight",), same),
    }
    load_component(module, stored, sources=sources, device=lambda name: "cpu", **options)
    return module


def save(folder: Path, values: torch.Tensor, scale: torch.Tensor | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"first.weight": values, "second.weight": torch.ones(ROWS, COLUMNS)}
    if scale is not None:
        tensors["first.weight_scale"] = scale
    save_file(tensors, folder / "model.safetensors")
    return folder


def output(module: Pair) -> torch.Tensor:
    return module.first(torch.eye(COLUMNS)).t()  # [N, K]: the weight, with the input's rounding


def output_of(weight: Encoded) -> torch.Tensor:
    """What a layer gives that was handed this very weight."""
    module = quantized(weight.format.name)
    module.first.accept_encoded(weight)
    return output(module)


@pytest.mark.parametrize(
    ("format", "dtype", "scales"),
    [
        ("int8_row", torch.int8, ROWS),
        ("int8_row", torch.int8, 1),
        ("fp8_row", torch.float8_e4m3fn, ROWS),
        ("fp8_row", torch.float8_e4m3fn, 1),
        ("fp8_tensor", torch.float8_e4m3fn, 1),
    ],
)
@pytest.mark.parametrize("make", [same, turned], ids=["in order", "rows moved"])
def test_a_weight_stored_in_the_layers_format_is_taken_bit_for_bit(tmp_path, format, dtype, scales, make):
    values, scale = stored_weight(dtype, scales)
    module = load(quantized(format), save(tmp_path, values, scale), make)
    each = make(scale.expand(ROWS)[:, None]) if format != "fp8_tensor" else scale[:, None]
    stored = Encoded(format_named(format), make(values.float()).to(dtype), each.contiguous())
    anew = encode(make(values.float() * scale.expand(ROWS)[:, None]), format)
    assert torch.equal(output(module), output_of(stored))
    assert not torch.equal(stored.values.float(), anew.values.float())


@pytest.mark.parametrize(
    ("format", "dtype", "scales", "by_rows"),
    [
        ("int8_row", torch.int8, ROWS, False),  # moved in other ways than whole rows
        ("fp8_tensor", torch.float8_e4m3fn, ROWS, True),  # one scale cannot be eight
        ("fp8_row", torch.int8, ROWS, True),  # other numbers
        ("int8_row_rotated", torch.int8, ROWS, True),  # the same kind of numbers in another basis
    ],
)
def test_any_other_weight_is_encoded_from_what_it_stands_for(tmp_path, format, dtype, scales, by_rows):
    values, scale = stored_weight(dtype, scales)
    module = load(quantized(format), save(tmp_path, values, scale), by_rows=by_rows)
    assert torch.equal(output(module), output_of(encode(values.float() * scale[:, None], format)))


def test_a_rank_takes_its_share_of_every_tensor(tmp_path):
    torch.manual_seed(0)
    whole = torch.randn(2 * ROWS, COLUMNS)
    save_file({"first.weight": whole, "second.weight": whole.clone()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = Pair()

    quarter = ROWS // 2
    ranges = ((0, quarter), (ROWS, ROWS + quarter))
    shares = {
        "first.weight": Share(0, 2 * ROWS, ((ROWS, 2 * ROWS),)),
        "second.weight": Share(0, 2 * ROWS, ranges),
    }
    load(module, tmp_path, shares=shares)
    assert torch.equal(module.first.weight, whole[ROWS:])
    assert torch.equal(module.second.weight, torch.cat([whole[start:stop] for start, stop in ranges]))


def test_progress_counts_every_byte(tmp_path):
    values, scale = stored_weight(torch.int8, ROWS)
    seen = []
    load(quantized("int8_row"), save(tmp_path, values, scale), on_bytes=lambda *both: seen.append(both))
    total = ROWS * COLUMNS * (1 + 4)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTABLE_DIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load_cached(folder: Path, format: str = "int8_row") -> tuple[Pair, bool]:
    module = quantized(format)
    with CachedWeights(module, stored_tensors(folder), title=f"pair as {format}") as entry:
        load(module, folder, cache=entry)
        return module, entry.reused


@pytest.mark.parametrize("format", ["int8_row", "fp8_row", "fp8_block128", "mxfp8", "fp8_tensor"])
def test_a_cached_weight_is_the_one_that_was_made(tmp_path, cache, format):
    torch.manual_seed(0)
    folder = save(tmp_path / "weights", torch.randn(ROWS, COLUMNS), None)
    made, reused = load_cached(folder, format)
    assert not reused
    again, reused = load_cached(folder, format)
    assert reused
    assert torch.equal(output(made), output(again))
    assert torch.equal(made.second.weight, again.second.weight)


def test_the_cache_is_told_apart_by_content_and_format(tmp_path, cache):
    torch.manual_seed(0)
    folder = save(tmp_path / "weights", torch.randn(ROWS, COLUMNS), None)
    load_cached(folder)
    assert not load_cached(folder, "fp8_row")[1]
    save(folder, torch.randn(ROWS, COLUMNS), None)
    changed, reused = load_cached(folder)
    assert not reused
    assert torch.equal(output(changed), output(load(quantized("int8_row"), folder)))
    entries = cache_entries()
    assert sorted(entry.title for entry in entries) == [
        "pair as fp8_row",
        "pair as int8_row",
        "pair as int8_row",
    ]
    assert clear_cache() == sum(entry.bytes for entry in entries) > 0
    assert not cache_entries()


def test_a_load_that_fails_leaves_nothing_in_the_cache(tmp_path, cache):
    weight = torch.randn(ROWS, COLUMNS)
    weight[3, 3] = float("nan")
    with pytest.raises(WeightsError, match="NaN"):
        load_cached(save(tmp_path / "weights", weight, None))
    assert not list(cache.iterdir())


def test_a_damaged_entry_is_made_anew(tmp_path, cache):
    torch.manual_seed(0)
    folder = save(tmp_path / "weights", torch.randn(ROWS, COLUMNS), None)
    made, _ = load_cached(folder)
    (entry,) = cache_entries()
    entry.path.write_bytes(entry.path.read_bytes()[:-8])
    again, reused = load_cached(folder)
    assert not reused
    assert torch.equal(output(made), output(again))
    assert load_cached(folder)[1]


def test_a_load_that_is_interrupted_has_left_nothing_when_its_caller_hears_of_it(cache):
    """The command line ends the process then, and with it the thread that loads."""

    def interrupt(name: str, done: int, total: int) -> None:
        if name == "dit" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine.load("cpu/h3-mini", {"cache": True, "quantization.dit": "fp8_row"}, on_bytes=interrupt)
    assert list(cache.iterdir()) == []


def test_a_place_for_the_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PORTABLE_DIT_CACHE", str(tmp_path / "file" / "cache"))
    folder = save(tmp_path / "weights", torch.randn(ROWS, COLUMNS), None)
    with pytest.raises(WeightsError, match="PORTABLE_DIT_CACHE"):
        load_cached(folder)


def test_too_little_room_for_the_cache_is_told_in_numbers_that_differ(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTABLE_DIT_CACHE", str(tmp_path / "cache"))
    full = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: full)
    folder = save(tmp_path / "weights", torch.randn(ROWS, COLUMNS), None)
    with pytest.raises(WeightsError, match=r"cache: \d{3} bytes are needed for .* has 100 free\. Set PORT"):
        load_cached(folder)


def test_a_written_file_has_every_tensor_at_a_multiple_of_its_item(tmp_path):
    path = tmp_path / "x.safetensors"
    tensors = {"bytes": ("U8", (3,)), "floats": ("F32", (2,)), "halves": ("BF16", (5,))}
    with TensorFileWriter(path, tensors, {"title": "a test"}) as writer:
        writer.write("bytes", b"abc")
        writer.write("floats", memoryview(torch.tensor([1.5, -2.0]).numpy()))
        assert not path.exists()
        writer.write("halves", bytes(10))
    file = open_tensor_file(path)
    assert file.metadata == {"title": "a test"}
    assert file.tensors["bytes"].content() == b"abc"
    assert {
        n: t.start % {"U8": 1, "F32": 4, "BF16": 2}[t.dtype] for n, t in file.tensors.items()
    } == dict.fromkeys(tensors, 0)
    from safetensors.torch import load_file

    assert load_file(path)["floats"].tolist() == [1.5, -2.0]


def test_a_file_that_was_not_finished_does_not_get_its_name(tmp_path):
    path = tmp_path / "x.safetensors"
    with TensorFileWriter(path, {"a": ("U8", (1,)), "b": ("U8", (1,))}) as writer:
        writer.write("a", b"a")
    assert not list(tmp_path.iterdir())
