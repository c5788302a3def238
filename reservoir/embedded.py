"""Generates parallel text, for runs without a download.

A generator is a function from the name of a split to (source sentences, target sentences). Its name ends with the
source and the target language, such as numbers_de_en.
"""

import datetime
import random
import re
import tomllib
import zlib
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files

from common.errors import check

_SIZES = {"test": 500, "valid": 500, "train": 20_000}

_SHARED_NUMBERS = 100
"""Numbers below 100 may occur in every split. A number from 100 on occurs in one split only, unless it is a year."""

Pair = tuple[str, str]
"""A German text and its English translation."""


def numbers_de_en(split: str, seed: int = 0) -> tuple[list[str], list[str]]:
    """Returns German and English sentences about numbers, dates, times, money and measures.

    Each German sentence has one translation. Two splits share no sentence, in either language, and no number from 100
    on, except for years.

    Args:
      split: "train" (20,000 pairs), "valid" or "test" (500 pairs each).
      seed: random seed of the sentences.

    Raises:
      UserError: the split is unknown.
    """
    check(
        split in _SIZES,
        f"embedded:numbers_de_en has no split {split!r}: choose one of {', '.join(_SIZES)} by --split or"
        " --config.data.splits",
    )
    seen: set[str] = set()
    for name, size in _SIZES.items():
        phrases = _Phrases(name, seed)
        pairs = []
        while len(pairs) < size:
            pair = phrases.sentence()
            if seen.isdisjoint(pair):
                seen.update(pair)
                pairs.append(pair)
        if name == split:
            break
    return [german for german, _ in pairs], [english for _, english in pairs]


class _Phrases:
    """Draws random German sentences and their English translations for one split.

    numbers_de_en.toml has the templates, words, date patterns and units. Numbers, dates, times and amounts are random;
    babel and num2words format most of them.
    """

    def __init__(self, split: str, seed: int) -> None:
        # Import babel here, because the import is slow and most commands generate no text.
        from babel import dates, numbers, units
        from num2words import num2words

        tables = tomllib.loads((files("reservoir") / "numbers_de_en.toml").read_text("utf-8"))
        self._templates, self._words = tables["templates"], tables["words"]
        self._dates, self._units = tables["dates"], tables["units"]
        self._split, self._seed = split, seed
        self._random = random.Random(f"{split} {seed}")
        self._calendars = [
            (dates.get_month_names(locale=language), dates.get_day_names(locale=language))
            for language in ("de", "en")
        ]
        functions = (dates.format_time, numbers.format_currency, units.format_unit, num2words)
        cached = map(lru_cache(maxsize=None), functions)
        self._format_time, self._format_currency, self._format_unit, self._to_words = cached

    def sentence(self) -> Pair:
        """Returns a German sentence without repeated phrases, and its English translation."""
        templates = self._random.choice(self._templates)
        fields = re.findall(r"{(\w+)}", templates[0])
        phrases: dict[str, Pair] = {}
        while len(set(phrases.values())) < len(fields):
            phrases = {field: self._phrase(field.rstrip("12")) for field in fields}
        german, english = (
            template.format(**{field: pair[side] for field, pair in phrases.items()})
            for side, template in enumerate(templates)
        )
        return german[0].upper() + german[1:], english[0].upper() + english[1:]

    def _phrase(self, kind: str) -> Pair:
        if kind in self._words:
            return tuple(self._random.choice(self._words[kind]))
        if kind in self._dates:
            return self._date(*self._dates[kind])
        if kind in self._units:
            return self._measure(*self._units[kind])
        return getattr(self, kind)()

    def _date(self, german: str, english: str) -> Pair:
        first, last = datetime.date(1950, 1, 1).toordinal(), datetime.date(2030, 1, 1).toordinal()
        date = datetime.date.fromordinal(self._random.randrange(first, last))
        return tuple(
            pattern.format(date=date, month=months[date.month], weekday=weekdays[date.weekday()])
            for pattern, (months, weekdays) in zip((german, english), self._calendars, strict=True)
        )

    def _measure(self, *units: str) -> Pair:
        number, unit = self._random.randrange(2, 100), self._random.choice(units)
        return tuple(self._format_unit(number, unit, "long", locale=x) for x in ("de", "en"))

    def time(self) -> Pair:
        moment = datetime.time(self._random.randrange(24), self._random.randrange(0, 60, 5))
        german = self._format_time(moment, "HH:mm 'Uhr'", locale="de")
        return german, self._format_time(moment, "h:mm a", locale="en")

    def year(self) -> Pair:
        year = str(self._random.randrange(1950, 2030))
        return year, year

    def spoken_year(self) -> Pair:
        return self._spell(self._random.randrange(1950, 2030), "year")

    def cardinal(self) -> Pair:
        return self._spell(self._number(), "cardinal")

    def ordinal(self) -> Pair:
        return self._spell(self._random.randrange(1, 100), "ordinal")

    def number(self) -> Pair:
        return self._format_number(self._number())

    def spelling(self) -> Pair:
        number = self._number()
        digits, words = self._format_number(number), self._spell(number, "cardinal")
        return f"{digits[0]} schreibt man {words[0]}", f"{digits[1]} is written {words[1]}"

    def percent(self) -> Pair:
        number = self._random.randrange(2, 100)
        return f"{number} %", f"{number}%"

    def money(self) -> Pair:
        amount = self._random.randrange(2, 100) + self._random.choice((0, 0.25, 0.5, 0.75, 0.99))
        currency = self._random.choice(("EUR", "USD", "CHF"))
        style = self._random.choice(("name", "standard")) if currency == "EUR" else "name"
        german, english = (
            self._format_currency(amount, currency, locale=language, format_type=style)
            for language in ("de", "en")
        )
        return german.replace("\xa0", " "), english

    def _number(self) -> int:
        """Returns a random number that may occur in this split. Two, three and four digits are equally likely."""
        first = self._random.choice((_SHARED_NUMBERS // 10, _SHARED_NUMBERS, 10 * _SHARED_NUMBERS))
        while True:
            number = self._random.randrange(first, 10 * first)
            share = zlib.crc32(f"{self._seed} {number}".encode()) % 20
            owner = {0: "test", 1: "valid"}.get(share, "train")
            if number < _SHARED_NUMBERS or owner == self._split:
                return number

    def _spell(self, number: int, style: str) -> Pair:
        return tuple(self._to_words(number, lang=x, to=style) for x in ("de", "en"))

    def _format_number(self, number: int) -> Pair:
        english = f"{number:,}"
        return english.replace(",", "."), english


EMBEDDED: dict[str, Callable[[str], tuple[list[str], list[str]]]] = {"numbers_de_en": numbers_de_en}
"""Name -> generator (see the module docstring)."""
