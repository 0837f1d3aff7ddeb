r"""Parses a short answer: its mathematics, without words, unit and typographic LaTeX.

Words before and after are skipped: "therefore 1,072 apples" is 1072, unit apples. Words that change the meaning (not,
at least, between), words in the middle, and several formulas among words make a text unreadable: it equals only the
identical text. "and" and "or" make a list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 400
"""Longer texts are not read: no answer is that long, and parsing time grows superlinearly."""
_MAX_DIGITS = 200  # big integers are slow
_MAX_BOXES, _MAX_GAP = 20, 60  # boxes in a list; characters between two boxes

_BOXED = r"\boxed"
_BRACE = re.compile(r"\\[{}]|[{}]")
_BETWEEN_BOXES = re.compile(r"\\text|[\s$,;.{}\\()\[\]]|\b(?:and|or)\b|\b\w+\s*=")

_SIGNS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "√": r"\sqrt"}
    | {"π": r"\pi ", "∞": r"\infty ", "∅": r"\emptyset ", "\u2124": r"\mathbb{Z}", "°": r"^\circ "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "\u222a": r"\cup "}
    | {"½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34", "⅓": r"\frac13", "⅔": r"\frac23"}
    | dict.fromkeys("\u2009\u202f\u00a0", r"\,")
    | dict.fromkeys("€£¥₹", "")
)
_SUPERSCRIPT = re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_SET_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|,\\!|\\[,:;])(?=\d{3}(?!\d))")
_SPACE = re.compile(r"(?<!\\)\\[,:; ]|\\q?quad(?![A-Za-z])|~")
_NOISE = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\!|\\\$|\*\*|__|`")
_TEXT = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_BEFORE = re.compile(r"\s+(?=\^|[.,;:](?!\d))")
_SAME = ((r"\%", "%"), ("{,}", ","), (r"\varnothing", r"\emptyset"), ("infinity", r"\infty"))
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_DELIMITER = re.compile(r"\$|\\[()\[\]]")
_BLANK = re.compile(r"(?<![\dA-Za-z])\s+|\s+(?![\dA-Za-z])|(?<=\d)\s+(?=[A-Za-z])|(?<=[A-Za-z])\s+(?=\d)")

_MINUS = re.compile(r"\b(?:minus|negative)\s+(?=[\d.\\])", re.IGNORECASE)
_ANY_INTEGER = re.compile(  # ", k \in \mathbb{Z}", "where k is an integer"
    r"[,;]?\s*\(?(?:(?:where|for|with|any|all|some|integers?)\s+)*\$?([a-zA-Z])\$?\s*"
    r"(?:\\in\s*\$?(?:\\mathbb|\\mathbf)?\s*\{?Z\}?|(?:is|are)\s+(?:an|any)\s+integer)\$?\)?[.\s]*$"
)
_ENDS = ".,;:!?()\"'"
_CLAUSE_ENDS = (".", ",", ";", ":", "!")
_WORD = re.compile(r"[(\"']*[A-Za-z][A-Za-z']+(?:-[A-Za-z']+)*[,.;:!?)\"']*")
_POWER = r"(?:\^\{?-?\d\}?)?"
_UNIT = re.compile(
    rf"(?:[A-Za-z]{{2,}}|(?:[A-Za-z]\.)+[A-Za-z]\.?|[A-Za-z]+(?:[/-][A-Za-z]+)+|[mgshlLNJWVKC](?:/[a-z]+)?){_POWER}[,.;:!?)]*"
)
_PRONOUNS = ("a", "A", "I")
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc log ln exp sqrt max min gcd lcm arcsin arccos arctan".split()  # noqa: SIM905
)
_LISTING = {"and": ",", "or": ",", "equals": "=", "is": "="}
_HEDGES = frozenset(
    "not never cannot least most than between over under above below up or and either neither nor any except wrong "  # noqa: SIM905
    "incorrect squared cubed factorial dozen half twice double plus minus root".split()
)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PERCENT = ("percent", "percentage", "pct")
_MATHEMATICAL = re.compile(r"[\d\\(\[{=<>^]")
_OPERATORS = ("+", "-", "*", "/", "=", "^", "<", ">", ",")

_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}|(\d))(?:\{([^{}]+)\}|(\d))")
_MIXED = re.compile(r"^([+-]?)(\d+)(?:\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))| (\d+)/(\d+))$")
_DEGREES = re.compile(r"\^(?:\{\\circ\}|\\circ)")
_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(?:,\d{3})+(?!\d)")
_TIMES_TEN = re.compile(
    r"(?<=[\d.])\s*(?:\\times|\\cdot|[\u00d7\u00b7*])\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))"
)
_DECIMAL = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?"
_NUMBER = re.compile(rf"({_DECIMAL})(?:/({_DECIMAL}))?")
_RECURRING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline\{(\d+)\}")


@dataclass(frozen=True, slots=True)
class Reading:
    """`text`: the whole, with blanks only between two digits or two letters. `core`: its mathematics; empty if
    unreadable. `unit`: in lower case. `number`: value of the core; with `is_percent`, before the division by 100.
    `integer`: the letter declared to be any integer."""

    text: str
    core: str = ""
    unit: str = ""
    is_percent: bool = False
    number: Fraction | None = None
    integer: str = ""


def read(text: str) -> Reading:
    """Parses a short text."""
    held = boxed(text)
    text = text if held is None else held
    if len(text) > MAX_CHARS:
        return Reading(" ".join(text.split()).strip("$*. "))
    text = without_markup(text)
    # `text` keeps everything for an exact comparison; `core` and `unit` are for one by value.
    whole = _squeezed(_DELIMITER.sub("", text)).lstrip("*_\"' ").rstrip(".,;:*_\"' ")
    condition = _ANY_INTEGER.search(text)
    stated = _stated_formula(text[: condition.start()] if condition else text)
    core, unit = _between_words(_DELIMITER.sub("", _MINUS.sub("-", stated)).rstrip(" .,;:").split())
    core = _DEGREES.sub("", _squeezed(core).rstrip(".,;:"))
    is_percent = core.endswith("%") or any(word in _PERCENT for word in unit[:1])
    core = core.rstrip("%")
    number = number_of(core)
    if number is not None and unit and unit[0] in _POWERS_OF_TEN:
        number *= 10 ** _POWERS_OF_TEN[unit.pop(0)]
    counted = "" if is_percent else " ".join(word.removesuffix("s") for word in unit)
    return Reading(whole, core, counted, is_percent, number, condition[1] if condition else "")


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{}`; adjacent boxes, as in `\boxed{1} and \boxed{2}`, make a list.

    Single pass: a policy may write any number of unclosed boxes.
    """
    opened: list[int] = []
    boxes: list[tuple[int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if text.endswith(_BOXED, 0, start):
                boxes.append((start, brace.start()))
    if not boxes:
        return None
    start, end = max(boxes)
    held = [text[start + 1 : end].strip()]
    for earlier, closed in sorted(boxes, reverse=True)[1:_MAX_BOXES]:
        gap = text[closed + 1 : start - len(_BOXED)]
        if closed >= start or len(gap) > _MAX_GAP or _BETWEEN_BOXES.sub("", gap):
            break
        start, content = earlier, text[earlier + 1 : closed].strip()
        if content not in held:
            held.insert(0, content)
    return ", ".join(held)


def without_markup(text: str) -> str:
    """`text` with Unicode signs as LaTeX, without typographic LaTeX; formula delimiters stay."""
    text = _SUPERSCRIPT.sub(lambda found: f"^{{{found[0].translate(_RAISED)}}}", text).translate(_SIGNS)
    text = _TEXT.sub(r" \1 ", _NOISE.sub("", _SPACE.sub(" ", _SET_THOUSANDS.sub("", text))))
    for written, same in _SAME:
        text = text.replace(written, same)
    return _BEFORE.sub("", text)


def with_plain_fractions(text: str) -> str:
    r"""`text` with a/b for every \frac{a}{b}."""
    return _FRACTION.sub(_quotient, text)


def with_exponents(text: str) -> str:
    r"""`text` with 3e5 for every 3 \times 10^5."""
    return _TIMES_TEN.sub(lambda power: f"e{power[1] or power[2]}", text)


def number_of(core: str) -> Fraction | None:
    """The value of a text without words; None if it is no number."""
    if len(core) > _MAX_DIGITS:
        return None
    if core.startswith("(") and core.endswith(")"):
        core = core[1:-1]
    if recurring := _RECURRING.fullmatch(core):
        sign, whole, fixed, period = recurring.groups()
        nines = (10 ** len(period) - 1) * 10 ** len(fixed)
        return Fraction(int(sign + "1") * (int(whole + fixed + period) - int(whole + fixed or 0)), nines)
    core = with_plain_fractions(with_exponents(_MIXED.sub(_improper, core)))
    match = _NUMBER.fullmatch(_THOUSANDS.sub(lambda found: found[0].replace(",", ""), core))
    if match is None:
        return None
    denominator = Fraction(match[2]) if match[2] else Fraction(1)
    return Fraction(match[1]) / denominator if denominator else None


def _stated_formula(text: str) -> str:
    """The only formula among words; the whole text if there are no words, or if the formula is a number (which may have
    a unit); empty if ambiguous."""
    formulas = _FORMULA.findall(text)
    outside = [word.strip(_ENDS).lower() for word in _FORMULA.sub(" ", text).split()]
    words = {word for word in outside if len(word) > 1 and word.isalpha() and word not in _LISTING}
    if not formulas or not words:
        return text
    if len(formulas) > 1 or words & _HEDGES or any(word[:1].isdigit() for word in outside):
        return ""
    formula = next(filter(None, formulas[0]))
    return text if number_of(_squeezed(formula)) is not None else formula


def _between_words(tokens: list[str]) -> tuple[str, list[str]]:
    """(the mathematics between the words, the unit: the words after it, up to the end of the clause)."""
    # Phase 1: skip words from both ends.
    first = 0
    while first < len(tokens) and (_is_word(tokens[first]) or _is_pronoun(tokens, first)):
        first += 1
    if 0 < first < len(tokens) and tokens[first].startswith("="):
        first -= 1  # a name of several letters, as in `area = 5`
    last = len(tokens)
    while last > first + 1 and (_is_unit(tokens[last - 1], tokens[last - 2]) or _is_pronoun(tokens, last - 1)):
        last -= 1
    core, around = tokens[first:last], tokens[:first] + tokens[last:]
    # Phase 2: give up if the skipped words may change the meaning.
    if any(word.strip(_ENDS).lower() in _HEDGES or "n't" in word for word in around):
        return "", []
    if around and not _MATHEMATICAL.search(" ".join(core)):
        return "", []
    if (core[:1] and around and core[0] in _OPERATORS) or (core[-1:] and core[-1] in _OPERATORS):
        core, around, last = tokens, [], len(tokens)
    core = [_LISTING.get(token.lower(), token) for token in core]
    if len(core) > 1 and any(map(_is_word, core)):
        return "", []
    # Phase 3: the words after the mathematics are its unit.
    unit: list[str] = []
    if core and not core[-1].endswith(_CLAUSE_ENDS):
        for word in tokens[last:]:
            unit.append(word.strip(_ENDS).lower())
            if word.endswith(_CLAUSE_ENDS):
                break
    return " ".join(core), unit


def _is_word(token: str) -> bool:
    """Two letters or more, except functions and capitals (names of points)."""
    return bool(_WORD.fullmatch(token)) and not token.isupper() and token.strip(_ENDS).lower() not in _FUNCTIONS


def _is_pronoun(tokens: list[str], at: int) -> bool:
    return tokens[at] in _PRONOUNS and at + 1 < len(tokens) and _is_word(tokens[at + 1])


def _is_unit(token: str, before: str) -> bool:
    """A word; or, after a number or a word, a possible unit."""
    can_be = _UNIT.fullmatch(token) is not None and token.lower() not in _FUNCTIONS
    return _is_word(token) or (can_be and (before[-1] in "0123456789})" or before.endswith("circ") or _is_word(before)))


def _squeezed(text: str) -> str:
    """`text` without blanks, except between two digits ("12 34" is not 1234) and between two letters."""
    return _BLANK.sub("", " ".join(text.split()))


def _improper(mixed: re.Match[str]) -> str:
    sign, whole, *parts = mixed.groups()
    numerator, denominator = (part for part in parts if part)
    return f"{sign}{int(whole) * int(denominator) + int(numerator)}/{denominator}"


def _quotient(fraction: re.Match[str]) -> str:
    """a/b for plain numbers; longer parts get parentheses."""
    above, below = fraction[1] or fraction[2], fraction[3] or fraction[4]
    return "/".join(part if re.fullmatch(_DECIMAL, part) else f"({part})" for part in (above, below))
