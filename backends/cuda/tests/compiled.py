"""Compiles the Triton kernels for a chip that is not here and prints those that do not, one line each.

    python compiled.py 90 100

What the interpreter lets pass (types, casts that a chip lacks) fails here. Sizes are those of H3-Image.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import triton
from portable_dit_cuda import triton_experts, triton_heads, triton_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HALF, E4M3, INT8, FLOAT, INT32, INT64, BYTE = "*bf16", "*fp8e4nv", "*i8", "*fp32", "*i32", "*i64", "*u8"
POINTERS = {
    "x_ptr": HALF,
    "branch_ptr": HALF,
    "weight_ptr": HALF,
    "table_ptr": HALF,
    "cos_ptr": HALF,
    "sin_ptr": HALF,
    "bias_ptr": HALF,
    "index_ptr": INT64,
    "places_ptr": INT64,
    "ends_ptr": INT32,
    "expert_ptr": INT32,
    "first_ptr": INT32,
    "count_ptr": INT32,
    "shares_ptr": FLOAT,
    "sums_ptr": INT32,
    "row_scales_ptr": FLOAT,
    "column_scales_ptr": FLOAT,
    "scales_ptr": FLOAT,
    "out_ptr": HALF,
    "values_ptr": E4M3,
}
SCALARS = {"eps": "fp32", "largest": "fp32"}
NORM = {"HAS_WEIGHT": True, "MODULATE": True, "QUANTIZE": True, "IS_INT8": False, "PIECES": 6, "PIECE": 1024}


def _descriptor(rows: int) -> str:
    return f"tensordesc<fp8e4nv[{rows}, 128]>"


TILES = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 128, "BAND": 8, "PROGRAMS": 132}
ROW = {"PIECES": 7, "PIECE": 1024}
WIDE = {"PIECES": 7, "PIECE": 2048}
TURN = {"TURNS": 4, "HEADS": 2, "GROUPS": 8, "GROUP": 16}
DEALT = {"BINS": 128, "BLOCK": 256}
HEADS = {"GROUP": 4, "ROWS": 64, "BLOCK": 128}
# kernel, compile-time numbers, warps, pointers of another type
VARIANTS = (
    ("quantize_rows", {"IS_GIVEN": False, "IS_INT8": False, **ROW}, 4, {"amax_ptr": HALF}),
    ("quantize_rows", {"IS_GIVEN": True, "IS_INT8": True, **ROW}, 4, {"values_ptr": INT8, "amax_ptr": FLOAT}),
    ("largest_of_rows", ROW, 4, {"amax_ptr": FLOAT}),
    ("norm_modulate", NORM, 4, {"out_ptr": E4M3}),
    ("norm_modulate", {**NORM, "IS_INT8": True}, 4, {"out_ptr": INT8}),
    ("norm_modulate", {**NORM, "QUANTIZE": False}, 4, {}),
    ("norm_modulate", {**NORM, "QUANTIZE": False, "MODULATE": False}, 4, {"index_ptr": HALF}),
    ("largest_of_heads", HEADS, 4, {"largest_ptr": FLOAT}),
    ("quantize_heads", HEADS, 4, {"largest_ptr": FLOAT}),
    (
        "norm_modulate",
        {**NORM, "QUANTIZE": False, "MODULATE": False},
        4,
        {"index_ptr": HALF, "x_ptr": FLOAT, "weight_ptr": FLOAT},
    ),
    ("moments", {"PIECE": 16384, "BLOCK": 1024}, 4, {"means_ptr": FLOAT, "squares_ptr": FLOAT}),
    ("normed", {"ACTIVATE": True, "BLOCK": 1024}, 4, {"mean_ptr": FLOAT, "factor_ptr": FLOAT}),
    ("scaled_residual", {"BLOCK": 1024}, 4, {"x_ptr": FLOAT, "scale_ptr": FLOAT, "out_ptr": FLOAT}),
    ("swiglu", {"BLOCK": 1024}, 4, {}),
    ("swiglu_quantize", {"IS_INT8": False, **WIDE}, 16, {}),
    ("swiglu_quantize", {"IS_INT8": True, **WIDE}, 16, {"values_ptr": INT8}),
    ("gated_residual", {"BLOCK": 1024}, 4, {}),
    ("head_norm_rotary", {"HAS_WEIGHT": True, "ROTATE": True, **TURN}, 1, {}),
    ("head_norm_rotary", {"HAS_WEIGHT": False, "ROTATE": False, **TURN}, 1, {}),
    ("rotary_head_norm", {"TURNS": 4, "HEADS": 4, "HALF": 64}, 1, {"cos_ptr": FLOAT, "sin_ptr": FLOAT}),
    ("grouped_product", TILES, 8, {"rows": _descriptor(128), "weights": _descriptor(256)}),
    ("combine_rows", {"CHOICES": 8, "BLOCK": 1024}, 4, {}),
    ("count_choices", DEALT, 4, {"starts_ptr": INT32}),
    ("place_blocks", {"BINS": 128, "ROWS": 64, "TURNS": 3}, 4, {"starts_ptr": INT32}),
    ("deal_choices", DEALT, 4, {"starts_ptr": INT32, "rows_ptr": INT64}),
    ("scale_sums", {"HAS_BIAS": True, "BLOCK": 1024}, 4, {}),
    *(
        ("dequantize", {"BLOCK_ROWS": r, "BLOCK_COLUMNS": c, "IS_E8M0": c == 32, "BLOCK": 1024}, 4, other)
        for r, c, other in (
            (1, 0, {}),
            (1, 0, {"values_ptr": INT8}),
            (0, 0, {}),
            (128, 128, {}),
            (1, 32, {"scales_ptr": BYTE}),
        )
    ),
    ("quantize_blocks_of_32", {"BLOCKS": 32}, 4, {"scales_ptr": BYTE}),
    ("quantize_blocks_of_128", {"BLOCKS": 8}, 4, {}),
)


def compiled(name: str, constants: dict[str, int], warps: int, other: dict[str, str], chip: int) -> object:
    """One kernel as machine code, with sizes and addresses that are multiples of 16, as they are in use."""
    kernel = next(
        getattr(m, name) for m in (triton_kernels, triton_heads, triton_experts) if hasattr(m, name)
    )
    types = {**POINTERS, **SCALARS, **other, **dict.fromkeys(constants, "constexpr")}
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    aligned = [i for i, a in enumerate(kernel.arg_names) if signature[a].startswith(("*", "i32"))]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(kernel.arg_names.index(n),): value for n, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", chip, 32), options={"num_warps": warps})


def fault(variant: tuple[str, dict[str, int], int, dict[str, str]], chip: int) -> str | None:
    """Why a kernel does not compile, or None."""
    try:
        compiled(*variant, chip)
    except Exception as error:  # noqa: BLE001 - each kernel is to be named
        return f"sm_{chip} {variant[:2]}: {type(error).__name__}: {str(error)[:300]}"
    return None


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        for each in VARIANTS:
            reason = fault(each, number)
            if reason is not None:
                print(reason)
    print("done")
