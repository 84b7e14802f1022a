"""The words of a shell script, which is read and never executed.

Variables have the values that the script assigns. Branches that do not run are left out. Options under a condition that
cannot be known, in a loop or in a function get the value CONDITION, so that no reader takes them for certain.
"""

import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

END, CONDITION = "\n", "${CONDITION}"  # END stands for an operator or newline
_OPERATORS = ";&|<>\n"
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\]|:-([\w./]*))?\})")  # ${NAME:-default} too
_COMMENT = re.compile(r"(?m)^[ \t]*#.*$|[ \t]#[^\"'\n]*$|`#[^`\n]*`")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    **{"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt},
    **{"-le": operator.le, "-gt": operator.gt, "-ge": operator.ge},
}


def script_words(text: str) -> Iterator[str]:
    """Yield the words of the commands and arrays of a script, and END. An empty word marks the end of an array, and so
    of its last argument. Raise ValueError if a quotation is not closed."""
    text = _COMMENT.sub("", text).replace("\\\n", " ").replace(" 2>", " >").replace("$#", "$@").replace("${#", "${")
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    values, array, value, depth, blocks = dict[str, str](), "", "", 0, _Blocks()
    for token in lexer:
        word = _VARIABLE.sub(
            lambda m: values.get(m[1] or m[2], m[0] if m[3] is None else m[3]).strip() or m[3] or "", token
        )
        if (not array and blocks.contain(token, word)) or blocks.runs is False:
            continue
        is_certain = blocks.runs is True
        word = word if is_certain else _conditional(word)
        if not array and (assignment := re.match(r"(\w+)(\+?)=(\(?)", word)):
            name, is_addition, bracket = assignment.groups()
            word, array, depth = word[assignment.end() :], name if bracket else "", 0
            is_list, old = bool(bracket) or "--" in word, values.get(name, "")
            value = old if is_addition else "" if is_certain else _conditional(old)
            if not array:
                is_unknown = not is_list and (not is_certain or re.search("[$`]", word))
                values[name] = f"${{{name}}}" if is_unknown else f"{value} {word}"
                continue
        if token and not token.strip(_OPERATORS):
            yield from () if array else (END,)
            continue
        depth += word.count("(") - word.count(")")
        ends = word == ")" or (array != "" and depth < 0)
        word = word.removesuffix(")") if ends else word
        value += f" {word}"
        yield from word.split()
        if ends:
            values[array], array = value, ""
            yield ""


def _conditional(text: str) -> str:
    return re.sub(r"(?<![^\s=(])(--[\w-]+)(=\${CONDITION} |=|)", rf"\1={CONDITION} ", text)


class _Blocks:
    """The blocks around a word of a script: branches, loops, functions and groups. `_runs`: whether each block runs;
    `_others`: whether later branches of the same `if` may run; `_guard`: whether the command after && or || runs."""

    def __init__(self) -> None:
        self._runs, self._others = list[bool | None](), list[bool | None]()
        self._command, self._test, self._is_function = list[str](), list[str](), False
        self._guard: bool | None = True
        self._status: bool | None = True  # of the commands before && or ||

    @property
    def runs(self) -> bool | None:
        """Whether the word runs; None: this is not known."""
        return _all(*self._runs, self._guard)

    def contain(self, token: str, word: str) -> bool:
        """Return whether a token belongs to the syntax of blocks. `word`: the token with the values of variables."""
        command, keyword = self._command, "" if self._command else token
        ends_command = token != "" and not token.strip(_OPERATORS) and not set(token) & set("<>")
        self._command = [] if ends_command or keyword in ("then", "else", "do", "{") else [*command, word]
        if self._test and keyword == "then":
            holds, others, self._test = _holds(self._test[1:]), self._others[-1], []
            self._runs[-1], self._others[-1] = _all(others, holds), _all(others, _negated(holds))
        elif self._test:
            self._test.append(word)
        elif keyword == "if" or (keyword == "elif" and self._runs):
            self._test = [keyword]
            if keyword == "if":
                self._open(True)
        elif keyword == "else" and self._runs:
            self._runs[-1] = self._others[-1]
        elif keyword in ("for", "case", "while", "until", "select") or re.fullmatch(r"[\w-]+\(\)\{", keyword):
            self._open(None)
        elif keyword == "function" or re.fullmatch(r"[\w-]+\(\)", keyword):
            self._is_function = True
        elif token == "{" and (keyword or self._is_function):
            self._open(None if self._is_function else self._guard)
        elif keyword in ("fi", "esac", "done", "}"):
            self._runs[-1:], self._others[-1:] = [], []
        else:
            if ends_command:
                self._guard_next(token, command)
            return False
        return True

    def _open(self, runs: bool | None) -> None:
        self._runs.append(runs)
        self._others.append(True)
        self._guard, self._is_function, self._command = True, False, []

    def _guard_next(self, end: str, command: list[str]) -> None:
        """Find out whether the command after `command` and the operator `end` runs."""
        status = None if self._guard is None else _succeeds(command) if self._guard else self._status
        self._status = True
        if end in ("&&", "||"):
            self._status, self._guard = status, status if end == "&&" else _negated(status)
        elif end != "|":
            self._guard = True


def _all(*values: bool | None) -> bool | None:
    return False if False in values else None if None in values else True


def _negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def _succeeds(command: Sequence[str]) -> bool | None:
    """Return whether a command succeeds; None if this is not known. All but tests are taken to succeed."""
    if command[:1] in (["["], ["[["]):
        return _holds(command)
    is_question = command and command[0].startswith(("((", "!", "$", "false", "test", "grep", "command", "which"))
    return None if is_question else True


def _holds(test: Sequence[str]) -> bool | None:
    """Return whether a condition holds; None if this is not known."""
    words = [word for word in test if word.strip(_OPERATORS) or word in ("", "&&", "||")]
    joints = {"&&", "||"}.intersection(words)
    if len(joints) == 1:
        (joint,) = joints
        at, decisive = words.index(joint), joint == "||"
        sides = _holds(words[:at]), _holds(words[at + 1 :])
        return decisive if decisive in sides else None if None in sides else not decisive
    if words[:1] not in (["["], ["[["]) or any(re.search("[$`]", word) for word in words):
        return None
    match words[1:-1]:
        case ["!", *inner]:
            return _negated(_holds([words[0], *inner, words[-1]]))
        case ["-z" | "-n" as sign, value]:
            return (value == "") == (sign == "-z")
        case [value, "=" | "==" | "!=" as sign, other]:
            is_equal = fnmatchcase(value, other) if words[0] == "[[" else value == other
            return is_equal == (sign != "!=")
        case [value, sign, other] if sign in _COMPARISONS and value.isdecimal() and other.isdecimal():
            return _COMPARISONS[sign](int(value), int(other))
    return None
