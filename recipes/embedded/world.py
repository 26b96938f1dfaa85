"""A small world of invented towns and people, the same in every corpus, and some true countries."""

from dataclasses import dataclass
from random import Random

from polybasic.recipes.embedded.lexicon import MONTHS, NAMES, PROFESSIONS, SURNAMES, TOWNS

_WORLD_SEED = 1871
_NUM_PEOPLE = 16
_REGIONS = ("the Northern Hills", "the Amber Plain", "the Great Marsh", "the Long Valley")
_RIVERS = ("Arrow", "Brindle", "Corran", "Dell", "Esk", "Ferris", "Gannet", "Hollow")
_GOODS = ("glass", "wool", "paper", "cheese", "boats", "clocks", "pottery", "honey", "salt", "lace")
_LANDMARKS = (
    "old lighthouse", "stone bridge", "clock tower", "round castle", "botanical garden",
    "wooden theatre", "marble fountain", "harbour market", "windmill", "town library",
    "railway museum", "cathedral",
)  # fmt: skip
_FESTIVALS = ("lantern", "harvest", "kite", "music", "flower", "bread", "boat", "book")
_WORKS = (
    "the novel The Quiet Harbour", "the opera The Winter Bride", "a map of the Great Marsh",
    "the first weather station of the Long Valley", "a famous book of bread recipes",
    "a school for young sailors", "the song The Lark at Noon", "a pocket clock that never stops",
    "the painting Three Grey Herons", "a cure for marsh fever", "a new kind of loom",
    "the longest rope bridge of the Northern Hills",
)  # fmt: skip


@dataclass(frozen=True)
class Town:
    """An invented town."""

    name: str
    region: str
    river: str
    goods: str
    landmark: str
    festival: str
    festival_month: str
    founded: int  # year
    num_people: int


@dataclass(frozen=True)
class Person:
    """An invented person of some fame."""

    name: str
    profession: str
    town: str
    born: int  # year
    work: str


@dataclass(frozen=True)
class Country:
    """A real country."""

    name: str
    capital: str
    continent: str
    currency: str
    language: str


def _towns(rng: Random) -> tuple[Town, ...]:
    return tuple(
        Town(
            name,
            rng.choice(_REGIONS),
            rng.choice(_RIVERS),
            rng.choice(_GOODS),
            rng.choice(_LANDMARKS),
            rng.choice(_FESTIVALS),
            rng.choice(MONTHS),
            1100 + 10 * rng.randrange(70),
            1000 * rng.randrange(4, 90),
        )
        for name in TOWNS
    )


def _people(rng: Random) -> tuple[Person, ...]:
    first_names = rng.sample(NAMES, _NUM_PEOPLE)
    return tuple(
        Person(
            f"{first_name} {surname}",
            rng.choice(PROFESSIONS),
            rng.choice(TOWNS),
            1800 + rng.randrange(100),
            _WORKS[index % len(_WORKS)],
        )
        for index, (first_name, surname) in enumerate(
            zip(first_names, rng.sample(SURNAMES, _NUM_PEOPLE), strict=True)
        )
    )


_rng = Random(_WORLD_SEED)
ALL_TOWNS = _towns(_rng)
ALL_PEOPLE = _people(_rng)
TOWN_BY_NAME = {town.name: town for town in ALL_TOWNS}

_COUNTRIES = """
France/Paris/Europe/euro/French
Germany/Berlin/Europe/euro/German
Italy/Rome/Europe/euro/Italian
Spain/Madrid/Europe/euro/Spanish
Portugal/Lisbon/Europe/euro/Portuguese
Greece/Athens/Europe/euro/Greek
Austria/Vienna/Europe/euro/German
Poland/Warsaw/Europe/zloty/Polish
Hungary/Budapest/Europe/forint/Hungarian
Sweden/Stockholm/Europe/krona/Swedish
Norway/Oslo/Europe/krone/Norwegian
Denmark/Copenhagen/Europe/krone/Danish
Japan/Tokyo/Asia/yen/Japanese
China/Beijing/Asia/yuan/Chinese
Thailand/Bangkok/Asia/baht/Thai
Vietnam/Hanoi/Asia/dong/Vietnamese
Egypt/Cairo/Africa/pound/Arabic
Morocco/Rabat/Africa/dirham/Arabic
Mexico/Mexico City/North America/peso/Spanish
Cuba/Havana/North America/peso/Spanish
Brazil/Brasilia/South America/real/Portuguese
Argentina/Buenos Aires/South America/peso/Spanish
Chile/Santiago/South America/peso/Spanish
Peru/Lima/South America/sol/Spanish
"""
ALL_COUNTRIES = tuple(Country(*row.split("/")) for row in _COUNTRIES.split("\n") if row)
