"""What the device reaches: attention, products, fusions, blocks of H3-Image, offload. Called by on_device.py.

Times are medians of CUDA events, after a warm-up, on random numbers. A block's ceiling is its four products
and its attention timed alone in the same run.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from portable_dit_cuda import CudaBackend, fusions
from torch import Tensor, nn

from portable_dit import ops
from portable_dit.backend import AttentionKernel
from portable_dit.bind import bind
from portable_dit.capabilities import AttentionRequest, LinearRequest
from portable_dit.formats import FORMATS, encode
from portable_dit.masks import NO_MASK
from portable_dit.models.h3_image.config import DiTConfig
from portable_dit.models.h3_image.dit import Block
from portable_dit.models.h3_image.spec import PRODUCERS
from portable_dit.offload import offload
from portable_dit.quantize import QuantizedLinear, quantize

if TYPE_CHECKING:
    from on_device import Report

BACKEND = CudaBackend()
CONFIG = DiTConfig()
WIDTH, INNER, FFN = CONFIG.hidden_size, CONFIG.inner_size, CONFIG.ffn_hidden_size
PRODUCTS = {
    "qkv_proj": (WIDTH, 3 * INNER),
    "out_proj": (INNER, WIDTH),
    "fc1": (WIDTH, 2 * FFN),
    "fc2": (FFN, WIDTH),
}
BLOCK_FORMATS = ("fp8_row", "int8_row", "int8_row_rotated")
EXPERTS, CHOSEN = 64, 8  # of HunyuanImage-3, and how many a row has
PAIRS = 3 * CONFIG.rope_inv_freq_len
PLAIN = {
    "norm_modulate": ops.norm_modulate,
    "gated_residual": ops.gated_residual,
    "head_norm_rotary": ops.head_norm_rotary,
    "swiglu": ops.swiglu,
}


def milliseconds(function: Callable[[], Any], *, repeats: int = 15, warm_up: int = 4) -> float:
    """The median time of a call on the device."""
    with torch.inference_mode():
        for _ in range(warm_up):
            function()
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def attention(report: Report, rows: list[int]) -> None:
    """All kernels that accept H3-Image's attention."""
    for length in rows:
        q, k, v = torch.randn(
            3, 1, length, CONFIG.num_attention_heads, 128, device="cuda", dtype=torch.bfloat16
        )
        flops = 4 * length**2 * INNER
        for kernel in serving(length):
            if kernel.id == "chunked" and length > 8192:
                continue
            ms = milliseconds(
                lambda kernel=kernel, q=q, k=k, v=v: kernel.run(q, k, v, NO_MASK, scale=128**-0.5)
            )
            report.measured(f"{kernel.id} at {length}", f"{ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s", ms=ms)


def products(report: Report, rows: list[int]) -> None:
    """The four products of a block by format, with the quantisation of the input beside them."""
    capabilities = BACKEND.capabilities(BACKEND.devices()[0])
    for length in rows:
        for name, (inputs, outputs) in PRODUCTS.items():
            x = torch.randn(length, inputs, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
            flops = 2 * length * inputs * outputs
            times = {"bfloat16": milliseconds(lambda x=x, weight=weight: F.linear(x, weight))}
            for format, kernels in BACKEND.linear_kernels().items():
                for kernel in kernels:
                    request = LinearRequest(format, "bfloat16", length, inputs, outputs)
                    if (
                        not hasattr(kernel, "quantize_input")
                        or kernel.check(request, capabilities) is not None
                    ):
                        continue
                    packed = kernel.pack(encode(weight, format), torch.bfloat16)
                    values, scales = kernel.quantize_input(x)
                    times[f"{format} {kernel.id}"] = milliseconds(
                        lambda k=kernel, v=values, s=scales, p=packed: k.apply_quantized(
                            v, s, p, None, torch.bfloat16
                        )
                    )
                    times[f"{format} {kernel.id} quantising"] = milliseconds(
                        lambda k=kernel, x=x: k.quantize_input(x)
                    )
            for what, ms in times.items():
                rate = "" if "quantising" in what else f", {flops / ms / 1e9:.0f} TFLOP/s"
                report.measured(f"{name} {length} {what}", f"{ms:.3f} ms{rate}", ms=ms)


def mixtures(report: Report) -> None:
    """The grouped products of HunyuanImage-3's experts: each kernel's time, and whether their bits agree."""
    generator = torch.Generator("cuda").manual_seed(0)
    kernels = BACKEND.expert_kernels()["fp8_row"]
    for rows in (8194, 4097):
        counts = torch.rand(EXPERTS, generator=generator, device="cuda").add_(4.0)
        ends = (counts.cumsum(0) / counts.sum() * rows * CHOSEN).round().int()
        for columns, depth in ((6144, 4096), (4096, 3072)):
            weight = torch.randn(EXPERTS, columns, depth, generator=generator, device="cuda")
            packed = {
                "values": weight.to(torch.float8_e4m3fn),
                "scales": torch.rand(EXPERTS, columns, generator=generator, device="cuda"),
            }
            del weight
            x = torch.randn(int(ends[-1]), depth, generator=generator, device="cuda", dtype=torch.bfloat16)
            values, scales = fusions.quantize_rows(x, FORMATS["fp8_row"])
            results, flops = [], 2 * len(x) * columns * depth
            for kernel in kernels:
                given = values, scales, packed, ops.Dispatch(None, ends), torch.bfloat16
                results.append(kernel.multiply(*given))
                ms = milliseconds(lambda kernel=kernel, given=given: kernel.multiply(*given))
                text = f"{ms:.3f} ms, {flops / ms / 1e9:.0f} TFLOP/s"
                report.measured(f"{kernel.id} {len(x)} x {depth} -> {columns}", text, ms=ms)
            same = all(torch.equal(results[0], other) for other in results[1:])
            report.check(f"the same bits, {len(x)} x {depth} -> {columns}", same)


def seam_arguments(length: int) -> dict[str, tuple[tuple[Any, ...], int]]:
    """Arguments of each seam at a block's sizes, and the bytes that it must move."""
    _, x, (modulation, rotary, _) = make_inputs(length)
    weight = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)
    head_weight = torch.ones(128, device="cuda", dtype=torch.bfloat16)
    qkv = torch.randn(1, length, 3, CONFIG.num_attention_heads, 128, device="cuda", dtype=torch.bfloat16)
    up = torch.randn(1, length, 2 * FFN, device="cuda", dtype=torch.bfloat16)
    return {
        "norm_modulate": ((x, weight, 1e-5, modulation, 0), 2 * x.nbytes),
        "gated_residual": ((x, x.flip(1), modulation, 2), 3 * x.nbytes),
        "head_norm_rotary": ((qkv[:, :, 0], head_weight, 1e-5, rotary), 2 * qkv.nbytes // 3),
        "swiglu": ((up,), up.nbytes * 3 // 2),
    }


def fused_seams(report: Report, rows: list[int]) -> None:
    """Each fused seam against its plain body, and what its bytes alone would take."""
    big = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(big)
    bandwidth = 2 * big.nbytes / milliseconds(lambda a=big, b=other: b.copy_(a)) * 1e3
    report.measured("copy on the device", f"{bandwidth / 1e12:.2f} TB/s", bytes_per_second=bandwidth)
    del big, other
    for length in rows:
        for op, (arguments, nbytes) in seam_arguments(length).items():
            fused = BACKEND.fused_ops()[op][0]
            plain = milliseconds(lambda op=op, a=arguments: PLAIN[op](*a))
            ours = milliseconds(lambda fused=fused, a=arguments: fused.run(*a))
            floor = nbytes / bandwidth * 1e3
            text = f"plain {plain:.3f} ms, fused {ours:.3f}, floor {floor:.3f}"
            for format, run in fused.quantized.items():
                text += f", to {format} {milliseconds(lambda run=run, a=arguments: run(*a)):.3f}"
            report.measured(f"{op} {length}", text, plain_ms=plain, ms=ours, floor_ms=floor)
        x = torch.randn(length, FFN, device="cuda", dtype=torch.bfloat16)
        ours = milliseconds(lambda x=x: fusions.quantize_rows(x, FORMATS["fp8_row"]))
        report.measured(
            f"quantize_rows {length} x {FFN}", f"{ours:.3f} ms, floor {x.nbytes * 1.5 / bandwidth * 1e3:.3f}"
        )


def ceilings(length: int) -> dict[str, float]:
    """Milliseconds of a block's products and of its fastest exact attention, alone: by dtype or format."""
    return {name: sum(milliseconds(call) for call in calls) for name, calls in _parts(length).items()}


def step_ceiling(length: int, format: str) -> float:
    """Milliseconds of the products and the attention of all blocks, one after the other and nothing between.

    Again and again for seconds, since a device under load runs slower than for one product.
    """
    calls = _parts(length)[format]

    def step() -> None:
        for _ in range(CONFIG.num_layers):
            for call in calls:
                call()

    return milliseconds(step, repeats=6, warm_up=6)


def _parts(length: int) -> dict[str, list[Callable[[], Tensor]]]:
    """The attention and the four products of a block, by dtype or format, on inputs in the format."""
    q, k, v = torch.randn(3, 1, length, CONFIG.num_attention_heads, 128, device="cuda", dtype=torch.bfloat16)
    kernel = next(k for k in serving(length) if k.exact)
    found: dict[str, list[Callable[[], Tensor]]] = {
        name: [lambda: kernel.run(q, k, v, NO_MASK, scale=128**-0.5)] for name in ("bfloat16", *BLOCK_FORMATS)
    }
    for inputs, outputs in PRODUCTS.values():
        x = torch.randn(length, inputs, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
        found["bfloat16"].append(partial(F.linear, x, weight))
        for format in BLOCK_FORMATS:
            product = BACKEND.linear_kernels()[format][0]
            packed = product.pack(encode(weight, format), torch.bfloat16)
            given = *product.quantize_input(x), packed, None, torch.bfloat16
            found[format].append(partial(product.apply_quantized, *given))
    return found


def blocks(report: Report, rows: list[int]) -> None:
    """One block of H3-Image in each stage of the work, over the ceiling of its products and attention."""
    for length in rows:
        ceiling = ceilings(length)
        report.measured(
            f"ceiling {length}", ", ".join(f"{n} {ms:.2f} ms" for n, ms in ceiling.items()), **ceiling
        )
        variants = (
            ("bfloat16, plain seams", None, {"fused": False}),
            ("bfloat16, fused", None, {}),
            ("fp8_row, plain seams", "fp8_row", {"fused": False}),
            ("fp8_row, fused", "fp8_row", {"hand_over": False}),
            ("fp8_row, fused, handed over", "fp8_row", {}),
            ("int8_row, fused, handed over", "int8_row", {}),
            ("int8_row_rotated, fused", "int8_row_rotated", {}),
        )
        outputs: dict[str, Tensor] = {}
        for name, format, options in variants:
            modules, x, tail = make_blocks(1, length, format=format, **options)
            ms = milliseconds(lambda b=modules[0], x=x, t=tail: b(x, *t))
            least = ceiling[format or "bfloat16"]
            report.measured(f"block {length} {name}", f"{ms:.2f} ms, {ms / least:.3f} of the ceiling", ms=ms)
            with torch.inference_mode():
                outputs[name] = modules[0](x, *tail)
                if name.endswith("handed over") and length == rows[0]:
                    replay = BACKEND.graph(lambda x, b=modules[0], t=tail: b(x, *t), [x])
                    if replay is not None:
                        ms = milliseconds(lambda replay=replay, x=x: replay(x))
                        report.measured(f"block {length} {name}, graph", f"{ms:.2f} ms", ms=ms)
            del modules
            gc.collect()
        for name in (name for name, format, _ in variants if format and "fused" in name):
            branch = (outputs[name] - outputs["bfloat16, fused"]).float().norm()
            change = (outputs["bfloat16, fused"] - x).float().norm()
            report.measured(f"branch error {length} {name}", f"{(branch / change).item():.4f}")
        same = torch.equal(outputs["fp8_row, fused"], outputs["fp8_row, fused, handed over"])
        report.check(f"handing over changes no bit {length}", same)


def layerwise(report: Report) -> None:
    """Streamed blocks give the bits of resident ones, and copies run beside the computation."""
    count, length = 6, 4416
    device = BACKEND.devices()[0]
    modules, x, tail = make_blocks(count, length, format="fp8_row")

    def run() -> Tensor:
        out = x
        for block in modules:
            out = block(out, *tail)
        return out

    with torch.inference_mode():
        resident = run()
    compute = milliseconds(run, repeats=7)
    streamed = offload(modules, 0, BACKEND, device)
    BACKEND.trim(device)
    with torch.inference_mode():
        report.check("streamed blocks, same bits", torch.equal(run(), resident))
    total = milliseconds(run, repeats=7)
    source = BACKEND.host_buffer(1 << 30)
    target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    rate = source.nbytes / milliseconds(lambda: target.copy_(source, non_blocking=True), repeats=5)
    copies = streamed.host_bytes / rate
    longer = max(compute, copies)
    text = f"compute {compute:.1f} ms, copies {copies:.1f}, together {total:.1f}: {longer / total:.0%}"
    report.measured("layerwise offload", text, compute_ms=compute, copies_ms=copies, total_ms=total)
    report.check("overlap of 85 %", longer / total >= 0.85, f"{longer / total:.0%}")
    streamed.remove()


def serving(length: int) -> list[AttentionKernel]:
    """Kernels that accept H3-Image's attention here, best first."""
    device = BACKEND.devices()[0]
    capabilities = BACKEND.capabilities(device)
    request = AttentionRequest(
        "bfloat16", 128, CONFIG.num_attention_heads, CONFIG.num_attention_heads, length
    )
    return [k for k in BACKEND.attention_kernels() if k.check(request, capabilities) is None]


def make_inputs(length: int) -> tuple[torch.Generator, Tensor, tuple[ops.Modulation, ops.Rotary, Any]]:
    """Hidden rows [1, S, C] and the further arguments of a block, the same at every call."""
    generator = torch.Generator("cuda").manual_seed(length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    index = torch.randint(0, 18, (1, length), generator=generator, device="cuda")
    angles = draw(1, length, PAIRS).float()
    rotary = ops.Rotary(angles.cos().bfloat16(), angles.sin().bfloat16())
    return (
        generator,
        draw(1, length, WIDTH),
        (ops.Modulation(draw(18, 6, WIDTH) * 0.1, index), rotary, NO_MASK),
    )


def make_blocks(
    count: int, length: int, *, format: str | None = None, fused: bool = True, hand_over: bool = True
) -> tuple[list[Block], Tensor, tuple[Any, ...]]:
    """Full-size blocks with random weights on the device, quantised and bound, and their arguments."""
    with torch.device("meta"):
        net = nn.Module()
        net.blocks = nn.ModuleList(Block(CONFIG) for _ in range(count))
    for block in net.blocks:
        block.adaln_proj = None
    net.to(torch.bfloat16).requires_grad_(False)
    sizes = {name: m.weight.shape for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    if format is not None:
        kernel_id = BACKEND.linear_kernels()[format][0].id
        quantize(net, format=format, keep=(), backend=BACKEND, kernel_id=kernel_id)
    net.to_empty(device="cuda")
    generator, x, tail = make_inputs(length)
    for name, module in net.named_modules():
        if name in sizes:
            weight = torch.randn(sizes[name], generator=generator, device="cuda", dtype=torch.bfloat16)
            weight *= sizes[name][1] ** -0.5
            if isinstance(module, QuantizedLinear):
                module.accept_weight(weight)
            else:
                module.weight.data = weight
        elif isinstance(getattr(module, "weight", None), nn.Parameter):
            module.weight.data.fill_(1.0)
    choices = {"attention": next(k.id for k in serving(length) if k.exact)}
    if fused:
        choices |= dict.fromkeys(PLAIN, "triton")
    bind(net, BACKEND, choices, producers=PRODUCERS if hand_over else ())
    return list(net.blocks), x, tail
