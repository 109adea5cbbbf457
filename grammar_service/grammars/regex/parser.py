r"""Reading regular expressions: the regular part of ECMAScript's, as with its flag u.

What every other engine reads alike is read so too, though that flag forbids it: `\-` and `\_` are
`-` and `_`, `{` and `]` stand for themselves where they can mean nothing else, so does `-` beside
`\w` in a class, and `(?i)` is for the rest of its group.

Look-around, back references and word borders aren't regular.
"""

import re
from typing import NoReturn

from grammar_service.grammars.regex import charset
from grammar_service.grammars.regex.charset import Ranges, complement, union
from grammar_service.grammars.regex.tree import (
    EMPTY,
    Anchor,
    Node,
    chars,
    either,
    repeat,
    sequence,
)

_DEPTH = 100
"""Groups in one another; what reads and writes them recurses, the libraries too."""
_BOUNDS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_NO_LOWER = re.compile(r"\{,[0-9]+\}")
_POSIX = re.compile(r"\[[:.=][a-z^]+[:.=]\]")
_LOOK_AROUND = re.compile(r"\(\?(<?[=!])")
_NAME = re.compile(r"\?<[\w$]+>")
_MODIFIERS = re.compile(r"\?([a-z]*)(?:-([a-z]*))?([:)])")
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{0*([0-9A-Fa-f]{1,6})\}|c([A-Za-z])")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"([pP])\{([\w=]*)\}")
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_ADVICE = {
    "A": "write ^", "Z": "write $", "z": "write $", "h": r"write [\t ]",
    "Q": "escape each character",
}  # fmt: skip


class RegexError(ValueError):
    """An expression that can't be had; the message says what, where, and what to do."""


class Malformed(RegexError):
    """It is no expression."""


class Irregular(RegexError):
    """It is one, and no mask can follow it."""


def parse(source: str) -> Node:
    """The tree of an expression, its anchors in it. Raises RegexError."""
    parser = _Parser(source)
    node = parser.alternatives()
    if parser.at < len(source):
        parser.fail("this ) closes no group; escape it")
    return node


class _Parser:
    def __init__(self, source: str) -> None:
        self.source = source
        self.at = 0
        self.depth = 0
        self.flags = frozenset[str]()
        """Of i and s, those on."""

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        raise Malformed(f"{message} (position {self.at if at is None else at})")

    def refuse(self, what: str, at: int) -> NoReturn:
        raise Irregular(f"{what}, at position {at}, can't be followed by a mask; do without it")

    def peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def take(self, text: str) -> bool:
        found = self.source.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.source, self.at)
        self.at = found.end() if found else self.at
        return found

    def alternatives(self) -> Node:
        branches = [self.sequence()]
        while self.take("|"):
            branches.append(self.sequence())
        return either(branches)

    def sequence(self) -> Node:
        parts = []
        while self.peek() and self.peek() not in "|)":
            parts.append(self.quantified())
        return sequence(parts)

    def quantified(self) -> Node:
        is_anchor = self.peek() in ("^", "$")
        atom = self.atom()
        start = self.at
        bounds = self.bounds()
        if bounds is None:
            return atom
        least, most = bounds
        if is_anchor:
            self.fail("an anchor can't be repeated", start)
        if most is not None and most < least:
            self.fail(f"{{{least},{most}}} has its bounds in the wrong order", start)
        # A lazy one has the same texts: the whole of the text is matched.
        self.take("?")
        if self.peek() in tuple("*+?") or _BOUNDS.match(self.source, self.at):
            self.fail("a repetition of a repetition; put the inner one into (?:…)")
        return repeat(atom, least, most)

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, least, most in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self.take(sign):
                return least, most
        start = self.at
        if _NO_LOWER.match(self.source, start):
            self.fail("a repetition without a lower bound; write {0,…}")
        found = self.match(_BOUNDS)
        if found is None:
            return None
        if max(len(found[1]), len(found[3] or "")) > 9:
            self.fail("so many repetitions can't be had", start)
        least = int(found[1])
        return least, (int(found[3]) if found[3] else None) if found[2] else least

    def atom(self) -> Node:
        start = self.at
        character = self.peek()
        if character in "*+?" or _BOUNDS.match(self.source, start):
            self.fail(f"nothing is before {character}; escape it")
        self.at += 1
        match character:
            case "^" | "$":
                return Anchor(character == "$", start)
            case ".":
                line_end = () if "s" in self.flags else charset.LINE_END
                return chars(complement(line_end))
            case "(":
                return self.group(start)
            case "[":
                return chars(self.char_class(start))
            case "\\":
                return chars(self.cased(self.escape(start)))
            case _:
                return chars(self.cased(_one(ord(character))))

    def cased(self, ranges: Ranges) -> Ranges:
        ranges = charset.insensitive(ranges) if "i" in self.flags else ranges
        return complement(complement(ranges)) if ranges and ranges[-1][1] > 0xD7FF else ranges

    def group(self, start: int) -> Node:
        look = _LOOK_AROUND.match(self.source, start)
        if look:
            kind = "look-behind" if "<" in look[1] else "look-ahead"
            self.refuse(f"{kind}, (?{look[1]}…)", start)
        flags = self.flags
        if self.source.startswith("?P<", self.at):
            self.fail("a group is named (?<name>…)", start)
        if self.peek() == "?" and not self.match(_NAME) and self.modify(start) == ")":
            return EMPTY  # from here to the end of the group around it
        self.depth += 1
        if self.depth > _DEPTH:
            self.refuse(f"more than {_DEPTH} groups in one another", start)
        inner = self.alternatives()
        if not self.take(")"):
            self.fail("this group isn't closed; add a ), or escape its (", start)
        self.depth -= 1
        self.flags = flags
        return inner

    def modify(self, start: int) -> str:
        found = self.match(_MODIFIERS)
        if found is None:
            self.fail("this kind of group isn't known; write (…), (?:…), (?<name>…), (?i:…)", start)
        on, off = set(found[1]), set(found[2] or "")
        if not on | off <= {"i", "s"} or on & off:
            self.fail("of the modifiers there are i and s: (?i:…), (?s:…), (?-i:…)", start)
        self.flags = self.flags - off | on
        return found[3]

    def char_class(self, start: int) -> Ranges:
        negated = self.take("^")
        found: list[tuple[int, int]] = []
        while not self.take("]"):
            if not self.peek():
                self.fail("this class isn't closed; add a ], or escape its [", start)
            if _POSIX.match(self.source, self.at):
                self.fail("POSIX classes aren't ECMAScript's; write the ranges: [A-Za-z]")
            at, low = self.at, self.member()
            if self.peek() == "-" and not self.source.startswith("-]", self.at):
                self.at += 1
                if not self.peek():
                    continue
                high = self.member()
                if _is_one(low) and _is_one(high):
                    if low[0][0] > high[0][0]:
                        self.fail("a range from a higher to a lower character; turn it round", at)
                    found.append((low[0][0], high[0][0]))
                else:
                    found += [*low, *_one(ord("-")), *high]
            else:
                found += low
        ranges = self.cased(union(found))
        return complement(ranges) if negated else ranges

    def member(self) -> Ranges:
        start = self.at
        character = self.peek()
        self.at += 1
        if character != "\\":
            return _one(ord(character))
        if self.take("b"):
            return _one(8)
        return self.escape(start, in_class=True)

    def escape(self, start: int, in_class: bool = False) -> Ranges:
        code = self.match(_CODE)
        if code:
            return _one(self.code(code, start))
        named = self.match(_PROPERTY)
        if named:
            ranges = charset.category(named[2])
            if ranges is None:
                self.fail(
                    f"\\{named[0]} isn't to be had, general categories such as \\p{{Lu}} are; "
                    "write the ranges",
                    start,
                )
            return complement(ranges) if named[1] == "P" else ranges
        letter = self.peek()
        self.at += 1
        if letter in charset.NAMED:
            return charset.NAMED[letter]
        if letter in _CONTROLS:
            return _one(_CONTROLS[letter])
        if letter == "0" and not self.peek().isdecimal():
            return _one(0)
        if not in_class and letter in tuple("bB"):
            self.refuse(f"a word border, \\{letter}", start)
        if not in_class and (letter in tuple("123456789") or letter == "k"):
            self.refuse(f"a back reference, \\{letter}", start)
        if not letter or (letter.isascii() and letter.isalnum()):
            self.fail(
                f"\\{letter} is no escape; {_ADVICE.get(letter, 'write it otherwise')}", start
            )
        return _one(ord(letter))

    def code(self, found: re.Match[str], start: int) -> int:
        if found[4]:
            return ord(found[4]) % 32
        value = int(found[1] or found[2] or found[3], 16)
        if value > 0x10FFFF:
            self.fail("there is no character of that number", start)
        if found[2] and 0xD800 <= value < 0xDC00:
            low = self.match(_LOW_HALF)
            if low:
                return 0x10000 + ((value - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return value


def _one(character: int) -> Ranges:
    return ((character, character),)


def _is_one(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
