"""HunyuanImage-3.0 at full size on one device: python docs/benchmarks/hunyuan_h200.py --out report.md

Random weights in fp8, 80 GB, made on the device one expert at a time; then, each as medians after a warm-up:

- a picture from prompt to PNG, at 50 steps with guidance and at 8 without, by stage, and the device's peak;
- the same with a router that prefers some experts (the weights of its rows grow from half to twice);
- one layer, and beside it its matrix products and attention alone, which are its floor;
- reading and quantising layers from bfloat16 shards in the published layout, as many as --load-layers says
  (5 GB each; they are written first, in the folder of --scratch).

Prints the report as Markdown, and into the file of --out. --tiny does all of it at the size of the tests, on
any device, to see that it runs: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from portable_dit import Request
from portable_dit.catalog import load_recipe
from portable_dit.errors import PortableDitError
from portable_dit.formats import QuantizedRows, quantize_blocks
from portable_dit.loaded import LoadedModel
from portable_dit.loading import load_model
from portable_dit.models.hunyuan_image_3.dit import Block, image_mask
from portable_dit.models.hunyuan_image_3.model import HunyuanImage
from portable_dit.models.hunyuan_image_3.names import all_tensors
from portable_dit.models.hunyuan_image_3.random_checkpoint import CONFIGS, write_configs, write_random
from portable_dit.models.hunyuan_image_3.spec import HunyuanSpec
from portable_dit.ops import Dispatch, KeyValues, Rotary
from portable_dit.quantize import QuantizedExpertLinear, QuantizedLinear
from portable_dit.result import Result
from portable_dit.safetensors_file import ITEM_BYTES, TensorFileWriter
from portable_dit.setup import Setup, set_up
from portable_dit.stages import draw_all

RECIPE = "nvidia/h200/hunyuan-image-3-1x-fp8"
PROMPT = "a lighthouse on a cliff at dusk, waves below, oil on canvas"
GB = 1e9
TARGETS = {"50 steps": 13.7, "8 steps": 1.4, "vae_decode": 0.35, "peak GB": 100.0, "layer": 1.2}


@dataclass(frozen=True)
class Bench:
    """What is measured on. requests: how many of each kind count."""

    setup: Setup
    loaded: LoadedModel
    requests: int
    rounds: int

    @property
    def model(self) -> HunyuanImage:
        return cast(HunyuanImage, self.loaded.model)

    def draw(self, request: Request) -> Result:
        resolved = self.setup.resolve(replace(request, format="png"))
        (drawn,) = draw_all(
            self.setup, self.loaded, [resolved], lambda place, event: None, lambda place: False, [False]
        )
        if isinstance(drawn, PortableDitError):
            raise drawn
        return drawn

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of a call, device work included."""
        found = []
        for number in range(self.rounds + 2):
            self.setup.backend.synchronize(self.setup.device)
            start = time.perf_counter()
            call()
            self.setup.backend.synchronize(self.setup.device)
            if number >= 2:
                found.append(time.perf_counter() - start)
        return statistics.median(found)


def pictures(bench: Bench, title: str, request: Request) -> list[str]:
    """Lines of the table: medians by stage, and the peak."""
    bench.draw(request)
    bench.setup.backend.peak_bytes(bench.setup.device, reset=True)
    results = [bench.draw(replace(request, seed=seed)) for seed in range(bench.requests)]
    peak = bench.setup.backend.peak_bytes(bench.setup.device) or 0
    median = {
        stage: statistics.median(result.seconds[stage] for result in results) for stage in results[0].seconds
    }
    step = statistics.median(s for result in results for image in result.images for s in image.step_seconds)
    figures = [median[name] for name in ("total", "prepare", "denoise", "vae_decode", "encode_png")]
    cells = " | ".join(f"{value:.3f}" for value in figures)
    return [f"| {title} | {cells} | {1e3 * step:.1f} | {peak / GB:.1f} |"]


def skew(model: HunyuanImage) -> None:
    """Makes every router prefer experts: a row of larger weights has larger logits, and wins more often."""
    for module in model.dit.layers:
        weight = cast(Block, module).mlp.gate.weight
        factors = torch.linspace(0.5, 2.0, weight.shape[0], device=weight.device, dtype=weight.dtype)
        weight.data.mul_(factors[:, None])


def busiest(bench: Bench, rows: int) -> float:
    """Rows of the busiest expert over the mean, in the first layer, for normal rows."""
    block = cast(Block, bench.model.dit.layers[0])
    x = torch.randn(rows, bench.model.dit.config.hidden_size, device=bench.model.dit.device)
    index, _ = block.mlp.gate(x.to(bench.model.dit.dtype))
    counts = torch.bincount(index.flatten(), minlength=bench.model.dit.config.num_experts)
    return float(counts.max() / counts.float().mean())


def one_layer(bench: Bench, cells: int) -> list[str]:
    """A layer of a step with both branches, and its products and attention alone."""
    dit, device = bench.model.dit, bench.model.dit.device
    config, block = dit.config, cast(Block, dit.layers[0])
    prefix, rows = 64, 1 + cells

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dit.dtype)

    x = normal(2, rows, config.hidden_size)
    keys = config.num_key_value_heads, config.attention_head_dim
    kept = KeyValues(normal(2, prefix, *keys), normal(2, prefix, *keys))
    angles = torch.rand(1, rows, config.attention_head_dim // 2, device=device)
    rotary, mask = Rotary(angles.cos(), angles.sin()), image_mask(prefix, 1, cells)
    whole = bench.seconds(lambda: block(x, rotary, mask, kept))

    flat = x.flatten(0, 1)
    order, ends = _dispatch(block, flat)
    attention, mlp = block.self_attn, block.mlp
    q = normal(2, rows, config.num_attention_heads, config.attention_head_dim)
    k = normal(2, prefix + rows, *keys)
    inner = normal(flat.shape[0], config.inner_size)
    shared = normal(flat.shape[0], config.shared_size)
    hidden = normal(order.numel(), config.moe_intermediate_size)
    dealt = Dispatch(order // config.moe_topk, ends)
    parts: dict[str, Callable[[], object]] = {
        "qkv_proj": _product(attention.qkv_proj, flat),
        "attention": lambda: attention.attend(q, k, k, mask),
        "o_proj": _product(attention.o_proj, inner),
        "shared MLP": _both(
            _product(mlp.shared_mlp.gate_and_up_proj, flat), _product(mlp.shared_mlp.down_proj, shared)
        ),
        "experts": _both(
            _product(mlp.experts.gate_and_up_proj, flat, dealt),
            _product(mlp.experts.down_proj, hidden, Dispatch(None, ends)),
        ),
    }
    each = {name: bench.seconds(call) for name, call in parts.items()}
    floor = sum(each.values())
    named = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in each.items())
    return [
        f"One layer, {2 * rows} rows: {1e3 * whole:.2f} ms, {whole / floor:.2f}x its products and attention "
        f"alone ({1e3 * floor:.2f} ms: {named}; inputs quantised before where the kernel takes them so). "
        f"{config.num_hidden_layers} layers: {1e3 * whole * config.num_hidden_layers:.0f} ms a step. "
        f"Target: {TARGETS['layer']}x."
    ]


def _dispatch(block: Block, flat: Tensor) -> tuple[Tensor, Tensor]:
    index, _ = block.mlp.gate(flat)
    experts, order = index.flatten().sort(stable=True)
    numbers = torch.arange(block.mlp.experts.num_experts, device=flat.device)
    return order, torch.searchsorted(experts, numbers, right=True, out_int32=True)


def _both(first: Callable[[], object], second: Callable[[], object]) -> Callable[[], object]:
    return lambda: (first(), second())


def _product(layer: torch.nn.Module, x: Tensor, *more: Dispatch) -> Callable[[], object]:
    """The layer on rows that are quantised already, where its kernel takes such."""
    quantized = isinstance(layer, QuantizedLinear | QuantizedExpertLinear) and layer.kernel.takes_quantized
    if not quantized:
        return lambda: layer(x, *more)
    form = cast(QuantizedLinear, layer).kernel.format
    values, scales = quantize_blocks(x.float(), form, (1, 0))
    rows = QuantizedRows(form, values, scales, tuple(x.shape), x.dtype)
    return lambda: layer(rows, *more)


def loading(arguments: argparse.Namespace) -> list[str]:
    """Reading and quantising a few layers from shards in the published layout."""
    layers = arguments.load_layers
    if not layers:
        return []
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        size = _write_layers(Path(folder), layers, tiny=arguments.tiny)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = []
        for _ in range(2):  # the second from the page cache
            setup = _setup(arguments, folder)
            start = time.perf_counter()
            loaded = load_model(setup)
            setup.backend.synchronize(setup.device)
            found.append(time.perf_counter() - start)
            del loaded
            setup.backend.trim(setup.device)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    rate = size / found[1]
    return [
        f"Load: {layers} layers, {size / GB:.1f} GB of bfloat16 shards in the published layout to fp8 on the "
        f"device: {found[0]:.1f} s, again {found[1]:.1f} s ({rate / GB:.2f} GB/s), host memory "
        f"+{peak / GB:.1f} GB. The 165 GB that pictures need would take {165 * GB / rate:.0f} s. Target: "
        "60 s and 16 GB."
    ]


def _write_layers(folder: Path, layers: int, *, tiny: bool) -> int:
    """A checkpoint of so many layers, whose tensors repeat one run of random numbers; gives its bytes."""
    config, tower = CONFIGS["tiny" if tiny else "full"]
    config = replace(config, dit=replace(config.dit, num_hidden_layers=layers))
    write_configs(folder, config)
    numbers = (torch.randn(1 << 22) * 0.02).bfloat16()
    read, batch = 0, dict[str, tuple[str, tuple[int, ...]]]()
    shapes = all_tensors(config, tower=tower)
    names = [n for n in shapes if not n.startswith(("lm_head", "vision", "vae.encoder", "model.ln_f"))]
    for number, name in enumerate(names):
        batch[name] = "F32" if name.startswith("vae.") else "BF16", shapes[name]
        if len(batch) == 200 or number == len(names) - 1:
            with TensorFileWriter(folder / f"model-{number:05}.safetensors", batch) as writer:
                for each, (dtype, shape) in batch.items():
                    count = torch.Size(shape).numel()
                    filled = numbers.repeat(-(-count // numbers.numel()))[:count]
                    filled = filled.float() if dtype == "F32" else filled
                    writer.write(each, memoryview(filled.view(torch.uint8).numpy().data))
                    read += count * ITEM_BYTES[dtype]
            batch = {}
    return read


def _setup(arguments: argparse.Namespace, weights: str) -> Setup:
    overrides: dict[str, object] = {"weights": weights, "prompt_cache_mib": 0}
    if not arguments.tiny:
        return set_up(load_recipe(RECIPE, overrides))
    overrides |= {"device.backend": arguments.backend, "device.name": None, "precision": "auto"}
    return set_up(load_recipe(RECIPE, overrides))


def report(arguments: argparse.Namespace) -> Sequence[str]:
    if not arguments.tiny:
        return [*measured(arguments, "random"), *loading(arguments)]
    with tempfile.TemporaryDirectory() as folder:
        write_random(Path(folder) / "tiny", config="tiny", dialect="instruct", seed=0)
        return [*measured(arguments, f"{folder}/tiny"), *loading(arguments)]


def measured(arguments: argparse.Namespace, weights: str) -> Sequence[str]:
    """Everything but the load."""
    start = time.perf_counter()
    setup = _setup(arguments, weights)
    bench = Bench(setup, load_model(setup), arguments.requests, arguments.rounds)
    made = time.perf_counter() - start
    spec, backend = cast(HunyuanSpec, setup.spec), setup.backend
    width, height = spec.sizes.default
    cells = width * height // spec.config.vae.ffactor_spatial**2
    guided = Request(PROMPT, steps=arguments.steps, guidance_scale=5.0)
    few = Request(PROMPT, steps=8, guidance_scale=1.0)
    table = pictures(bench, f"{arguments.steps} steps, guidance 5", guided)
    table += pictures(bench, "8 steps, one branch (as the Distil form)", few)
    layer = one_layer(bench, cells)
    even = busiest(bench, 2 * cells)
    skew(bench.model)
    table += pictures(bench, f"{arguments.steps} steps, skewed router", guided)
    uneven = busiest(bench, 2 * cells)
    kernels = ", ".join(f"{op} {kernel}" for op, kernel in setup.plan.choices("dit").items())
    memory = setup.plan.bytes
    del bench
    backend.trim(setup.device)
    return [
        f"{setup.plan.device}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{width}x{height}, medians of {arguments.requests} requests. Weights made in {made:.0f} s.",
        "",
        "| | total, s | prepare | denoise | VAE | PNG | step, ms | peak, GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *table,
        "",
        f"Targets: 50 steps {TARGETS['50 steps']} s, 8 steps {TARGETS['8 steps']} s, VAE "
        f"{TARGETS['vae_decode']} s, peak {TARGETS['peak GB']:.0f} GB. The plan says {memory.peak / GB:.1f} "
        f"GB ({memory.peak_stage}).",
        "",
        *layer,
        "",
        f"Busiest expert over the mean: {even:.2f}, with the skewed router {uneven:.2f}.",
        "",
        f"Kernels of the DiT: {kernels}.",
        "",
    ]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the report goes, beside the terminal")
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10, help="of each product and of a layer")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--load-layers", type=int, default=4, help="5 GB each; 0 leaves loading out")
    parser.add_argument("--scratch", help="folder for the shards, such as one in memory")
    parser.add_argument("--tiny", action="store_true", help="the size of the tests, to see that it runs")
    parser.add_argument("--backend", default="auto", help="of --tiny")
    arguments = parser.parse_args()
    text = "\n".join(report(arguments)) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
