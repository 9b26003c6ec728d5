"""What crosses to another process and back: requests, decisions and results, each equal to what was sent."""

import pickle
from dataclasses import fields

import numpy as np
import pytest

from portable_dit import Engine, Request, set_up
from portable_dit.errors import DoesNotFitError, PortableDitError, RequestError
from portable_dit.recipe_rules import Note
from portable_dit.result import Finished


def sent(value):
    return pickle.loads(pickle.dumps(value))


def same(one, other) -> bool:
    """Equal in type and in every field, pixels bit for bit."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_request_with_references_arrives_whole(tmp_path):
    picture = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    request = Request("a red apple", size=(96, 64), references=(tmp_path / "a.png", b"file", picture))
    assert same(sent(request), request)


def test_a_set_up_and_its_plan_arrive_whole(tiny_recipe):
    setup = set_up(str(tiny_recipe), {"quantization.dit": "int8_row"})
    assert sent(setup.plan) == setup.plan
    assert sent(setup.plan).as_dict() == setup.plan.as_dict()
    there = sent(setup)
    assert there.plan == setup.plan
    assert same(there.resolve(Request("a red apple")), setup.resolve(Request("a red apple")))


def test_a_result_and_its_events_arrive_whole(tiny_recipe):
    with Engine.load(str(tiny_recipe)) as engine:
        events = list(engine.stream(Request("a red apple", format="png"), previews=True))
    assert isinstance(events[-1], Finished)
    result = sent(events[-1]).result
    assert result.images[0].data() == events[-1].result.images[0].data()
    assert all(same(sent(event), event) for event in events)


@pytest.mark.parametrize(
    "error", [RequestError("too long"), DoesNotFitError("no room"), PortableDitError("x")]
)
def test_an_error_arrives_as_what_it_was(error):
    there = sent(error)
    assert (type(there), str(there), there.exit_code) == (type(error), str(error), error.exit_code)


def test_a_note_arrives_whole():
    note = Note("graphs", "the backend captures none", changed=True)
    assert sent(note) == note
