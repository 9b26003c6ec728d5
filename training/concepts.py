"""The things that h3-mini knows: their names, and which combinations training must not see."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from portable_dit.evaluation.builtin.scenes import STYLES
from training.naming import is_countable, is_plural, pluralize, with_article


class Name(NamedTuple):
    """One way to call a concept; pieces: how many WordPieces it may take."""

    name: str
    phrase: str
    plural: str
    pieces: int


@dataclass(frozen=True)
class Concepts:
    """Names of all concepts and which combinations training must not see."""

    names: tuple[tuple[Name, ...], ...]  # by concept; the first one is the usual one
    countable: tuple[bool, ...]
    plural: tuple[bool, ...]
    asymmetry: tuple[tuple[float, ...], ...]  # by concept and style, 0 = its own mirror image
    allowed: tuple[tuple[int, ...], ...]  # by style: concepts for training
    held_out: tuple[tuple[int, ...], ...]  # by style: concepts that training never shows in it
    held_out_pairs: frozenset[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.names)

    @staticmethod
    def load(path: str | Path) -> "Concepts":
        """From the concepts.json that `training.build_data` writes."""
        data = json.loads(Path(path).read_text())
        entries = data["concepts"]
        styles = range(len(STYLES))
        return Concepts(
            names=tuple(
                tuple(Name(n["name"], n["phrase"], n["plural"], n["pieces"]) for n in entry["names"])
                for entry in entries
            ),
            countable=tuple(entry["countable"] for entry in entries),
            plural=tuple(entry["plural"] for entry in entries),
            asymmetry=tuple(tuple(entry["asymmetry"]) for entry in entries),
            allowed=tuple(
                tuple(i for i, e in enumerate(entries) if e["held_out_style"] != s) for s in styles
            ),
            held_out=tuple(
                tuple(i for i, e in enumerate(entries) if e["held_out_style"] == s) for s in styles
            ),
            held_out_pairs=frozenset((a, b) for a, b in data["held_out_pairs"]),
        )

    def first(self, count: int) -> "Concepts":
        """Only the first `count` concepts, for quick trials."""
        few = frozenset(range(count))
        return Concepts(
            names=self.names[:count],
            countable=self.countable[:count],
            plural=self.plural[:count],
            asymmetry=self.asymmetry[:count],
            allowed=tuple(tuple(c for c in concepts if c in few) for concepts in self.allowed),
            held_out=tuple(tuple(c for c in concepts if c in few) for concepts in self.held_out),
            held_out_pairs=frozenset(p for p in self.held_out_pairs if few.issuperset(p))
            or frozenset({(0, 1)}),
        )

    @staticmethod
    def example() -> "Concepts":
        """Twelve concepts without drawings, for tests of captions and geometry."""
        words = (
            "apple",
            "axe",
            "scissors",
            "unicorn",
            "bread",
            "owl",
            "fish",
            "box",
            "cherry",
            "pot of food",
            "car",
        )
        names = (*words, "hourglass")
        everything = tuple(range(len(names)))
        return Concepts(
            names=tuple(
                (Name(name, with_article(name), pluralize(name), len(name.split())),) for name in names
            ),
            countable=tuple(is_countable(name) for name in names),
            plural=tuple(is_plural(name) for name in names),
            asymmetry=tuple((0.2, 0.2, 0.2) for _ in names),
            allowed=(everything[:-1], everything, everything),
            held_out=(everything[-1:], everything[:1], everything[1:2]),
            held_out_pairs=frozenset({(0, 1), (4, 7)}),
        )
