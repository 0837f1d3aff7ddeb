r"""Tells an answer from a question that is said again: `17 \cdot 23` is worth 391 and answers nothing. Pure.

A policy learns to copy sooner than to compute. So an answer must leave nothing to compute that the truth does not leave
either, and must not be an expression of the question, unless the truth is written so.
"""

from __future__ import annotations

import re

from asyncrl.rewards.math_reading import number_of, with_plain_fractions, without_markup

_OPERATORS = re.compile(  # of calculus, and determinants
    r"\\(?:[io]*int|sum|prod|lim|limsup|liminf|det)(?![A-Za-z])|[\u222b\u2211\u220f]|[vV]matrix"
    r"|(?<![A-Za-z])(?:d|\\partial)[^/]*/\(?(?:d|\\partial ?)[a-z]|\\frac d\(?d[a-z]"
)
_FUNCTIONS = re.compile(
    r"\\?(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![a-z])|\\?(?:log|ln|exp|max|min|gcd|lcm|binom|lfloor|lceil|floor|ceil)"
    r"|\\(?:[dt]binom|choose|operatorname|[pb]?mod|Gamma|zeta|arg|deg|Re|Im|[lr]?vert)(?![A-Za-z])|[!|\u230a\u2308]"
)
_LITERAL = r"\d+(?:\.\d+)?(?:/\d+)?"
_ARITHMETIC = re.compile(  # of two literals that are no factors of something else; 2^{1/3} is a root
    rf"(?<![\w.^/}}])(?!10\^){_LITERAL}(?:[-+*]|\^\(?(?=\d+(?![\d/.]))){_LITERAL}(?![\w.(\\^/])"
)
_ROOT = re.compile(r"\\?sqrt(?:\[(\d)\])?\(?(\d{1,15})(?![\d.(\\])")
_POWER = re.compile(r"[-+]?(?:10\^[-+]?\d+|\d+\^-1)")
_MIXED = re.compile(r"[-+]?\d+\+(\d+/\d+)")
_OPERATION = re.compile(r"[\w)\]}][-+*/^]|sqrt")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_MIXED_FRACTION = re.compile(r"(?<![A-Za-z\d.^_])(\d+)(?=\\[dt]?frac)")
_DELIMITER = re.compile(r"\$|\\[()\[\]{}]|\\(?:left|right)(?![A-Za-z])")
_TIMES = re.compile(r"\\(?:cdot|times|ast)(?![A-Za-z])\s*")
_DIVIDED = re.compile(r"\\div(?![A-Za-z])\s*")
_ARGUMENT = re.compile(r"(\\sqrt(?:\[\w\])?|[\^_])(?:\{(-?\w+)\}|\s+(?=\w))")
_WRAPPED = re.compile(r"\((-?\\?\w+)\)")
_TOKEN = re.compile(r"\\?[A-Za-z]+|\d+|\S")


def states(answer: str, truth: str, question: str) -> bool:
    """True if `answer`, which equals `truth`, leaves nothing more to compute, and is no expression of the question.

    Args:
        answer, truth: the core of a `Reading`, without a name before it.
        question: the texts of the prompt.
    """
    if _plain(answer) in _plain(truth):
        return True
    return (_is_open(truth, truth) or not _is_open(answer, truth)) and not repeats(answer, truth, question)


def repeats(answer: str, truth: str, question: str) -> bool:
    """True if the question has this expression, as a whole, and the truth has not. A literal number is none."""
    plain = _plain(answer)
    if plain in _plain(truth) or not any(kind.search(plain) for kind in (_OPERATION, _FUNCTIONS, _OPERATORS)):
        return False
    spelled = r"\s*".join(map(re.escape, _TOKEN.findall(plain)))
    return re.search(rf"(?<![\w.^*/+-]){spelled}(?![\w^*/+-])", _plain(question)) is not None


def leaves_arithmetic(core: str) -> bool:
    """True if literal numbers are still to be added, multiplied or raised, or divided without rest."""
    value, plain = number_of(core), _plain(core)
    if value is not None:
        return "/" in plain and value.denominator == 1 and not plain.endswith("/1")
    return _ARITHMETIC.search(plain) is not None


def _is_open(core: str, truth: str) -> bool:
    """True if something is still to be computed, for a truth of that kind."""
    plain = _plain(core)
    if number_of(truth) is not None:
        if mixed := _MIXED.fullmatch(plain):
            return leaves_arithmetic(mixed[1])
        stated = plain.replace(":", "/") if number_of(core) is None else core
        return _POWER.fullmatch(plain) is None and (number_of(stated) is None or leaves_arithmetic(stated))
    if _OPERATORS.search(plain):
        return True
    if set(re.findall("[A-Za-z]", _COMMAND.sub("", truth.replace("sqrt", "")))) - {"e", "i"}:
        return False  # with an unknown: any form of it
    exact = any(round(int(of) ** (1 / int(n or 2))) ** int(n or 2) == int(of) for n, of in _ROOT.findall(plain))
    return exact or leaves_arithmetic(core) or _FUNCTIONS.search(plain) is not None


def _plain(text: str) -> str:
    r"""`text` with a/b for fractions, * for products and parentheses for braces, without those around one word, and
    without delimiters."""
    text = _MIXED_FRACTION.sub(r"\1 ", without_markup(text))
    text = _ARGUMENT.sub(r"\1\2", _DELIMITER.sub(" ", text))
    while (inner := with_plain_fractions(text)) != text:
        text = inner
    text = _TIMES.sub("*", _DIVIDED.sub("/", text)).replace("{", "(").replace("}", ")")
    return _WRAPPED.sub(r"\1", text).strip()
