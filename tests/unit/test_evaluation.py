"""Suites, scores and reports of an evaluation; the passes themselves are in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from portable_dit.errors import UserError
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
        ("name: a\ngate: 2\ntypes: {x: [{prompt: p}]}\n", "gate"),
        ("name: a\nrubrik: r\ntypes: {x: [{prompt: p}]}\n", "rubrik"),
        ("name: a\ntypes: {x: [{prompt: p, references: [none.png]}]}\n", "none.png"),
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
        (["--suite", "s.yaml"], "give one or both"),
        (["--suite", "s.yaml", "--server", "http://127.0.0.1:1"], "--pictures: missing"),
        (["--server", "http://127.0.0.1:1", "--types", "a"], "in one pass"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(cli, flags, word):
    answer = cli("eval", *flags)
    assert answer.exit_code == 2
    assert word in answer.stderr
