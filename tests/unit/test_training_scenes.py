"""Captions and geometry of the training scenes. No drawings are needed."""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from portable_dit.evaluation.builtin.scenes import LARGE, STYLES, Record
from training.naming import pluralize, with_article
from training.scenes import (
    DEFAULT_MIX,
    EDIT_MIX,
    MEDIUM,
    T2I_MIX,
    THREE_MIX,
    TWO_MIX,
    Concepts,
    RenderPlan,
    mirrored,
    plan_render,
    sample_records,
    sample_scenes,
)

BUILD = Path(__file__).parents[2] / "training" / "build"


def draw(kind: str, n: int = 200, split: str = "train") -> list[Record]:
    return sample_records(random.Random(7), n, Concepts.example(), {kind: 1.0}, split)


@pytest.mark.parametrize(
    ("name", "phrase", "plural"),
    [
        ("axe", "an axe", "axes"),
        ("unicorn", "a unicorn", "unicorns"),
        ("scissors", "scissors", "scissors"),
        ("bread", "bread", "bread"),
        ("hourglass", "an hourglass", "hourglasses"),
        ("pot of food", "a pot of food", "pots of food"),
        ("kitchen knife", "a kitchen knife", "kitchen knives"),
        ("cherry", "a cherry", "cherries"),
        ("ufo", "a ufo", "ufos"),
    ],
)
def test_names_take_the_right_article_and_plural(name: str, phrase: str, plural: str) -> None:
    assert with_article(name) == phrase
    assert pluralize(name) == plural


def test_no_caption_has_a_wrong_article() -> None:
    for record in sample_records(random.Random(1), 4000, Concepts.example()):
        assert not re.search(r"\ba (axe|owl|apple|orange|hourglass)\b", record.caption), record.caption
        assert not re.search(r"\ban (unicorn|red|large|small|3d)\b", record.caption), record.caption
        assert not re.search(r"\ban? (small |large )?(scissors|bread)\b", record.caption), record.caption
        assert "  " not in record.caption
        assert record.caption == record.caption.strip(" ,")


def test_the_same_seed_gives_the_same_records() -> None:
    first, second = (sample_records(random.Random("x"), 300, Concepts.example()) for _ in range(2))
    assert first == second


def test_kinds_follow_the_mix_and_have_their_number_of_references() -> None:
    records = sample_records(random.Random(3), 20_000, Concepts.example())
    counts = Counter(record.kind for record in records)
    for kind, share in DEFAULT_MIX.items():
        assert counts[kind] / len(records) == pytest.approx(share, rel=0.25), kind
    for number, mix in enumerate((T2I_MIX, EDIT_MIX, TWO_MIX, THREE_MIX)):
        assert sum(mix.values()) == pytest.approx(1)
        assert {len(r.references) for r in records if r.kind in mix} == {number}


@pytest.mark.parametrize("kind", EDIT_MIX)
def test_every_edit_changes_the_picture(kind: str) -> None:
    for record in draw(kind):
        assert record.target != record.references[0], record


def test_a_background_edit_keeps_the_objects() -> None:
    for record in draw("background"):
        assert record.target.objects == record.references[0].objects


def test_remove_takes_away_only_the_named_object() -> None:
    for record in draw("remove"):
        source, target = record.references[0].objects, record.target.objects
        gone = [placed for placed in source if placed not in target]
        assert len(gone) == 1
        assert set(target) < set(source)
        assert not record.named or record.named == (gone[0].concept,)


def test_an_added_object_mirrors_its_neighbour() -> None:
    for record in draw("add"):
        (old,), (same, new) = record.references[0].objects, record.target.objects
        assert same == old
        assert (new.x, new.y) == (1 - old.x, 1 - old.y)
        assert (new.size, new.style) == (old.size, old.style)


def test_relations_are_where_the_caption_says() -> None:
    seen = Counter()
    for record in draw("pair"):
        first, second = record.target.objects
        relations = {
            "left of": first.x < second.x,
            "right of": first.x > second.x,
            "above": first.y < second.y,
            "below": first.y > second.y or "below it" in record.caption,
        }
        said = next((words for words in relations if words in record.caption), None)
        seen[said] += 1
        assert said is None or relations[said], record.caption
    assert all(seen[words] for words in ("left of", "right of", "above", "below"))


def test_replace_keeps_the_place() -> None:
    for record in draw("replace"):
        changed = [
            (old, new)
            for old, new in zip(record.references[0].objects, record.target.objects, strict=True)
            if old != new
        ]
        ((old, new),) = changed
        assert (old.x, old.y, old.size, old.style) == (new.x, new.y, new.size, new.style)
        assert (old.concept, new.concept) == record.named


def test_resize_goes_between_the_two_sizes() -> None:
    for record in draw("resize"):
        grows = bool(re.search("larger|bigger|enlarge", record.caption))
        assert record.references[0].objects[0].size == (MEDIUM if grows else LARGE)
        assert record.target.objects[0].size == (LARGE if grows else MEDIUM)


def test_a_style_edit_reaches_the_style_that_it_names() -> None:
    for record in draw("style"):
        changed = [
            new
            for old, new in zip(record.references[0].objects, record.target.objects, strict=True)
            if old != new
        ]
        assert {STYLES[new.style] for new in changed} == {re.search(r"(cartoon|flat|3d)", record.caption)[0]}


def test_mirroring_twice_gives_the_scene_back() -> None:
    for scene in sample_scenes(random.Random(5), 500, Concepts.example()):
        assert mirrored(mirrored(scene)) == scene


def test_objects_stay_on_the_canvas() -> None:
    content = 236 / 256
    records = sample_records(random.Random(9), 3000, Concepts.example())
    for placed in (o for r in records for scene in (r.target, *r.references) for o in scene.objects):
        reach = placed.size * content / 2
        assert reach <= placed.x <= 1 - reach
        assert reach <= placed.y <= 1 - reach


def test_training_never_shows_what_is_held_out() -> None:
    concepts = Concepts.example()
    for record in sample_records(random.Random(11), 5000, concepts):
        for scene in (record.target, *record.references):
            for placed in scene.objects:
                assert placed.concept in concepts.allowed[placed.style], record
            shown = sorted({placed.concept for placed in scene.objects})
            assert len(shown) < 2 or tuple(shown) not in concepts.held_out_pairs, record


def test_a_render_plan_can_be_cut_and_joined() -> None:
    scenes = sample_scenes(random.Random(2), 20, Concepts.example())
    plan = plan_render(scenes)
    joined = RenderPlan.concat([plan[:7], plan[7:]])
    assert len(joined) == 20
    assert (joined.boxes == plan.boxes).all()
    assert (joined.sprites == plan.sprites).all()


def test_every_caption_fits_the_text_rows() -> None:
    if not (BUILD / "vocab.txt").exists():
        pytest.skip("needs training/build: run `python -m training.build_data`")
    from training.captions import Tokenizer

    concepts = Concepts.load(BUILD / "concepts.json")
    records = sample_records(random.Random(4), 30_000, concepts)
    _, lengths = Tokenizer(BUILD / "vocab.txt")([record.caption for record in records])
    assert lengths.max() <= 32
