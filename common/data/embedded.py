"""Generated parallel text, for runs without download.

A generator takes the name of a split and returns the source and the target sentences. Its name ends with the two
languages.
"""

import datetime
import random
import re
import zlib
from collections.abc import Callable
from functools import lru_cache

from common.errors import UserError

_SIZES = {"test": 500, "valid": 500, "train": 20_000}

_SHARED_NUMBERS = 100
"""Smaller numbers occur in every split, each other number in one split only."""

_CITIES = {
    "Berlin": "Berlin",
    "München": "Munich",
    "Wien": "Vienna",
    "Köln": "Cologne",
    "Zürich": "Zurich",
    "Hamburg": "Hamburg",
    "Bern": "Bern",
    "Leipzig": "Leipzig",
    "Genf": "Geneva",
    "Nürnberg": "Nuremberg",
}
_PEOPLE = {
    "Anna": "Anna",
    "Thomas": "Thomas",
    "Herr Weber": "Mr. Weber",
    "Frau Schmidt": "Ms. Schmidt",
    "die Lehrerin": "the teacher",
    "der Arzt": "the doctor",
    "mein Bruder": "my brother",
    "unsere Nachbarin": "our neighbor",
}
_THINGS = {
    "das Buch": "the book",
    "der Tisch": "the table",
    "die Lampe": "the lamp",
    "das Fahrrad": "the bicycle",
    "der Mantel": "the coat",
    "die Jacke": "the jacket",
    "der Koffer": "the suitcase",
    "die Uhr": "the clock",
}
_PLURALS = {
    "Bücher": "books",
    "Stühle": "chairs",
    "Lampen": "lamps",
    "Fahrräder": "bicycles",
    "Häuser": "houses",
    "Fenster": "windows",
    "Bäume": "trees",
    "Autos": "cars",
    "Bilder": "pictures",
    "Karten": "tickets",
}
_EVENTS = {
    "das Konzert": "the concert",
    "die Sitzung": "the meeting",
    "der Kurs": "the course",
    "die Prüfung": "the exam",
    "das Spiel": "the game",
    "die Feier": "the party",
}

# A name in braces is a method of _Phrases; a digit distinguishes two uses. Each template has thousands of sentences,
# more than validation and test use.
_TEMPLATES = (
    ("am {date} kostete {thing} {money}.", "on {date}, {thing} cost {money}."),
    ("am {dated_weekday} beginnt {event}.", "{event} starts on {dated_weekday}."),
    ("{event} beginnt am {weekday} um {time}.", "{event} starts on {weekday} at {time}."),
    ("{event} am {date} dauerte {duration}.", "{event} on {date} lasted {duration}."),
    (
        "{event} findet nicht am {weekday} statt, sondern am {date}.",
        "{event} does not take place on {weekday} but on {date}.",
    ),
    ("{person} kam am {date} nach {city}.", "{person} came to {city} on {date}."),
    ("war {person} am {date} in {city}?", "was {person} in {city} on {date}?"),
    (
        "{person} wurde {spoken_year} in {city} geboren.",
        "{person} was born in {spoken_year} in {city}.",
    ),
    (
        "{person} wohnt seit {year} im {ordinal}n Stock.",
        "{person} has lived on the {ordinal} floor since {year}.",
    ),
    ("{person} kaufte {cardinal} {plural}.", "{person} bought {cardinal} {plural}."),
    ("{person} hat am {day} Geburtstag.", "{person} has a birthday on {day}."),
    ("{person} lief {distance} in {duration}.", "{person} ran {distance} in {duration}."),
    ("der Zug nach {city} fährt um {time} ab.", "the train to {city} leaves at {time}."),
    (
        "der Film aus dem Jahr {spoken_year} beginnt um {time}.",
        "the film from the year {spoken_year} starts at {time}.",
    ),
    ("bitte rufen Sie uns am {day} um {time} an.", "please call us on {day} at {time}."),
    (
        "in {city1} ist es {time1}, in {city2} ist es {time2}.",
        "it is {time1} in {city1}, it is {time2} in {city2}.",
    ),
    ("von {city1} nach {city2} sind es {distance}.", "it is {distance} from {city1} to {city2}."),
    (
        "im Jahr {year} hatte der Verein in {city} {number} Mitglieder.",
        "in {year}, the club in {city} had {number} members.",
    ),
    ("heute ist {weekday}, der {date}.", "today is {weekday}, {date}."),
    (
        "am {ordinal}n Tag waren es {temperature} in {city}.",
        "on the {ordinal} day it was {temperature} in {city}.",
    ),
    (
        "die {ordinal} Sitzung des Jahres {year} dauerte {duration}.",
        "the {ordinal} meeting of the year {year} lasted {duration}.",
    ),
    ("{thing} wiegt {weight} und kostet {money}.", "{thing} weighs {weight} and costs {money}."),
    (
        "im Jahr {year} waren {percent} der {plural} in {city} neu.",
        "in {year}, {percent} of the {plural} in {city} were new.",
    ),
    (
        "die Rechnung vom {short_date} beträgt {money}.",
        "the bill of {short_date} comes to {money}.",
    ),
    (
        "bis zum {short_date} brauchen wir noch {money}.",
        "we still need {money} by {short_date}.",
    ),
    (
        "wir haben {number} {plural} für {money} verkauft.",
        "we sold {number} {plural} for {money}.",
    ),
    (
        "wie viel kosten {number} {plural} in {city}?",
        "how much do {number} {plural} cost in {city}?",
    ),
    (
        "seit {year} ist {city} um {percent} gewachsen.",
        "since {year}, {city} has grown by {percent}.",
    ),
    ("die richtige Antwort ist {cardinal}.", "the correct answer is {cardinal}."),
    ("die Zahl {spelling}.", "the number {spelling}."),
)


def numbers_de_en(split: str, seed: int = 0) -> tuple[list[str], list[str]]:
    """Returns German and English sentences about numbers, dates, times, money and measures.

    A German sentence has one translation. Splits share no sentence, in either language, and no number from 100 on.

    Args:
        split: "train" (20,000 pairs), "valid" or "test" (500 each).
        seed: of the sentences.

    Returns:
        The German and the English sentences.

    Raises:
        UserError: the split is unknown.
    """
    if split not in _SIZES:
        raise UserError(
            f"embedded:numbers_de_en has no split {split!r}; there are: {', '.join(_SIZES)}"
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
    """Draws pairs of German and English phrases for one split."""

    def __init__(self, split: str, seed: int) -> None:
        # Imported here because the import is slow and most commands generate no text.
        from babel import dates, numbers, units
        from num2words import num2words

        self._split, self._seed = split, seed
        self._random = random.Random(f"{split} {seed}")
        self._calendars = [
            (dates.get_month_names(locale=language), dates.get_day_names(locale=language))
            for language in ("de", "en")
        ]
        self._format_time, self._format_currency, self._format_unit, self._words = (
            lru_cache(maxsize=None)(function)
            for function in (
                dates.format_time,
                numbers.format_currency,
                units.format_unit,
                num2words,
            )
        )

    def sentence(self) -> tuple[str, str]:
        """Returns a pair of sentences without repeated phrases."""
        german, english = self._random.choice(_TEMPLATES)
        fields = re.findall(r"{(\w+)}", german)
        phrases: dict[str, tuple[str, str]] = {}
        while len(set(phrases.values())) < len(fields):
            phrases = {field: getattr(self, field.rstrip("12"))() for field in fields}
        german = german.format(**{field: pair[0] for field, pair in phrases.items()})
        english = english.format(**{field: pair[1] for field, pair in phrases.items()})
        return german[0].upper() + german[1:], english[0].upper() + english[1:]

    def city(self) -> tuple[str, str]:
        return self._random.choice(list(_CITIES.items()))

    def person(self) -> tuple[str, str]:
        return self._random.choice(list(_PEOPLE.items()))

    def thing(self) -> tuple[str, str]:
        return self._random.choice(list(_THINGS.items()))

    def plural(self) -> tuple[str, str]:
        return self._random.choice(list(_PLURALS.items()))

    def event(self) -> tuple[str, str]:
        return self._random.choice(list(_EVENTS.items()))

    def date(self) -> tuple[str, str]:
        return self._format_date(
            "{date.day}. {month} {date.year}", "{month} {date.day}, {date.year}"
        )

    def short_date(self) -> tuple[str, str]:
        return self._format_date("{date:%d.%m.%Y}", "{date:%m/%d/%Y}")

    def day(self) -> tuple[str, str]:
        return self._format_date("{date.day}. {month}", "{month} {date.day}")

    def weekday(self) -> tuple[str, str]:
        return self._format_date("{weekday}", "{weekday}")

    def dated_weekday(self) -> tuple[str, str]:
        return self._format_date(
            "{weekday}, den {date.day}. {month} {date.year}",
            "{weekday}, {month} {date.day}, {date.year}",
        )

    def time(self) -> tuple[str, str]:
        moment = datetime.time(self._random.randrange(24), self._random.randrange(0, 60, 5))
        return (
            self._format_time(moment, "HH:mm 'Uhr'", locale="de"),
            self._format_time(moment, "h:mm a", locale="en"),
        )

    def year(self) -> tuple[str, str]:
        year = str(self._random.randrange(1950, 2030))
        return year, year

    def spoken_year(self) -> tuple[str, str]:
        return self._spell(self._random.randrange(1950, 2030), "year")

    def cardinal(self) -> tuple[str, str]:
        return self._spell(self._number(), "cardinal")

    def ordinal(self) -> tuple[str, str]:
        return self._spell(self._random.randrange(1, 100), "ordinal")

    def number(self) -> tuple[str, str]:
        return self._format_number(self._number())

    def spelling(self) -> tuple[str, str]:
        number = self._number()
        digits, words = self._format_number(number), self._spell(number, "cardinal")
        return f"{digits[0]} schreibt man {words[0]}", f"{digits[1]} is written {words[1]}"

    def percent(self) -> tuple[str, str]:
        number = self._random.randrange(2, 100)
        return f"{number} %", f"{number}%"

    def money(self) -> tuple[str, str]:
        amount = self._random.randrange(2, 100) + self._random.choice((0, 0.25, 0.5, 0.75, 0.99))
        currency = self._random.choice(("EUR", "USD", "CHF"))
        style = self._random.choice(("name", "standard")) if currency == "EUR" else "name"
        german, english = (
            self._format_currency(amount, currency, locale=language, format_type=style)
            for language in ("de", "en")
        )
        return german.replace("\xa0", " "), english

    def distance(self) -> tuple[str, str]:
        return self._measure("length-kilometer", "length-meter")

    def weight(self) -> tuple[str, str]:
        return self._measure("mass-kilogram", "mass-gram")

    def duration(self) -> tuple[str, str]:
        return self._measure("duration-hour", "duration-minute", "duration-second")

    def temperature(self) -> tuple[str, str]:
        return self._measure("temperature-celsius")

    def _number(self) -> int:
        """Returns a number of this split with two, three or four digits (equally likely)."""
        first = self._random.choice((_SHARED_NUMBERS // 10, _SHARED_NUMBERS, 10 * _SHARED_NUMBERS))
        while True:
            number = self._random.randrange(first, 10 * first)
            share = zlib.crc32(f"{self._seed} {number}".encode()) % 20
            owner = {0: "test", 1: "valid"}.get(share, "train")
            if number < _SHARED_NUMBERS or owner == self._split:
                return number

    def _spell(self, number: int, style: str) -> tuple[str, str]:
        return self._words(number, lang="de", to=style), self._words(number, lang="en", to=style)

    def _format_number(self, number: int) -> tuple[str, str]:
        english = f"{number:,}"
        return english.replace(",", "."), english

    def _format_date(self, german: str, english: str) -> tuple[str, str]:
        first, last = datetime.date(1950, 1, 1).toordinal(), datetime.date(2030, 1, 1).toordinal()
        date = datetime.date.fromordinal(self._random.randrange(first, last))
        phrases = (
            pattern.format(date=date, month=months[date.month], weekday=weekdays[date.weekday()])
            for pattern, (months, weekdays) in zip((german, english), self._calendars, strict=True)
        )
        return next(phrases), next(phrases)

    def _measure(self, *units: str) -> tuple[str, str]:
        number, unit = self._random.randrange(2, 100), self._random.choice(units)
        return (
            self._format_unit(number, unit, "long", locale="de"),
            self._format_unit(number, unit, "long", locale="en"),
        )


EMBEDDED: dict[str, Callable[[str], tuple[list[str], list[str]]]] = {
    "numbers_de_en": numbers_de_en,
}
"""Generators by name."""
