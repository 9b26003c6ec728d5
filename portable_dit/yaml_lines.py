"""YAML as plain data that remembers its lines, so that every mistake in a recipe names the line it stands on.

Stricter than YAML: one document, one mapping at the top, text keys, no key twice, no anchors (they can blow a
small file up to any size), no dates and no clock times (they stay the text they were written as). Numbers are
those of YAML 1.2: 1e9 is one, which YAML 1.1 takes for text, and 010 is ten, which it takes for eight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from portable_dit.paths import read_at_most

MAX_BYTES = 256 * 1024  # a recipe is a page of text; more is a wrong file
MOST_DIGITS = 1000
TEXT_TAGS = ("tag:yaml.org,2002:timestamp",)
WHOLE = re.compile(r"[-+]?[0-9]+")
DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
CLOCK = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")  # 1:30 was 90 in YAML 1.1


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong: its dotted key (may be empty), its line if it came from a file, and why."""

    key: str
    line: int | None
    why: str

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{self.key}: {self.why}" if self.key else f"{place}{self.why}"


@dataclass(frozen=True)
class Document:
    """data: what the file says. lines: dotted key -> line, from 1. mistakes: what is wrong as YAML."""

    data: dict[str, Any]
    lines: dict[str, int]
    mistakes: tuple[Mistake, ...]

    def line_of(self, key: str) -> int | None:
        """The line of a dotted key, or of the nearest key above it that the file has."""
        while key:
            if key in self.lines:
                return self.lines[key]
            key = key.rpartition(".")[0]
        return None


def read_document(path: Path) -> Document:
    """The document in a file; what keeps it from being read at all is its only mistake."""
    try:
        raw = read_at_most(path, MAX_BYTES)
        if len(raw) > MAX_BYTES:
            return _broken(f"the file has over {MAX_BYTES:,} bytes, a recipe less. Is it the right file?")
        text = raw.decode("utf-8")
    except FileNotFoundError:
        return _broken("there is no such file")
    except IsADirectoryError:
        return _broken("this is a folder. Name one of the .yaml files in it")
    except UnicodeDecodeError:
        return _broken("the file is not UTF-8 text. A recipe is a YAML text file")
    except OSError as error:
        return _broken(f"the file cannot be read: {error.strerror}")
    return parse_document(text)


def parse_document(text: str) -> Document:
    """The document in a text."""
    node, mistake = _compose(text)
    if mistake is not None:
        return Document({}, {}, (mistake,))
    if node is None:
        return _broken("the file is empty. A recipe has at least `model: NAME`")
    if not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        return _broken("the file must hold `key: value` lines, such as `model: h3-mini`", line)
    reader = _Reader(lines={}, mistakes=[], seen=set())
    return Document(reader.value(node, ""), reader.lines, tuple(reader.mistakes))


def parse_value(text: str) -> Any:
    """The value of one `--set key=VALUE`, read as YAML would; nothing is null. Raises ValueError."""
    node, mistake = _compose(text)
    if node is None and mistake is None:
        return None
    reader = _Reader(lines={}, mistakes=[mistake] if mistake else [], seen=set())
    value = None if node is None else reader.value(node, "")
    if reader.mistakes:
        raise ValueError(reader.mistakes[0].why)
    return value


def _compose(text: str) -> tuple[yaml.Node | None, Mistake | None]:
    """The node tree of a text, or why there is none; both None for an empty one."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader), None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        return None, Mistake("", line, f"this is not YAML: {error.problem or error.context}")
    except yaml.YAMLError as error:
        return None, Mistake("", None, f"this is not YAML text: {str(error).splitlines()[0]}")
    except RecursionError:
        return None, Mistake("", None, "it is nested too deeply to be a recipe")


def _broken(why: str, line: int | None = None) -> Document:
    return Document({}, {}, (Mistake("", line, why),))


@dataclass(frozen=True)
class _Reader:
    """Turns nodes into data and writes down lines and mistakes on the way."""

    lines: dict[str, int]
    mistakes: list[Mistake]
    seen: set[int]  # nodes met before: meeting one again means an anchor

    def value(self, node: yaml.Node, key: str) -> Any:
        if id(node) in self.seen:
            self.mistakes.append(
                Mistake(key, node.start_mark.line + 1, "anchors and aliases are not used in recipes")
            )
            return None
        self.seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, f"{key}.{i}") for i, item in enumerate(node.value)]
        if node.tag in TEXT_TAGS:
            return node.value
        try:
            if isinstance(node, yaml.ScalarNode) and node.style is None:
                return _plain(node)
            return yaml.constructor.SafeConstructor().construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            why = getattr(error, "problem", None) or str(error)
            self.mistakes.append(Mistake(key, node.start_mark.line + 1, f"this value cannot be read: {why}"))
            return None

    def mapping(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name_node, value_node in node.value:
            line = name_node.start_mark.line + 1
            name = name_node.value
            if not isinstance(name_node, yaml.ScalarNode) or name_node.tag != "tag:yaml.org,2002:str":
                self.mistakes.append(
                    Mistake(key, line, f"the key {name!r} must be plain text; put it in quotes")
                )
                continue
            dotted = f"{key}.{name}" if key else name
            if name in found:
                first = self.lines[dotted]
                self.mistakes.append(
                    Mistake(dotted, line, f"the key stands here a second time, first on line {first}")
                )
                continue
            self.lines[dotted] = line
            found[name] = self.value(value_node, dotted)
        return found


def _plain(node: yaml.ScalarNode) -> Any:
    """The value of what stands without quotes. Raises YAMLError and ValueError."""
    text, kind = node.value, node.tag.rpartition(":")[2]
    if CLOCK.fullmatch(text):
        return text
    if kind == "int" and WHOLE.fullmatch(text):
        if len(text) > MOST_DIGITS:
            raise ValueError(f"a number of {len(text):,} digits")
        return int(text)
    if kind in ("str", "float") and DECIMAL.fullmatch(text) and not WHOLE.fullmatch(text):
        return float(text)
    return yaml.constructor.SafeConstructor().construct_object(node)
