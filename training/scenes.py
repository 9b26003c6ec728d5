"""Scenes, captions and exact edit targets for h3-mini, drawn at random from a seed. No torch here.

A scene is a description: a background and up to four placed objects. A record is one training example: a
caption, the scene that it should give, and the scenes of the reference pictures. Since both sides of an edit
are described before anything is drawn, every edit target is exact. `training.render` makes pixels of scenes.

What a caption leaves out has one fixed meaning, so that nothing has to be guessed:
no style is cartoon, no background is white, an added object takes its neighbour's style, size and distance
from the middle, and several references keep the background of picture 1.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed_copy

import numpy as np

from portable_dit.evaluation.builtin.scenes import (
    COLOR_NAMES,
    COLORS,
    LARGE,
    MEDIUM,
    STYLES,
    WHITE,
    Background,
    Placed,
    Record,
    Scene,
)
from training.concepts import Concepts, Name
from training.wording import (
    ON_GRADIENT,
    ON_LANDSCAPE,
    ON_SOLID,
    PICTURE_WORDS,
    TO_BACKGROUND,
    TO_GRAY,
    TO_MIRROR,
    TO_NAMED_STYLE,
    TO_OBJECT_ON_BACKGROUND,
    TO_REMOVE,
    TO_REPLACE,
    TO_STYLE,
    TO_STYLE_OF,
)

ACHROMATIC = frozenset(COLOR_NAMES.index(name) for name in ("black", "white", "gray"))

NEAR, MIDDLE, FAR = 0.25, 0.5, 0.75
JITTER = (-1 / 32, 0.0, 0.0, 1 / 32)
RELATIONS = {
    "to the left of": ((NEAR, MIDDLE), (FAR, MIDDLE)),
    "to the right of": ((FAR, MIDDLE), (NEAR, MIDDLE)),
    "above": ((MIDDLE, NEAR), (MIDDLE, FAR)),
    "below": ((MIDDLE, FAR), (MIDDLE, NEAR)),
}
SIDES = {
    "on the left": (NEAR, MIDDLE),
    "on the right": (FAR, MIDDLE),
    "at the top": (MIDDLE, NEAR),
    "at the bottom": (MIDDLE, FAR),
}
CORNERS = {
    "in the top left": (NEAR, NEAR),
    "in the top right": (FAR, NEAR),
    "in the bottom left": (NEAR, FAR),
    "in the bottom right": (FAR, FAR),
}
PLACES = SIDES | CORNERS
OPPOSITE = {
    "in the top left": "in the bottom right",
    "in the bottom right": "in the top left",
    "in the top right": "in the bottom left",
    "in the bottom left": "in the top right",
}
COUNTED = {
    "two": ((NEAR, MIDDLE), (FAR, MIDDLE)),
    "three": ((MIDDLE, NEAR), (NEAR, FAR), (FAR, FAR)),
    "four": ((NEAR, NEAR), (FAR, NEAR), (NEAR, FAR), (FAR, FAR)),
}
MAX_OBJECTS = 4
LANDSCAPES = ("sky", "grass", "sea", "night")
BACKGROUND_KINDS = ("solid", "gradient", "stripes", *LANDSCAPES)

# Kinds of records and how often each occurs among those with 0, 1, 2 and 3 reference pictures.
# What the last run drew worst has the largest shares (TRAINING.md says which and why).
T2I_MIX = {"single": 0.38, "placed": 0.17, "pair": 0.28, "count": 0.07, "diagonal": 0.07, "gray": 0.03}
EDIT_MIX = {
    "background": 0.06,
    "black_and_white": 0.03,
    "mirror": 0.05,
    "remove": 0.14,
    "replace": 0.3,
    "add": 0.08,
    "style": 0.28,
    "resize": 0.06,
}
TWO_MIX = {"object_on_background": 0.14, "pair_of_two": 0.3, "replace_from": 0.28, "style_of": 0.28}
THREE_MIX = {"pair_on_background": 0.5, "object_background_style": 0.5}
DEFAULT_MIX = {
    kind: share * weight
    for share, mix in ((0.5, T2I_MIX), (0.35, EDIT_MIX), (0.1, TWO_MIX), (0.05, THREE_MIX))
    for kind, weight in mix.items()
}


def sample_records(
    rng: random.Random,
    n: int,
    concepts: Concepts,
    mix: Mapping[str, float] = DEFAULT_MIX,
    split: str = "train",
) -> list[Record]:
    """`n` records whose kinds follow `mix`; the kind is drawn first, then a scene that can take it.

    split: "train", or "heldout" for (concept, style) pairs that training never shows; there, "pair" draws
    from the fixed list of held-out concept pairs instead.
    """
    sampler = Sampler(rng, concepts, split)
    kinds = rng.choices(tuple(mix), weights=tuple(mix.values()), k=n)
    return [sampler.record(kind) for kind in kinds]


def sample_scenes(rng: random.Random, n: int, concepts: Concepts) -> list[Scene]:
    """`n` scenes without captions for the VAE: every background, size and place, mixed styles, some gray."""
    sampler = Sampler(rng, concepts, "train")
    return [sampler.any_scene() for _ in range(n)]


class Sampler:
    """Draws records of a given kind; a kind's method returns caption, target, references, named concepts."""

    def __init__(self, rng: random.Random, concepts: Concepts, split: str):
        if split not in ("train", "heldout"):
            raise ValueError(f"split={split!r}: must be 'train' or 'heldout'.")
        self.rng = rng
        self.concepts = concepts
        self.split = split
        self.pool = concepts.allowed if split == "train" else concepts.held_out
        self.pair_list = sorted(concepts.held_out_pairs)

    def record(self, kind: str) -> Record:
        caption, target, references, named = DRAWN_BY[kind](self)
        return Record(caption, target, references, kind, kind if references else None, named)

    # What scenes are made of.

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def one_of(self, options: Sequence):
        return options[int(self.rng.random() * len(options))]

    def style(self) -> int:
        return int(self.rng.random() * len(STYLES))

    def concept(self, style: int) -> int:
        return self.one_of(self.pool[style])

    def two_concepts(self, style: int) -> tuple[int, int]:
        """Two different concepts of one style; never a held-out pair in training."""
        while True:
            first, second = self.concept(style), self.concept(style)
            ordered = (first, second) if first < second else (second, first)
            if first != second and (self.split == "heldout" or ordered not in self.concepts.held_out_pairs):
                return first, second

    def other_concept(self, style: int, scene: Scene) -> int:
        """A concept that the scene does not show, and that makes no held-out pair with what it shows."""
        present = {placed.concept for placed in scene.objects}
        while True:
            concept = self.concept(style)
            pairs = {(min(concept, other), max(concept, other)) for other in present}
            if concept not in present and not pairs & self.concepts.held_out_pairs:
                return concept

    def background(self) -> Background:
        roll = self.rng.random()
        if roll < 0.7:
            return SOLIDS[int(self.rng.random() * len(SOLIDS))]
        if roll < 0.9:
            first, second = self.rng.sample(range(len(COLORS)), 2)
            return Background("gradient" if roll < 0.81 else "stripes", first, second)
        return self.one_of(LANDSCAPE_BACKGROUNDS)

    def other_background(self, background: Background) -> Background:
        while True:
            other = self.background()
            if other != background:
                return other

    def colorful_background(self) -> Background:
        while True:
            background = self.background()
            if background.first not in ACHROMATIC or background.kind in LANDSCAPES:
                return background

    def near_middle(self) -> tuple[float, float]:
        return MIDDLE + self.one_of(JITTER), MIDDLE + self.one_of(JITTER)

    def single_scene(self, style: int, size: float | None = None) -> Scene:
        """One object near the middle."""
        x, y = self.near_middle()
        size = size or (LARGE if self.chance(0.65) else MEDIUM)
        return Scene(self.background(), (Placed(self.concept(style), style, x, y, size, self.chance(0.12)),))

    def side_scene(self, style: int, place: tuple[float, float]) -> Scene:
        """One object of medium size beside the middle."""
        return Scene(
            self.background(), (Placed(self.concept(style), style, *place, MEDIUM, self.chance(0.12)),)
        )

    def pair_scene(self, style: int) -> Scene:
        """Two objects; the first is the left or upper one."""
        first, second = self.two_concepts(style)
        places = RELATIONS["to the left of" if self.chance(0.6) else "above"]
        objects = tuple(
            Placed(c, style, *place, MEDIUM) for c, place in zip((first, second), places, strict=True)
        )
        return Scene(self.background(), objects)

    def source(self) -> Scene:
        """What a user may bring to an edit."""
        roll = self.rng.random()
        style = self.style()
        if roll < 0.5:
            return self.single_scene(style)
        return self.side_scene(style, self.one_of(PLACE_POINTS)) if roll < 0.62 else self.pair_scene(style)

    def any_scene(self) -> Scene:
        roll = self.rng.random()
        if roll < 0.5:
            scene = self.source()
        else:
            points = self.one_of((*COUNT_POINTS, *RELATION_POINTS))
            size = MEDIUM if roll < 0.9 else 0.4
            styles = [self.style() for _ in points]
            objects = (
                Placed(self.concept(s), s, *p, size, self.chance(0.3))
                for s, p in zip(styles, points, strict=True)
            )
            scene = Scene(self.background(), tuple(objects))
        return changed_copy(scene, black_and_white=True) if self.chance(0.05) else scene

    # What captions are made of.

    def name(self, concept: int) -> Name:
        """The usual name or another one: every sixth mention, since a quarter of the concepts has others."""
        names = self.concepts.names[concept]
        return names[0] if len(names) == 1 or self.chance(0.4) else self.one_of(names[1:])

    def the(self, concept: int) -> str:
        return f"the {self.name(concept).name}"

    def on(self, background: Background) -> str:
        """Where a scene is, for the end of a caption; "" may stand for white."""
        kind = background.kind
        if kind == "solid":
            if background.first == WHITE and self.chance(0.4):
                return ""
            return self.one_of(ON_SOLID).format(*COLOR_PHRASES[background.first])
        first, second = COLOR_NAMES[background.first], COLOR_NAMES[background.second]
        if kind == "gradient":
            return self.one_of(ON_GRADIENT).format(first, second, color_article(background.first))
        if kind == "stripes":
            return f" on {color_article(background.first)} {first} and {second} striped background"
        return self.one_of(ON_LANDSCAPE[kind])

    def styled(self, body: str, style: int, background: str) -> str:
        """The caption of a picture: what it shows, where, and in which style, in several word orders."""
        if style == 0 and self.chance(0.4):
            return body + background
        name = STYLES[style]
        roll = self.rng.random()
        if roll < 0.4:
            return f"{body}{background}, {name} style"
        if roll < 0.55:
            return f"{body}{background} in {name} style"
        if roll < 0.75:
            return f"a {name} style picture of {body}{background}"
        if roll < 0.9:
            return f"{name} style: {body}{background}"
        if background:
            return f"{background.strip()}, {body}, {name} style"
        return f"{name} style, {body}"

    def picture(self) -> Callable[[int], str]:
        """How this caption calls its references: a function of the number of one."""
        return self.one_of(PICTURE_WORDS).format

    def in_picture(self) -> str:
        """An edit of one picture seldom needs to say which."""
        return f" in {self.picture()(1)}" if self.chance(0.1) else ""

    # Text to image.

    def single(self) -> tuple:
        style = self.style()
        concept = self.concept(style)
        name = self.name(concept)
        roll = self.rng.random()
        size, body = LARGE, name.phrase
        if roll < 0.2:
            size, word = (MEDIUM, "small") if roll < 0.12 else (LARGE, "large")
            has_article = name.phrase != name.name
            body = f"{'a ' if has_article else ''}{word} {name.name}"
        elif roll < 0.35:
            size = MEDIUM
        background = self.background()
        target = Scene(background, (Placed(concept, style, *self.near_middle(), size),))
        if roll > 0.9:
            where = self.on(background).strip()
            short = f"{STYLES[style]} {name.name}"
            return f"{short}, {where}" if where else short, target, (), (concept,)
        return self.styled(body, style, self.on(background)), target, (), (concept,)

    def placed(self) -> tuple:
        style = self.style()
        concept = self.concept(style)
        word = self.one_of(PLACE_WORDS)
        background = self.background()
        target = Scene(background, (Placed(concept, style, *PLACES[word], MEDIUM),))
        return (
            self.styled(f"{self.name(concept).phrase} {word}", style, self.on(background)),
            target,
            (),
            (concept,),
        )

    def pair(self) -> tuple:
        style = self.style()
        first, second = self.two_concepts(style)
        if self.split == "heldout":
            first, second = self.held_out_pair(style)
        relation = self.one_of(RELATION_WORDS)
        points = RELATIONS[relation]
        background = self.background()
        objects = (Placed(first, style, *points[0], MEDIUM), Placed(second, style, *points[1], MEDIUM))
        a, b = self.name(first).phrase, self.name(second).phrase
        roll = self.rng.random()
        if roll < 0.12 and relation == "to the left of":
            body = f"{a} and {b} side by side"
        elif roll < 0.2 and relation == "above":
            body = f"{a} on top and {b} below it"
        else:
            body = f"{a} {relation} {b}"
        return self.styled(body, style, self.on(background)), Scene(background, objects), (), (first, second)

    def held_out_pair(self, style: int) -> tuple[int, int]:
        """A pair that training never shows together, of objects that it shows in this style."""
        hidden = set(self.concepts.held_out[style])
        while True:
            pair = self.one_of(self.pair_list)
            if not hidden.intersection(pair):
                return pair if self.chance(0.5) else pair[::-1]

    def count(self) -> tuple:
        style = self.style()
        concept = self.concept(style)
        while not self.concepts.countable[concept]:
            style = self.style()
            concept = self.concept(style)
        word = self.one_of(COUNT_WORDS)
        background = self.background()
        objects = tuple(Placed(concept, style, *point, MEDIUM) for point in COUNTED[word])
        body = f"{word} {self.name(concept).plural}"
        return self.styled(body, style, self.on(background)), Scene(background, objects), (), (concept,)

    def diagonal(self) -> tuple:
        style = self.style()
        while True:
            first, second = self.two_concepts(style)
            a, b = self.name(first), self.name(second)
            if a.pieces + b.pieces <= 7:
                break
        word = self.one_of(CORNER_WORDS)
        background = self.background()
        while background.kind == "gradient":
            background = self.background()
        objects = (
            Placed(first, style, *CORNERS[word], MEDIUM),
            Placed(second, style, *CORNERS[OPPOSITE[word]], MEDIUM),
        )
        body = f"{a.phrase} {word} and {b.phrase} {OPPOSITE[word]}"
        return self.styled(body, style, self.on(background)), Scene(background, objects), (), (first, second)

    def gray(self) -> tuple:
        """A black and white picture from the start."""
        style = self.style()
        scene = changed_copy(self.single_scene(style, LARGE), black_and_white=True)
        placed = changed_copy(scene.objects[0], flip=False)
        body = f"a black and white picture of {self.name(placed.concept).phrase}{self.on(scene.background)}"
        caption = body if style == 0 and self.chance(0.4) else f"{body}, {STYLES[style]} style"
        return caption, changed_copy(scene, objects=(placed,)), (), (placed.concept,)

    # One reference.

    def black_and_white(self) -> tuple:
        source = changed_copy(self.source(), background=self.colorful_background())
        return self.one_of(TO_GRAY), changed_copy(source, black_and_white=True), (source,), ()

    def mirror(self) -> tuple:
        style = self.style()
        roll = self.rng.random()
        if roll < 0.4:
            source = self.pair_scene(style)
            while source.objects[0].x == source.objects[1].x:
                source = self.pair_scene(style)
        elif roll < 0.7:
            source = self.side_scene(style, self.one_of(OFF_CENTER_POINTS))
        else:
            source = self.single_scene(style)
            while self.concepts.asymmetry[source.objects[0].concept][style] < 0.08:
                source = self.single_scene(style)
        return self.one_of(TO_MIRROR), mirrored(source), (source,), ()

    def remove(self) -> tuple:
        style = self.style()
        if self.chance(0.1):
            source = self.single_scene(style)
            gone = 0
        else:
            source = self.pair_scene(style)
            gone = int(self.rng.random() * 2)
        placed = source.objects[gone]
        objects = source.objects[:gone] + source.objects[gone + 1 :]
        if objects and self.chance(0.15):
            caption = f"{self.one_of(TO_REMOVE)} the object {side_word(placed)}{self.in_picture()}"
            named: tuple[int, ...] = ()
        else:
            caption = f"{self.one_of(TO_REMOVE)} {self.the(placed.concept)}{self.in_picture()}"
            named = (placed.concept,)
        return caption, changed_copy(source, objects=objects), (source,), named

    def replace(self) -> tuple:
        source = self.source()
        index = int(self.rng.random() * len(source.objects))
        old = source.objects[index]
        new = changed_copy(old, concept=self.other_concept(old.style, source), flip=False)
        objects = (*source.objects[:index], new, *source.objects[index + 1 :])
        a, b = self.the(old.concept), self.name(new.concept).phrase
        caption = self.one_of(TO_REPLACE).format(a + self.in_picture(), b)
        return caption, changed_copy(source, objects=objects), (source,), (old.concept, new.concept)

    def add(self) -> tuple:
        style = self.style()
        relation = self.one_of(RELATION_WORDS)
        new_point, old_point = RELATIONS[relation]
        source = self.side_scene(style, old_point)
        old = source.objects[0]
        new = Placed(self.other_concept(style, source), style, *new_point, MEDIUM)
        phrase = self.name(new.concept).phrase
        verb = self.one_of(("add", "add", "put", "place"))
        if self.chance(0.3):
            caption = f"add {phrase} {side_word(new)}{self.in_picture()}"
            named: tuple[int, ...] = (new.concept,)
        else:
            caption = f"{verb} {phrase} {relation} {self.the(old.concept)}{self.in_picture()}"
            named = (new.concept, old.concept)
        return caption, changed_copy(source, objects=(old, new)), (source,), named

    def style_edit(self) -> tuple:
        while True:
            source = self.single_scene(self.style()) if self.chance(0.75) else self.pair_scene(self.style())
            old = source.objects[0].style
            new = (old + 1 + int(self.rng.random() * 2)) % 3
            changed = (0, 1) if len(source.objects) == 2 else (0,)
            whole = True
            if len(source.objects) == 2 and self.chance(0.35):
                changed, whole = (int(self.rng.random() * 2),), False
            if (
                all(source.objects[i].concept in self.concepts.allowed[new] for i in changed)
                or self.split != "train"
            ):
                break
        objects = tuple(
            changed_copy(o, style=new) if i in changed else o for i, o in enumerate(source.objects)
        )
        target = changed_copy(source, objects=objects)
        if whole and (len(changed) == 2 or self.chance(0.45)):
            return self.one_of(TO_STYLE).format(STYLES[new]) + self.in_picture(), target, (source,), ()
        concept = source.objects[changed[0]].concept
        caption = self.one_of(TO_NAMED_STYLE).format(self.the(concept) + self.in_picture(), STYLES[new])
        return caption, target, (source,), (concept,)

    def resize(self) -> tuple:
        grow = self.chance(0.5)
        source = self.single_scene(self.style(), MEDIUM if grow else LARGE)
        placed = source.objects[0]
        target = changed_copy(source, objects=(changed_copy(placed, size=LARGE if grow else MEDIUM),))
        thing = self.the(placed.concept) if self.chance(0.75) else "the object"
        word = self.one_of(("larger", "bigger") if grow else ("smaller",))
        caption = f"make {thing}{self.in_picture()} {word}"
        if self.chance(0.2):
            caption = f"{'enlarge' if grow else 'shrink'} {thing}{self.in_picture()}"
        return caption, target, (source,), (placed.concept,)

    def background_edit(self) -> tuple:
        source = self.source()
        background = self.other_background(source.background)
        verb = self.one_of(TO_BACKGROUND[background.kind])
        if background.kind in LANDSCAPES:
            caption = verb
        else:
            first, second = COLOR_NAMES[background.first], COLOR_NAMES[background.second]
            caption = verb.format(first, second, color_article(background.first))
        return caption, changed_copy(source, background=background), (source,), ()

    # Two references.

    def object_on_background(self) -> tuple:
        """The object of one picture on the background of the other."""
        picture = self.picture()
        a, b = self.shuffled(2)
        front = self.single_scene(self.style())
        back = self.source() if self.chance(0.6) else Scene(self.background(), ())
        back = changed_copy(back, background=self.other_background(front.background))
        thing = self.the(front.objects[0].concept) if self.chance(0.5) else "the object"
        caption = self.one_of(TO_OBJECT_ON_BACKGROUND).format(thing, picture(a), picture(b))
        target = changed_copy(front, background=back.background)
        named = (front.objects[0].concept,)
        return caption, target, arranged({a: front, b: back}), named

    def pair_of_two(self) -> tuple:
        """The objects of two pictures in one, on picture 1's background unless the caption says otherwise."""
        picture = self.picture()
        a, b = self.shuffled(2)
        first, second = self.two_singles()
        references = arranged({a: first, b: second})
        background, where = references[0].background, ""
        roll = self.rng.random()
        if roll < 0.25:
            background = self.one_of(SOLIDS)
            where = f" on {color_article(background.first)} {COLOR_NAMES[background.first]} background"
        elif roll < 0.5:
            number = 1 + int(self.rng.random() * 2)
            background, where = references[number - 1].background, f" on the background of {picture(number)}"
        return self.joined(first, second, background, f"{picture(a)}|{picture(b)}", where, references)

    def replace_from(self) -> tuple:
        """An object of picture 1 gives way to the object of picture 2, which keeps its own style."""
        picture = self.picture()
        source = self.source()
        style = self.style()
        index = int(self.rng.random() * len(source.objects))
        old = source.objects[index]
        other = self.single_scene(style)
        other = changed_copy(
            other, objects=(changed_copy(other.objects[0], concept=self.other_concept(style, source)),)
        )
        new = changed_copy(other.objects[0], x=old.x, y=old.y, size=old.size)
        objects = (*source.objects[:index], new, *source.objects[index + 1 :])
        thing = self.the(new.concept) if self.chance(0.5) else "the object"
        caption = f"replace {self.the(old.concept)} in {picture(1)} with {thing} of {picture(2)}"
        return caption, changed_copy(source, objects=objects), (source, other), (old.concept, new.concept)

    def style_of(self) -> tuple:
        """One picture in the style of the other."""
        picture = self.picture()
        a, b = self.shuffled(2)
        front, style = self.restylable()
        other = self.single_scene(style)
        placed = front.objects[0]
        thing = f"{self.the(placed.concept)} of " if self.chance(0.5) else ""
        caption = self.one_of(TO_STYLE_OF).format(thing + picture(a), picture(b))
        target = changed_copy(front, objects=(changed_copy(placed, style=style),))
        return caption, target, arranged({a: front, b: other}), (placed.concept,)

    # Three references.

    def pair_on_background(self) -> tuple:
        picture = self.picture()
        a, b, c = self.shuffled(3)
        first, second = self.two_singles()
        back = self.source() if self.chance(0.5) else Scene(self.background(), ())
        references = arranged({a: first, b: second, c: back})
        where = f" on the background of {picture(c)}"
        return self.joined(first, second, back.background, f"{picture(a)}|{picture(b)}", where, references)

    def object_background_style(self) -> tuple:
        """The object of one picture, on the background of another, in the style of the third."""
        picture = self.picture()
        a, b, c = self.shuffled(3)
        front, style = self.restylable()
        placed = front.objects[0]
        back = self.source() if self.chance(0.5) else Scene(self.background(), ())
        other = self.single_scene(style)
        thing = self.the(placed.concept) if self.chance(0.5) else "the object"
        caption = f"{thing} of {picture(a)} on the background of {picture(b)} in the style of {picture(c)}"
        target = Scene(back.background, (changed_copy(placed, style=style),))
        return caption, target, arranged({a: front, b: back, c: other}), (placed.concept,)

    def shuffled(self, n: int) -> list[int]:
        """Numbers 1..n; mostly in order."""
        numbers = list(range(1, n + 1))
        if self.chance(0.35):
            self.rng.shuffle(numbers)
        return numbers

    def two_singles(self) -> tuple[Scene, Scene]:
        """Two one-object scenes of different concepts."""
        first = self.single_scene(self.style())
        style = self.style()
        second = self.single_scene(style)
        other = changed_copy(second.objects[0], concept=self.other_concept(style, first))
        return first, changed_copy(second, objects=(other,))

    def restylable(self) -> tuple[Scene, int]:
        """A one-object scene and another style that its object may be shown in."""
        while True:
            scene = self.single_scene(self.style())
            style = (scene.objects[0].style + 1 + int(self.rng.random() * 2)) % 3
            if scene.objects[0].concept in self.concepts.allowed[style] or self.split != "train":
                return scene, style

    def joined(
        self,
        first: Scene,
        second: Scene,
        background: Background,
        pictures: str,
        where: str,
        references: tuple[Scene, ...],
    ) -> tuple:
        """The two objects in one picture, each in its own style, at the two places of a relation."""
        relation = self.one_of(RELATION_WORDS)
        points = RELATIONS[relation]
        a, b = first.objects[0], second.objects[0]
        names = self.name(a.concept), self.name(b.concept)
        if self.chance(0.5) and names[0].pieces + names[1].pieces <= 6:
            things = f"the {names[0].name}", f"the {names[1].name}"
        else:
            things = "the object", "the object"
        picture_a, picture_b = pictures.split("|")
        caption = f"{things[0]} of {picture_a} {relation} {things[1]} of {picture_b}{where}"
        if self.chance(0.3):
            caption = f"put {caption}"
        objects = (
            Placed(a.concept, a.style, *points[0], MEDIUM, a.flip),
            Placed(b.concept, b.style, *points[1], MEDIUM, b.flip),
        )
        return caption, Scene(background, objects), references, (a.concept, b.concept)


DRAWN_BY: dict[str, Callable[[Sampler], tuple]] = {
    kind: getattr(Sampler, {"background": "background_edit", "style": "style_edit"}.get(kind, kind))
    for kind in DEFAULT_MIX
}


def mirrored(scene: Scene) -> Scene:
    """The scene as a mirror shows it."""
    old = scene.background
    if old.kind == "stripes":
        background = Background("stripes", old.second, old.first)
    else:
        background = changed_copy(old, mirrored=old.kind in LANDSCAPES and not old.mirrored)
    objects = tuple(changed_copy(o, x=1 - o.x, flip=not o.flip) for o in scene.objects)
    return changed_copy(scene, background=background, objects=objects)


def arranged(by_number: Mapping[int, Scene]) -> tuple[Scene, ...]:
    """The scenes in the order of their picture numbers."""
    return tuple(by_number[number] for number in sorted(by_number))


def side_word(placed: Placed) -> str:
    """ "on the left" and so on, for an object beside the middle."""
    return next(word for word, point in SIDES.items() if point == (placed.x, placed.y))


def color_article(color: int) -> str:
    return "an" if COLOR_NAMES[color] == "orange" else "a"


SOLIDS = tuple(Background("solid", color) for color in range(len(COLORS)))
LANDSCAPE_BACKGROUNDS = tuple(Background(kind) for kind in LANDSCAPES)
COLOR_PHRASES = tuple((color_article(color), name) for color, name in enumerate(COLOR_NAMES))
RELATION_WORDS = tuple(RELATIONS)
RELATION_POINTS = tuple(RELATIONS.values())
COUNT_WORDS = tuple(COUNTED)
COUNT_POINTS = tuple(COUNTED.values())
PLACE_WORDS = tuple(PLACES)
PLACE_POINTS = tuple(PLACES.values())
OFF_CENTER_POINTS = tuple(point for point in PLACE_POINTS if point[0] != MIDDLE)
CORNER_WORDS = tuple(CORNERS)


@dataclass(frozen=True)
class RenderPlan:
    """Scenes as arrays, ready to be sent to the device that draws them."""

    backgrounds: np.ndarray  # int16 [N, 4]: kind, first, second, mirrored
    black_and_white: np.ndarray  # bool [N]
    sprites: np.ndarray  # int16 [N, 4]: concept * 3 + style, -1 where there is no object
    boxes: np.ndarray  # float32 [N, 4, 4]: x, y, size, flip

    def __len__(self) -> int:
        return len(self.backgrounds)

    def __getitem__(self, index: slice | np.ndarray) -> "RenderPlan":
        return RenderPlan(
            self.backgrounds[index], self.black_and_white[index], self.sprites[index], self.boxes[index]
        )

    @staticmethod
    def concat(plans: Sequence["RenderPlan"]) -> "RenderPlan":
        return RenderPlan(
            np.concatenate([plan.backgrounds for plan in plans]),
            np.concatenate([plan.black_and_white for plan in plans]),
            np.concatenate([plan.sprites for plan in plans]),
            np.concatenate([plan.boxes for plan in plans]),
        )


KIND_CODES = {kind: code for code, kind in enumerate(BACKGROUND_KINDS)}
NO_OBJECT = (-1, (0.5, 0.5, 1.0, 0.0))


def plan_render(scenes: Sequence[Scene]) -> RenderPlan:
    """The arrays that `training.render.render` draws from."""
    backgrounds, sprites, boxes = [], [], []
    for scene in scenes:
        b = scene.background
        backgrounds.append((KIND_CODES[b.kind], b.first, b.second, b.mirrored))
        row = [(o.concept * 3 + o.style, (o.x, o.y, o.size, o.flip)) for o in scene.objects]
        row += [NO_OBJECT] * (MAX_OBJECTS - len(row))
        sprites.append([sprite for sprite, _ in row])
        boxes.append([box for _, box in row])
    return RenderPlan(
        np.array(backgrounds, dtype=np.int16).reshape(-1, 4),
        np.array([scene.black_and_white for scene in scenes], dtype=bool),
        np.array(sprites, dtype=np.int16).reshape(-1, MAX_OBJECTS),
        np.array(boxes, dtype=np.float32).reshape(-1, MAX_OBJECTS, 4),
    )
