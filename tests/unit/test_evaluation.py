"""Suites, scores and reports of an evaluation; the passes themselves are in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from portable_dit.cli.evaluate import _table
from portable_dit.errors import UserError
from portable_dit.evaluation.builtin.gates import gates_of, notes_of, verdict_of
from portable_dit.evaluation.builtin.scores import EDIT_GATES, T2I_GATES, Score
from portable_dit.evaluation.judging import Judgement, read_score
from portable_dit.evaluation.report import make_report
from portable_dit.evaluation.suite import Suite, read_suite

SUITE = """
name: two types
gate: 0.5
size: 64x64
types:
  first:
    - {prompt: one}
    - {prompt: two, seed: 9, expect: two of them}
  second:
    - {prompt: three}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    path = tmp_path / "suite.yaml"
    path.write_text(SUITE)
    return read_suite(path)


def test_a_suite_gives_its_samples_with_ids_and_seeds(suite):
    assert [(s.id, s.type, s.seed) for s in suite.samples] == [
        ("first-000", "first", 0),
        ("first-001", "first", 9),
        ("second-000", "second", 0),
    ]
    assert suite.gate == 0.5


def test_types_and_samples_can_be_chosen(tmp_path, suite):
    path = tmp_path / "suite.yaml"
    assert [s.id for s in read_suite(path, samples_per_type=1).samples] == ["first-000", "second-000"]
    assert [s.id for s in read_suite(path, types=["second"]).samples] == ["second-000"]
    with pytest.raises(UserError, match="third: not in"):
        read_suite(path, types=["third"])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("name: a\n", "types"),
        ("name: a\ntypes: {}\n", "types"),
        ("name: a\ntypes: {x: []}\n", "holds no sample"),
        ("name: a\ngate: 2\ntypes: {x: [{prompt: p}]}\n", "gate: 2 must be at most 1"),
        ("name: a\nrubrik: r\ntypes: {x: [{prompt: p}]}\n", "rubrik: unknown key. Did you mean 'rubric'"),
        ("name: a\ntypes: {x: [{prompt: p, seed: -1}]}\n", "types.x.0.seed: -1 must be at least 0"),
        ("name: a\ntypes: {x: [{prompt: p, references: [none.png]}]}\n", "none.png"),
        ("name: a\ntypes: {../x: [{prompt: p}]}\n", "types.../x: names files"),
        ("name: [", "line"),
    ],
)
def test_a_suite_with_mistakes_is_refused(tmp_path, text, word):
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=word):
        read_suite(path)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 0.5, "reason": "half"}', 0.5),
        ('Of course!\n```json\n{"reason": "all", "score": 1}\n```', 1.0),
        ('{"thought": 3} {"score": 0}', 0.0),
        ('{"score": 7}', None),
        ('{"score": "0.5"}', None),
        ('{"score": true}', None),
        ('{"score": NaN}', None),
        ("I would give it a 0.9.", None),
        ("", None),
    ],
)
def test_a_score_is_read_from_whatever_a_judge_writes_around_it(text, score):
    assert read_score(text)[0] == score


def judgement(type: str, score: float | None) -> Judgement:
    return Judgement("id", type, score, "")


def test_the_gate_is_of_the_whole_and_of_each_type(suite):
    good = make_report(suite, "j", [judgement("first", 0.9), judgement("second", 0.5)])
    assert good.passed
    assert good.overall.mean == pytest.approx(0.7)
    one_bad = make_report(suite, "j", [judgement("first", 1.0), judgement("second", 0.4)])
    assert one_bad.overall.mean == pytest.approx(0.7)
    assert not one_bad.passed


def test_a_sample_without_a_score_is_no_pass(suite):
    report = make_report(suite, "j", [judgement("first", 1.0), judgement("first", None)])
    assert (report.overall.mean, report.overall.unscored) == (1.0, 1)
    assert not report.passed
    nothing = make_report(suite, "j", [judgement("first", None)])
    assert nothing.overall.mean is None
    assert not nothing.passed


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--server: missing"),
        (["--judge", "http://127.0.0.1:1"], "belong together"),
        (["--suite", "s.yaml", "--judge", "builtin"], "belong together"),
        (["--suite", "s.yaml"], "--server and --judge: missing"),
        (["--suite", "s.yaml", "--server", "http://127.0.0.1:1"], "--judge: missing, which scores"),
        (["--suite", "s.yaml", "--judge", "http://127.0.0.1:1"], "--server: missing, which draws"),
        (["--server", "http://127.0.0.1:99999"], "not the address of a server"),
        (["--server", "http://[::1"], "not the address of a server"),
        (["--server", "http://127.0.0.1:1", "--types", "a"], "--types: not with --suite builtin"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(cli, flags, word):
    answer = cli("eval", *flags)
    assert answer.exit_code == 2
    assert word in answer.stderr


def test_a_judge_that_is_not_there_is_not_taken_for_a_server_of_ours(cli, tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text(SUITE)
    for name in ("first-000", "first-001", "second-000"):
        (tmp_path / f"{name}.png").write_bytes(b"")
    answer = cli("eval", "--suite", path, "--judge", "http://127.0.0.1:1", "--pictures", tmp_path)
    assert answer.exit_code == 1
    assert "http://127.0.0.1:1: does not answer" in answer.stderr
    assert "--judge is the address of a vision model's server" in answer.stderr
    assert "portable-dit serve" not in answer.stderr
    flags = ("--judge", "http://127.0.0.1:1", "--judge-model", "any")
    answer = cli("eval", "--suite", path, *flags, "--pictures", tmp_path)
    assert "0 samples, 3 without a score" in answer.stdout
    assert "note: second-000: the judge did not answer: http://127.0.0.1:1: does not answer" in answer.stderr
    answer = cli("eval", "--suite", path, "--server", "http://127.0.0.1:1", "--pictures", tmp_path / "new")
    assert "Start it with `portable-dit serve`" in answer.stderr


def test_where_a_report_or_pictures_cannot_be_written_is_told_before_anything_is_drawn(cli, tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text(SUITE)
    server = ("--suite", path, "--server", "http://127.0.0.1:1")
    answer = cli("eval", *server, "--pictures", path)
    assert (answer.exit_code, f"--pictures {path}: cannot be made" in answer.stderr) == (2, True)
    answer = cli("eval", *server, "--pictures", tmp_path / "p", "--report", tmp_path / "none" / "report.json")
    assert (answer.exit_code, "does not exist" in answer.stderr) == (2, True)


def test_a_verdict_of_a_part_says_so(tmp_path, suite):
    path = tmp_path / "suite.yaml"
    part = read_suite(path, samples_per_type=1)
    assert make_report(part, "j", []).as_dict()["notes"] == ("2 of the suite's 3 samples are judged",)
    assert make_report(suite, "j", []).notes == ()


def builtin_scores() -> dict[str, Score]:
    """Scores that pass every gate."""
    scores = {f"t2i/{name}": Score(1.0, 0.9, 1.0, 200) for name in T2I_GATES}
    scores |= {
        f"edit/{kind}/{part}": Score(20.0, 0, 30, 6) for kind in EDIT_GATES for part in ("gain", "attribute")
    }
    scores["edit/untouched"] = Score(1.0, 0.9, 1.0, 60)
    return scores


def outcome(name: str, scores: dict[str, Score]) -> str:
    return next(gate["outcome"] for gate in gates_of(scores) if gate["name"] == name)


def test_one_case_missed_of_so_few_that_none_may_be_leaves_a_gate_undecided():
    assert notes_of(gates_of(builtin_scores()), 60, 60) == []
    one = builtin_scores() | {"edit/remove/attribute": Score.share(torch.tensor([1.0] * 5 + [0]))}
    assert outcome("edit/remove/attribute", one) == "undecided"
    assert notes_of(gates_of(one), 60, 60) == [
        "edit/remove/attribute is undecided: 1 of 6 cases is missed, and 6 are too few for 0.9, which allows "
        "1 miss from 10 cases on"
    ]
    few, _ = notes_of(gates_of(one), 24, 60)
    assert few.startswith("24 of 60 pictures were drawn")


@pytest.mark.parametrize(
    ("right", "of", "expected"),
    [
        (4, 6, "missed"),
        (5, 6, "undecided"),
        (6, 6, "passed"),
        (8, 9, "undecided"),
        (9, 10, "passed"),
        (8, 10, "missed"),
        (0, 1, "missed"),
        (0, 2, "missed"),
        (0, 0, "missed"),
    ],
)
def test_two_cases_missed_miss_a_gate_and_so_does_none_measured(right, of, expected):
    share = Score.share(torch.tensor([1.0] * right + [0.0] * (of - right)))
    assert outcome("edit/remove/attribute", builtin_scores() | {"edit/remove/attribute": share}) == expected


def test_a_median_is_not_left_undecided():
    scores = builtin_scores() | {"edit/mirror/gain": Score(0.0, 0, 1, 1)}
    assert outcome("edit/mirror/gain", scores) == "missed"


def test_an_undecided_gate_does_not_fail_the_run_and_is_told():
    scores = builtin_scores() | {"edit/remove/attribute": Score(5 / 6, 0.4, 0.9, 6)}
    told = verdict_of(gates_of(scores), 60, 60)
    assert told["passed"]
    table = _table({"suite": "builtin", "judge": "builtin", **told})
    assert table.startswith("builtin, judged by builtin: passed, 1 of 24 gates undecided\n")
    assert "0.833 of 0.9" in table
    missed = verdict_of(gates_of(scores | {"edit/untouched": Score(0.1, 0, 1, 60)}), 60, 60)
    assert not missed["passed"]
    assert "FAILED" in _table({"suite": "builtin", "judge": "builtin", **missed})


def test_help_says_who_judges_when_nobody_is_named(cli):
    assert "builtin with --suite builtin" in " ".join(cli("eval", "--help").stdout.split())
