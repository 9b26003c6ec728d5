"""What must hold on the device: conformance, bits, graphs, copies, limits. Called by on_device.py."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import torch
from portable_dit_cuda import CudaBackend, fusions
from portable_dit_cuda import linear as products
from portable_dit_cuda.probe import probe_libraries
from portable_dit_cuda.swizzle import swizzle

from portable_dit.conformance.attention import check_attention
from portable_dit.conformance.experts import check_expert_seams, check_experts
from portable_dit.conformance.fused import CASES, SEAMS, check_fused
from portable_dit.conformance.linear import check_linear
from portable_dit.conformance.outcome import Outcome
from portable_dit.formats import FORMATS, QUANTIZED, decode, encode, quantize_blocks
from portable_dit.masks import NO_MASK
from portable_dit.piecewise import ChunkedAttention

if TYPE_CHECKING:
    from on_device import Report

BACKEND = CudaBackend()
GIB = 2**30


def identity(report: Report) -> None:
    """Detection is cheap and free of side effects; memory and the probes say what is true."""
    start = time.perf_counter()
    found = BACKEND.devices()
    seconds = time.perf_counter() - start
    report.check("a device is found", bool(found), BACKEND.absence() or f"{len(found)} in {seconds:.3f} s")
    again = BACKEND.devices()
    report.check("twice the same", found == again)
    device = found[0]
    index = device.index
    by_nvml = device.driver is not None
    report.check("no context is made", not (by_nvml and torch.cuda.is_initialized()), f"nvml {by_nvml}")
    properties = torch.cuda.get_device_properties(index)
    name = f"sm_{properties.major}{properties.minor}"
    report.check(
        "name and arch are CUDA's", (device.name, device.arch) == (properties.name, name), str(device)
    )
    before = torch.cuda.mem_get_info(index)[0]
    torch.zeros(1, device="cuda")
    torch.randn(64, 64, device="cuda") @ torch.randn(64, 64, device="cuda")
    torch.cuda.synchronize()
    runtime = properties.total_memory - torch.cuda.mem_get_info(index)[0] - torch.cuda.memory_reserved()
    report.measured(
        "runtime bytes", f"{runtime / 2**20:.0f} MiB (free before {before / GIB:.1f} GiB)", bytes=runtime
    )
    start = time.perf_counter()
    capabilities = BACKEND.capabilities(device)
    report.measured("probing all libraries", f"{time.perf_counter() - start:.1f} s")
    for library, probe in probe_libraries(index, (properties.major, properties.minor)).items():
        report.measured(f"library {library}", probe.version or str(probe.reason))
    report.measured("native formats", ", ".join(sorted(capabilities.native_formats)))
    free, total = BACKEND.memory(device) or (0, 0)
    held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    less = (BACKEND.memory(device) or (0, 0))[0]
    report.check(
        "memory falls by what is held", 0 <= free - less - held.nbytes < 64 << 20, f"{less} of {total}"
    )
    del held
    BACKEND.trim(device)


def conformance(report: Report) -> None:
    """Every kernel on every case that it claims."""
    device = BACKEND.devices()[0]
    BACKEND.activate(device)
    capabilities = BACKEND.capabilities(device)
    with torch.inference_mode():
        for kernel in BACKEND.attention_kernels():
            for dtype in ("bfloat16", "float16", "float32"):
                found = check_attention(kernel, BACKEND, device, capabilities, dtype)
                _sum_up(report, f"attention {kernel.id} {dtype}", found)
        for format, kernels in BACKEND.linear_kernels().items():
            for linear in kernels:
                found = check_linear(linear, BACKEND, device, capabilities, "bfloat16")
                _sum_up(report, f"{format} {linear.id}", found)
        for format, grouped in BACKEND.expert_kernels().items():
            for experts in grouped:
                found = check_experts(experts, BACKEND, device, capabilities, "bfloat16")
                _sum_up(report, f"experts {format} {experts.id}", found)
        for ops in BACKEND.fused_ops().values():
            for op in ops:
                for dtype in ("bfloat16", "float16"):
                    found = check_fused(op, BACKEND, device, capabilities, dtype)
                    found = found or check_expert_seams(op, BACKEND, device, capabilities, dtype)
                    _sum_up(report, f"{op.op} {dtype}", found)
        _long_attention(report, capabilities)


def _sum_up(report: Report, name: str, outcomes: list[Outcome]) -> None:
    claimed = [o for o in outcomes if o.status != "not_claimed"]
    if not claimed:
        report.measured(name, f"not claimed: {outcomes[0].detail[:60]}")
        return
    failed = [o for o in claimed if o.status == "fail"]
    worst = max(o.error or 0.0 for o in claimed)
    detail = "; ".join(f"{o.case}: {o.detail}" for o in failed)[:300]
    text = f"{len(claimed) - len(failed)}/{len(claimed)}, worst error {worst:.1e} {detail}"
    report.check(name, not failed, text, outcomes=[o.as_dict() for o in outcomes])


def _long_attention(report: Report, capabilities: object) -> None:
    """At the length of a 4096x4096 picture, all exact kernels against float32 in the open."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = torch.randn(3, 1, 16800, 4, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    wanted = ChunkedAttention().run(q, k, v, NO_MASK, scale=128**-0.5).float()
    from portable_dit.capabilities import AttentionRequest

    for kernel in BACKEND.attention_kernels():
        if kernel.check(AttentionRequest("bfloat16", 128, 4, 4, 16800), capabilities) is not None:  # type: ignore[arg-type]
            continue
        error = _relative(kernel.run(q, k, v, NO_MASK, scale=128**-0.5), wanted)
        limit = 0.01 if kernel.exact else 0.2
        report.check(f"16800 rows, {kernel.id}", error < limit, f"error {error:.1e}", error=error)
        large = kernel.run(q * 30, k * 30, v, NO_MASK, scale=128**-0.5)
        report.check(f"scores of 1e4, {kernel.id}", bool(torch.isfinite(large).all()))


def bits(report: Report) -> None:
    """Triton's quantisers, producers and weight expansion give the bits of the plain functions."""
    generator = torch.Generator("cuda").manual_seed(1)
    x = (
        torch.randn(333, 5376, generator=generator, device="cuda")
        * torch.logspace(-6, 4, 333, device="cuda")[:, None]
    )
    x = x.bfloat16()
    x[3] = 0
    for name in fusions.ROW_FORMATS:
        form = FORMATS[name]
        got, wanted = fusions.quantize_rows(x, form), quantize_blocks(x.float(), form, (1, 0))
        report.check(
            f"rows in {name}", _same(got[0], wanted[0]) and _same(got[1], wanted[1]), _differ(got, wanted)
        )
        _producers(report, name)
    _at_full_size(report)
    got = products.quantize_blocks_of_32(x, FORMATS["mxfp8"])
    wanted = quantize_blocks(x.float(), FORMATS["mxfp8"], (1, 32))
    wanted = wanted[0], swizzle(wanted[1])
    report.check("blocks of 32", _same(got[0], wanted[0]) and _same(got[1], wanted[1]), _differ(got, wanted))
    kernel = products.Fp8Block128Linear()
    got, wanted = kernel.quantize_input(x), quantize_blocks(x.float(), kernel.format, (1, 128))
    report.check("blocks of 128", _same(got[0], wanted[0]) and _same(got[1], wanted[1]), _differ(got, wanted))
    for name in QUANTIZED:
        weight = encode(torch.randn(512, 640, generator=generator, device="cuda"), name)
        expanded = products.DequantizedLinear(name)
        got_weight = expanded.weight(expanded.pack(weight, torch.bfloat16), torch.bfloat16)
        report.check(f"weights of {name}", torch.equal(got_weight, decode(weight, torch.bfloat16)))


def _producers(report: Report, name: str) -> None:
    form = FORMATS[name]
    arguments = tuple(_on_device(a) for a in SEAMS["norm_modulate"].inputs(CASES[3]))
    rows = fusions.norm_modulate_quantized(*arguments, form=form)
    wanted = quantize_blocks(fusions.norm_modulate(*arguments).flatten(0, 1).float(), form, (1, 0))
    report.check(
        f"norm_modulate to {name}",
        _same(rows.values, wanted[0]) and _same(rows.scales, wanted[1]),
        _differ((rows.values, rows.scales), wanted),
    )
    x = torch.randn(65, 28672, device="cuda", dtype=torch.bfloat16)
    rows = fusions.swiglu_quantized(x, form=form)
    wanted = quantize_blocks(fusions.swiglu(x).float(), form, (1, 0))
    report.check(
        f"swiglu to {name}",
        _same(rows.values, wanted[0]) and _same(rows.scales, wanted[1]),
        _differ((rows.values, rows.scales), wanted),
    )


def _at_full_size(report: Report) -> None:
    """A producer that quantises against itself and `quantize_rows` after it, at a block's own sizes."""
    from device_bench import seam_arguments

    arguments = seam_arguments(4416)
    pairs = {
        "norm_modulate": (fusions.norm_modulate, fusions.norm_modulate_quantized),
        "swiglu": (fusions.swiglu, fusions.swiglu_quantized),
    }
    for name, (plain, quantized) in pairs.items():
        given = arguments[name][0]
        for format in fusions.ROW_FORMATS:
            form = FORMATS[format]
            rows = quantized(*given, form=form)
            wanted = fusions.quantize_rows(plain(*given).flatten(0, 1), form)
            report.check(
                f"{name} to {format}, full size",
                _same(rows.values, wanted[0]) and _same(rows.scales, wanted[1]),
                _differ((rows.values, rows.scales), wanted),
            )


def graphs(report: Report) -> None:
    """Replay equals eager bit for bit; what it returned stays; failure leaves the device usable."""
    from device_bench import make_blocks

    for format in (None, "fp8_row"):
        block, inputs, tail = make_blocks(1, 513, format=format)
        for inference in (True, False):
            with torch.inference_mode(inference), torch.no_grad():
                replay = BACKEND.graph(lambda x, b=block[0], t=tail: b(x, *t), [inputs])
                name = f"{format or 'bfloat16'}, inference mode {inference}"
                if replay is None:
                    report.check(f"captured, {name}", False)
                    continue
                first, other = inputs.clone(), torch.randn_like(inputs)
                eager = [block[0](x, *tail) for x in (first, other)]
                kept = replay(first)
                second = replay(other)
                report.check(f"replay is eager, {name}", _same(kept, eager[0]) and _same(second, eager[1]))
    small = BACKEND.graph(lambda x: x.relu() * 2, [torch.randn(7, 5, device="cuda")])
    large = BACKEND.graph(lambda x: (x @ x).relu() + 1, [torch.randn(512, 512, device="cuda")])
    assert small is not None
    assert large is not None
    exact = True
    for _ in range(20):  # two graphs of one pool, in turn
        a, b = torch.randn(7, 5, device="cuda"), torch.randn(512, 512, device="cuda")
        outs = small(a), large(b)
        exact = exact and _same(outs[0], a.relu() * 2) and _same(outs[1], (b @ b).relu() + 1)
    report.check("two graphs share a pool", exact)
    refused = BACKEND.graph(lambda x: x * x.sum().item(), [torch.ones(4, device="cuda")])
    alive = torch.ones(4, device="cuda").sum().item() == 4.0
    after = BACKEND.graph(lambda x: x + 1, [torch.zeros(4, device="cuda")])
    report.check("a failed capture is None", refused is None and alive and after is not None)
    del small, large, after, replay
    gc.collect()


def transfer(report: Report) -> None:
    """Page-locked memory costs what was asked; copies lag, overlap and never tear."""
    device = BACKEND.devices()[0]
    size = (1 << 30) + 4096 * 3
    start = time.perf_counter()
    buffer = BACKEND.host_buffer(size)
    seconds = time.perf_counter() - start
    report.check(
        "host buffer is page-locked", buffer.is_pinned() and buffer.nbytes == size, f"{seconds:.2f} s a GiB"
    )
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    copies, compute = BACKEND.lane(device), BACKEND.compute_lane(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    copies.run(begin.record)
    copies.copy(target, buffer)
    copies.run(end.record)
    queued = time.perf_counter() - start
    BACKEND.synchronize(device)
    seconds = begin.elapsed_time(end) / 1e3
    report.check(
        "the host does not wait", queued < seconds / 4, f"{queued * 1e3:.2f} ms of {seconds * 1e3:.1f}"
    )
    report.measured("host to device", f"{size / seconds / 1e9:.1f} GB/s", bytes_per_second=size / seconds)
    sources = [BACKEND.host_buffer(8 << 20) for _ in range(4)]
    for number, source in enumerate(sources):
        source.fill_(number + 1)
    slots = [torch.zeros(8 << 20, dtype=torch.uint8, device="cuda") for _ in range(2)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(1000):
        slot = slots[turn % 2]
        copies.wait(compute.mark())
        copies.copy(slot, sources[turn % 4])
        compute.wait(copies.mark())
        wrong += (slot[:: 1 << 14] != turn % 4 + 1).sum()
    report.check("1000 loads, none torn", int(wrong) == 0)
    del buffer, sources
    gc.collect()
    again = BACKEND.host_buffer(1 << 20)
    report.check("buffers are let go", again.is_pinned())


def limits(report: Report) -> None:
    """A memory limit is met by an error, after which the device works."""
    device = BACKEND.devices()[0]
    BACKEND.trim(device)
    used = torch.cuda.memory_reserved()
    BACKEND.limit_memory(device, used + (2 << 30))
    try:
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        refused = False
    except torch.OutOfMemoryError:
        refused = True
    usable = torch.ones(8, device="cuda").sum().item() == 8.0
    total = torch.cuda.mem_get_info(device.index)[1]
    BACKEND.limit_memory(device, total)
    held = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    report.check("a limit of 2 GiB", refused and usable and held.nbytes > 0)


def _on_device(value: object) -> object:
    """An argument of a seam on the device, floats in bfloat16."""
    from portable_dit.conformance.fused import _cast, _move

    return _move(_cast(value, torch.bfloat16), "cuda")


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted).norm() / wanted.norm()).item()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, for dtypes that torch.equal does not take too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _differ(got: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> str:
    """How much of values and scales differs, as text."""
    parts = []
    for what, a, b in zip(("values", "scales"), got, wanted, strict=True):
        apart = a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)
        parts.append(f"{what} {int(apart.sum())} of {apart.numel()} bytes")
    return ", ".join(parts)
