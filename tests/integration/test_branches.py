"""Gates A and B on the shipped weights: branches and whole trajectories against float32.

docs/h3-mini.md lists what was measured, which leaves the limits some room.
"""

from __future__ import annotations

import pytest

from portable_dit.engine import Engine
from portable_dit.evaluation.builtin.cases import CASES, Cases, load_cases
from portable_dit.evaluation.builtin.scores import psnr
from portable_dit.setup import set_up
from training.branch_check import (
    FAULTS,
    LIMITS,
    SET_UPS,
    TRAJECTORY_DB,
    WORST_DB,
    Trace,
    branch_errors,
    load,
    prompts,
    trace,
    wishes,
    worst,
)
from training.paint import paint_cases

BRANCHES = ("attention", "mlp")
computes_bfloat16 = pytest.mark.skipif(
    "bfloat16" not in set_up("cpu/h3-mini").capabilities.dtypes,
    reason="this CPU has no instructions for bfloat16, and torch would emulate them",
)


@pytest.fixture(scope="module")
def cases() -> Cases:
    return load_cases(CASES)


@pytest.fixture(scope="module")
def traces(cases: Cases) -> list[Trace]:
    """The float32 reference on two requests: text alone, and an edit of one reference."""
    reference = load(SET_UPS["float32"])
    return [trace(reference, wish) for wish in wishes(cases)]


def test_the_same_weights_in_float32_give_the_same_branches(traces: list[Trace]) -> None:
    again = load(SET_UPS["float32"])
    errors = [branch_errors(seen, again) for seen in traces]
    assert len(errors[0]) == 2 * 6 * 2  # steps, blocks, branches
    assert max(worst(errors, branch) for branch in BRANCHES) <= LIMITS["float32"]


@computes_bfloat16
def test_every_branch_in_bfloat16_is_within_its_limit(traces: list[Trace]) -> None:
    errors = [branch_errors(seen, load(SET_UPS["bfloat16"])) for seen in traces]
    assert max(worst(errors, branch) for branch in BRANCHES) <= LIMITS["bfloat16"]


@pytest.mark.parametrize("format", ["int8_row", "int8_row_rotated", "fp8_row", "fp8_tensor", "mxfp8"])
def test_every_branch_with_eight_bit_weights_and_inputs_is_within_its_limit(
    format: str, traces: list[Trace]
) -> None:
    errors = [
        branch_errors(seen, load({"precision": "float32", "quantization.dit": format})) for seen in traces
    ]
    worst_branch = max(worst(errors, branch) for branch in BRANCHES)
    assert LIMITS["float32"] < worst_branch <= LIMITS["8 bits"]


@pytest.mark.parametrize("block", [0, 3, 5])
@pytest.mark.parametrize("break_it", FAULTS)
def test_an_injected_fault_fails_the_check_at_every_limit_and_in_its_place(
    break_it, block: int, traces: list[Trace]
) -> None:
    broken = load(SET_UPS["float32"])
    break_it(broken, block)
    for seen in traces:
        for where, error in branch_errors(seen, broken).items():
            if where[1:] == (block, "attention"):
                assert error > 3 * LIMITS["8 bits"], where
            else:
                assert error <= LIMITS["float32"], where


@computes_bfloat16
def test_whole_pictures_in_bfloat16_stay_close_to_float32(cases: Cases) -> None:
    some = prompts(cases)[::2]
    with Engine.load("cpu/h3-mini", {"precision": "float32"}) as exact:
        expected = paint_cases(exact, some, size=256)
    with Engine.load("cpu/h3-mini", {"precision": "bfloat16"}) as rounded:
        distance = psnr(paint_cases(rounded, some, size=256), expected)
    assert distance.mean() >= TRAJECTORY_DB
    assert distance.min() >= WORST_DB
