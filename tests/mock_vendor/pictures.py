"""Pictures drawn on a mocked machine, next to those of the host's own processor.

The rule is the conformance suite's: against the picture in float32 on the host, a device may be off by twice
as much as the host itself at that precision and format.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mock_vendor.process import MockedMachine

PROMPT = "a red apple"
EXACT = {"precision": "float32"}
ROUNDING = 0.5  # levels of 255, root mean square: pixels on the edge between two levels
SIZES: Mapping[str, str] = {"h3-mini": "256x256", "h3-image": "64x64", "hunyuan-image-3": "128x512"}
STEPS: Mapping[str, int] = {"hunyuan-image-3": 4}  # the others are distilled for a number of their own


def write_tiny(model: str, folder: Path) -> Path:
    """A checkpoint of random weights in the real layout of that model, small enough to draw in a blink."""
    if model == "h3-image":
        from portable_dit.models.h3_image.random_checkpoint import write_random

        write_random(folder, config="tiny", dialect="original", seed=0)
    else:
        from portable_dit.models.hunyuan_image_3.random_checkpoint import write_random

        write_random(folder, config="tiny", dialect="instruct", seed=0)
    return folder


def assert_draws_as_the_host(
    machine: MockedMachine,
    *,
    model: str = "h3-mini",
    weights: Path | None = None,
    source: Path | None = None,
    **wishes: str,
) -> dict[str, Any]:
    """One picture by `portable-dit run`; gives what `--json` said. wishes: recipe keys, with __ for a dot."""
    keys = _keys(machine, wishes, model, weights)
    out = machine.folder / f"picture-{len(list(machine.folder.iterdir()))}.png"
    settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    steps = ("--num-inference-steps", str(STEPS[model])) if model in STEPS else ()
    what = "--size", SIZES[model], "--prompt", PROMPT, "-o", out, "--json"
    done = machine.command("run", *settings, *what, *steps, source=source)
    assert done.returncode == 0, done.stderr[-3000:]
    _assert_near(out, keys)
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def assert_all_draw_as_the_host(
    machine: MockedMachine,
    wishes: Sequence[Mapping[str, str]],
    *,
    models: Mapping[str, Path] | None = None,
    models_wish: Mapping[str, str] = EXACT,
) -> list[dict[str, Any]]:
    """A picture for each of the wishes in one process on the machine; gives kernels and notes of each.

    models: more pictures, of these checkpoints by model. models_wish: what is wished for with those.
    """
    work = [_keys(machine, wish, "h3-mini", None) for wish in wishes]
    work += [_keys(machine, models_wish, model, weights) for model, weights in (models or {}).items()]
    pictures = [machine.folder / f"picture-{number}.png" for number in range(len(work))]
    tries = [
        {"keys": keys, "size": SIZES[keys["model"]], "out": str(out)}
        for keys, out in zip(work, pictures, strict=True)
    ]
    file = machine.folder / "pictures.json"
    file.write_text(json.dumps(tries))
    done = machine.python("-m", "mock_vendor.pictures", file)
    assert done.returncode == 0, done.stderr[-3000:]
    for keys, out in zip(work, pictures, strict=True):
        _assert_near(out, keys)
    said: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return said


def _keys(
    machine: MockedMachine, wishes: Mapping[str, str], model: str, weights: Path | None
) -> dict[str, str]:
    named = {key.replace("__", "."): value for key, value in wishes.items()}
    where = {} if weights is None else {"weights": str(weights)}
    return {"model": model, "device.backend": machine.name, **where, **named}


def _assert_near(out: Path, keys: Mapping[str, str]) -> None:
    subject = {k: v for k, v in keys.items() if k in ("model", "weights")}
    exact = _host_picture(subject | EXACT)
    same = {k: v for k, v in keys.items() if k in ("precision", "quantization.dit")}
    bound = max(2 * distance(_host_picture(subject | same), exact), ROUNDING)
    found = distance(np.asarray(Image.open(out).convert("RGB")), exact)
    assert found <= bound, f"{keys}: {found:.2f} levels from the host's picture, the bound is {bound:.2f}"


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square of the difference, in levels of 255."""
    return float(np.sqrt(np.mean((a.astype(float) - b.astype(float)) ** 2)))


def _host_picture(keys: Mapping[str, str]) -> np.ndarray:
    return _drawn_on_the_host(tuple(sorted(keys.items())))


@cache
def _drawn_on_the_host(keys: tuple[tuple[str, str], ...]) -> np.ndarray:
    """The picture of these recipe keys on the host's own processor: uint8 [H, W, 3]."""
    return draw({"device.backend": "cpu", **dict(keys)}, SIZES[dict(keys)["model"]]).images[0].pixels


def draw(keys: Mapping[str, str], size: str) -> Any:
    """The engine's result for recipe keys, in this process."""
    from portable_dit import Engine, Request

    width, height = (int(side) for side in size.split("x"))
    request = Request(PROMPT, size=(width, height), steps=STEPS.get(keys["model"]))
    values = {key: {"true": True, "false": False}.get(value, value) for key, value in keys.items()}
    with Engine.load("cpu/h3-mini", values) as engine:
        return engine.generate(request)


def _draw_all(tries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    said = []
    for one in tries:
        result = draw(one["keys"], one["size"])
        Image.fromarray(result.images[0].pixels).save(one["out"])
        kernels = {component: dict(ops) for component, ops in result.kernels.items()}
        said.append({"kernels": kernels, "notes": [*result.notes, *result.changes]})
    return said


if __name__ == "__main__":
    print(json.dumps(_draw_all(json.loads(Path(sys.argv[1]).read_text()))))
