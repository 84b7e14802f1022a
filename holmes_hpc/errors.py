"""The errors of all packages: one line with what is wrong, where, and what to do; and the exit code."""

import contextlib
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

# (whether it is wrong, what is wrong, hint), and the place if it differs from that of other cases.
Case = tuple[Any, str, str] | tuple[Any, str, str, str]


class HolmesError(Exception):
    """Bad input or a bad site. `what`: what is wrong; `where`: its place; `hint`: what to do. Exit code 2.

    ``str(error)`` is always one line: ``where: what; hint``. `others`: further mistakes in the same input."""

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        self.others: tuple[HolmesError, ...] = ()
        text = f"{where}: {what}" if where else what
        super().__init__(" ".join((f"{text}; {hint}" if hint else text).split()))

    @classmethod
    def refuse(cls, where: str, *cases: Case) -> None:
        """Raise this error for the first wrong case. `where`: the place of cases that name none."""
        for is_wrong, what, hint, *place in cases:
            if is_wrong:
                raise cls(what, where=place[0] if place else where, hint=hint)

    @classmethod
    def refuse_unknown(cls, what: str, names: Iterable[Any], choices: Collection[str], where: str) -> None:
        """Raise this error for the first of `names` that is not in `choices`. `what`: the text before the name."""
        for name in names:
            if name not in choices:
                raise cls(f"{what} {name!r}", where=where, hint=nearest(str(name), choices))

    @classmethod
    @contextlib.contextmanager
    def instead_of(
        cls, *errors: type[BaseException], where: object, hint: str | None = None, what: str = ":"
    ) -> Iterator[None]:
        """Raise this error in place of any of `errors` that the block raises. `what`: the text of this error; if it
        ends in a colon, the text of the original error follows. `hint`: None keeps the hint of the original error."""
        try:
            yield
        except errors as e:
            cause = getattr(e, "what", None) or getattr(e, "strerror", None) or str(e)
            text = f"{what} {cause}".removeprefix(": ") if what.endswith(":") else what
            raise cls(text, where=str(where), hint=getattr(e, "hint", "") if hint is None else hint) from e

    def moved(self, place: Callable[[str], str]) -> "HolmesError":
        """Return a copy of this error and its `others` with a new `where`. `place`: the old `where` -> the new one."""
        error = type(self)(self.what, where=place(self.where), hint=self.hint)
        error.others = tuple(other.moved(place) for other in self.others)
        return error


@contextlib.contextmanager
def collected(errors: list[HolmesError]) -> Iterator[None]:
    """Catch a HolmesError that the block raises, and add it and its `others` to `errors`."""
    try:
        yield
    except HolmesError as e:
        errors += [e, *e.others]


def raise_all(errors: Sequence[HolmesError]) -> None:
    """Raise the first of `errors`, with the rest in its `others`. Do nothing without any."""
    if errors:
        errors[0].others = tuple(errors[1:])
        raise errors[0]


class SiteError(HolmesError):
    """The site (Slurm's output, a site file, a node's NICs) cannot be used as it is."""


class PlanError(HolmesError):
    """A model, a layout or a plan is impossible, or a plan is for another site."""


class ConfigError(HolmesError):
    """An option, a named model or a batch does not exist or does not fit."""


class DataError(HolmesError):
    """A data set is missing, truncated, too short, or does not fit the model."""


class SubmissionError(HolmesError):
    """Slurm rejected, or would reject, the job."""


class RecordError(HolmesError):
    """A run directory is missing, unreadable, or from a newer version."""


class TestbedError(HolmesError):
    """The testbed cannot be created, or is not up."""

    __test__ = False  # not a pytest class


class RunFailed(HolmesError):
    """A job started and failed. Exit code 1."""

    exit_code = 1


class NetworkError(RunFailed):
    """A NIC, a link or a process group fails, or is not what the plan needs."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return a hint for an unknown name: `did you mean X?` if one of `choices` is similar, else all choices."""
    names = sorted(choices)
    similar = [choice for choice in names if is_typo(name, choice)] or difflib.get_close_matches(name, names, 1, 0.75)
    return did_you_mean(similar) if similar else f"choose one of: {', '.join(names)}"


def did_you_mean(names: Sequence[str]) -> str:
    """Return a hint that offers `names`, such as `did you mean 'a', 'b' or 'c'?`."""
    *others, last = map(repr, names)
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def is_typo(word: str, name: str) -> bool:
    """Return whether `word` is `name` with one letter dropped, added, replaced, or swapped with the next letter."""
    i = next((i for i, (a, b) in enumerate(zip(word, name, strict=False)) if a != b), min(len(word), len(name)))
    tails = ((1, 1), (0, 1), (1, 0))  # letters to skip (in word, in name): one is replaced, dropped or added
    is_swapped = word[i : i + 2] == name[i : i + 2][::-1] and word[i + 2 :] == name[i + 2 :]
    return is_swapped or any(word[i + a :] == name[i + b :] for a, b in tails)


def rounded(number: float) -> str:
    """Return a number with three digits, or as a whole number from 1,000 on: "0.0123", "56.2", "1,104"."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 node", "2 nodes", "3 micro-batches"."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
