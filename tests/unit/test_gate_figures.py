"""docs/h3-mini.md says what the stored figures say, and those are of the weights that ship."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training.shipped import FIGURES, PAGE, ROOT, weights_digest
from training.tables import filled, gate_table, read_log, record_run, sections


def test_the_page_says_what_the_figures_say() -> None:
    page = PAGE.read_text()
    assert filled(page, sections(FIGURES)) == page, "run `python -m training.tables`"


@pytest.mark.parametrize("name", ["report-256", "report-512", "training", "precision"])
def test_figures_are_of_the_shipped_weights(name: str) -> None:
    stored = json.loads((FIGURES / f"{name}.json").read_text())
    assert stored["weights"] == weights_digest(), "new weights: run `make release-h3-mini RUN=folder`"


def test_a_missed_gate_is_told_in_bold_and_counted() -> None:
    score = {"value": 0.5, "low": 0.4, "high": 0.6, "count": 64}
    gates = [
        {
            "name": "edit/style/attribute",
            "score": score,
            "threshold": 0.75,
            "unit": "%",
            "passed": False,
            "hint": "clear",
        },
        {
            "name": "t2i/style",
            "score": score,
            "threshold": 0.25,
            "unit": "%",
            "passed": True,
            "hint": "clear",
        },
    ]
    table = gate_table({"gates": gates, "weights": "0" * 16}, None)
    assert "| edit: style: attribute | 75.0 % | 50.0 % | 40.0 to 60.0 | 64 | **misses**, clear |" in table
    assert "| style | 25.0 % | 50.0 % | 40.0 to 60.0 | 64 | holds |" in table
    assert "1 of 2 gates hold" in table


VAE_LOG = """\
23:59:30 vae: 389 s of 1114 s
23:59:50 vae  10.0 s  50%  step 100  0.010 M  2206/s  l1 0.27
00:00:20 vae  20.0 s 100%  step 200  0.020 M  2206/s  l1 0.27
00:00:21 vae eval at 0.020 M: {"256": {"psnr": 34.0, "psnr_worst": 28.0, "border_ratio": 1.2}}
"""
MIXED_LOG = "10:00:00 mixed   5.0 s 100%  step 50  0.5 M  7278/s\n10:01:00 chain finished\n"


def make_run(folder: Path, log: str) -> Path:
    folder.mkdir()
    (folder / "log.txt").write_text(log)
    scores = {"t2i/style": {"value": 0.5}, "t2i/other": {"value": 0.1}}
    entry = {"stage": "vae", "samples_m": 0.02, "size": 256, "report": {"scores": scores}}
    (folder / "curve.jsonl").write_text(json.dumps(entry) + "\n")
    for size in (256, 512):
        (folder / f"report-{size}.json").write_text("{}")
    return folder


def test_a_log_over_midnight_gives_the_last_line_of_each_stage_and_what_the_vae_reached(
    tmp_path: Path,
) -> None:
    found = read_log(make_run(tmp_path / "run", VAE_LOG))
    assert found["wall_seconds"] == 51
    assert found["stages"] == {"vae": {"seconds": 20.0, "steps": 200, "samples_m": 0.02}}
    assert found["vae"]["256"]["border_ratio"] == 1.2
    assert found["curve"] == [{"stage": "vae", "samples_m": 0.02, "size": 256, "scores": {"t2i/style": 0.5}}]


def test_a_run_without_a_vae_stage_stands_behind_the_one_whose_weights_it_trained_further(
    tmp_path: Path,
) -> None:
    first, further = make_run(tmp_path / "a", VAE_LOG), make_run(tmp_path / "b", MIXED_LOG)
    counts = []
    for run in (first, further, further, first):
        record_run(run, tmp_path / "figures")
        counts.append(len(json.loads((tmp_path / "figures" / "training.json").read_text())["runs"]))
    assert counts == [1, 2, 2, 1]


def test_a_page_that_lost_a_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="no marker <!-- curve -->"):
        filled("<!-- gates -->\nold\n<!-- /gates -->\n", {"gates": "new", "curve": "new"})


def test_text_outside_the_markers_is_left_alone() -> None:
    page = "before\n<!-- gates -->\nold\nlines\n<!-- /gates -->\nafter\n"
    assert filled(page, {"gates": "new"}) == "before\n<!-- gates -->\nnew\n<!-- /gates -->\nafter\n"


def test_every_picture_of_the_docs_is_there_and_small() -> None:
    images = sorted((ROOT / "docs" / "images").iterdir())
    assert all(
        f"images/{path.name}" in PAGE.read_text() for path in images if path.name.startswith("h3-mini")
    )
    assert max(path.stat().st_size for path in images) <= 400_000
    assert sum(path.stat().st_size for path in images) <= 2_000_000
