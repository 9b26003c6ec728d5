"""The conformance suite passes on the host's processor and finds a fault of each kind in a broken backend."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import broken_device
import pytest

from portable_dit.conformance.outcome import LONGEST, Outcome, Promises
from portable_dit.conformance.report import as_table
from portable_dit.conformance.suite import CATEGORIES, run_suite
from portable_dit.errors import BackendError

QUICK = ("identity", "attention", "rng", "transfer", "graphs", "end_to_end")


def test_the_hosts_processor_passes_and_the_three_reports_agree(cli, tmp_path):
    """Without linear and fused, whose cases test_backend.py runs; collectives have a test of their own."""
    only = [word for name in QUICK for word in ("--only", name)]
    done = cli(
        "conformance",
        "cpu",
        *only,
        "--repeats",
        "1",
        "--json",
        tmp_path / "r.json",
        "--junit",
        tmp_path / "r.xml",
    )
    assert done.exit_code == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["ok"]
    assert list(found["outcomes"]) == list(QUICK)
    for suite in ElementTree.parse(tmp_path / "r.xml").getroot():
        outcomes = found["outcomes"][suite.get("name").removeprefix("cpu.")]
        counts = [sum(o["status"] == s for o in outcomes) for s in ("fail", "not_claimed")]
        assert [int(suite.get(name)) for name in ("tests", "failures", "skipped")] == [len(outcomes), *counts]
        passed = sum(o["status"] == "pass" for o in outcomes)
        row = suite.get("name").removeprefix("cpu.")
        assert f"| {row} | {passed} | {counts[0]} | {counts[1]} |" in done.stdout
    assert "passes the conformance suite" in done.stdout
    assert "| attention | sdpa_flash | float32 |" in done.stdout


def test_two_processes_of_the_hosts_processor_exchange_what_they_should():
    report = run_suite("cpu", categories=("collectives",))
    assert report.ok, report.failures
    passed = [o.case for o in report.outcomes["collectives"] if o.status == "pass"]
    assert "all_to_all_uneven_2" in passed


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The report of the broken backend, installed for a moment."""
    import sys

    from plugin_shelf import Shelf

    folder = tmp_path_factory.mktemp("broken")
    Shelf(folder, name="broken").install("broken", broken_device.PLUGIN)
    sys.path.insert(0, str(folder))
    try:
        yield run_suite("broken", repeats=1, soak=2)
    finally:
        sys.path.remove(str(folder))


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_broken_backend_fails_in_every_category(broken, category):
    assert [o for o in broken.outcomes[category] if o.status == "fail"]


FAULTS = [
    ("identity", "import_changes_nothing"),
    ("identity", "capabilities"),
    ("attention", "own_scale"),
    ("linear", "plain"),
    ("experts", "uneven"),
    ("fused", "plain"),
    ("rng", "host_generator_is_left_alone"),
    ("transfer", "there_and_back"),
    ("transfer", "layerwise_offload"),
    ("graphs", "replay_equals_eager"),
    ("graphs", "several_in_turn"),
    ("graphs", "refused_capture"),
    ("collectives", "group_is_made_2"),
    ("end_to_end", "precision_float32"),
    ("end_to_end", "graphs"),
    ("soak", "same_pixels_no_growth"),
]


@pytest.mark.parametrize(("category", "case"), FAULTS)
def test_each_fault_is_found_where_it_is(broken, category, case):
    found = [o for o in broken.outcomes[category] if o.case == case and o.status == "fail"]
    assert found
    assert found[0].detail


def test_what_is_right_in_a_broken_backend_is_not_blamed(broken):
    plain = [o for o in broken.outcomes["attention"] if o.kernel == "plain"]
    assert {o.status for o in plain} <= {"pass", "not_claimed"}
    assert "fails" in as_table(broken).splitlines()[0]


def test_unknown_names_are_refused_with_the_near_one(cli, tmp_path):
    with pytest.raises(BackendError, match=r"'atention'.*Did you mean 'attention'"):
        run_suite("cpu", categories=("atention",))
    unknown = cli("conformance", "cpuu", "--only", "rng")
    assert (unknown.exit_code, "Did you mean 'cpu'" in unknown.stderr) == (2, True)
    nowhere = cli("conformance", "cpu", "--only", "rng", "--json", tmp_path / "none" / "r.json")
    assert (nowhere.exit_code, "folder does not exist" in nowhere.stderr) == (2, True)


def test_a_promise_that_raises_is_a_failure_and_long_messages_are_cut():
    told = Promises("graphs", "some")

    def torn() -> str | None:
        raise RuntimeError("x" * 5000)

    told.check("torn", torn)
    told.check("kept", lambda: None)
    assert [o.status for o in told.outcomes] == ["fail", "pass"]
    assert len(told.outcomes[0].detail) <= LONGEST + 4
    assert Outcome("a", "b", "c", "", "pass").detail == ""


def test_an_unknown_kernel_is_refused_with_the_nearest():
    with pytest.raises(BackendError, match=r"kernel 'matmull': cpu has none of that name.*matmul"):
        run_suite("cpu", categories=["attention"], kernel="matmull")
