"""Question answering: facts of the small world and of some true countries."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from polybasic.recipes.embedded.lexicon import with_article
from polybasic.recipes.embedded.world import (
    ALL_COUNTRIES,
    ALL_PEOPLE,
    ALL_TOWNS,
    TOWN_BY_NAME,
    Town,
)

Dialogue = list[tuple[str, str]]

_OPENINGS = (
    "", "", "Quick question: ", "For a quiz: ", "I am writing a school report. ",
    "Please help me. ", "My friend asked me this: ", "I would like to know something. ",
    "Can you tell me this? ", "Here is a question for you. ", "I forgot this. ",
    "We are planning a trip. ", "Answer in a few sentences. ",
)  # fmt: skip


def _compose(kinds: Sequence[Callable[[Random], tuple[str, str]]], rng: Random) -> Dialogue:
    """A question of one of the kinds, with its answer."""
    question, answer = rng.choice(kinds)(rng)
    return [(rng.choice(_OPENINGS) + question, answer)]


def describe_town(town: Town) -> str:
    """Three sentences that tell all that is known of a town."""
    return (
        f"{town.name} is a town in {town.region}, on the river {town.river}, with about "
        f"{town.num_people:,} people. It was founded in {town.founded} and makes {town.goods}. "
        f"Visitors come to see the {town.landmark} and the {town.festival} festival, "
        f"which takes place every {town.festival_month}."
    )


def _town(rng: Random) -> tuple[str, str]:
    town = rng.choice(ALL_TOWNS)
    name = town.name
    questions, fact = rng.choice(
        (
            (
                ("Where is {}?", "In which region does {} lie?", "Which region is {} in?"),
                f"{name} lies in {town.region}.",
            ),
            (
                ("Which river runs through {}?", "On which river is {}?"),
                f"The river {town.river} runs through {name}.",
            ),
            (
                ("What does {} make?", "What is made in {}?", "What is {} known for making?"),
                f"{name} is known for making {town.goods}.",
            ),
            (
                ("What can I see in {}?", "What is the main sight of {}?"),
                f"The main sight of {name} is the {town.landmark}.",
            ),
            (
                ("Which festival does {} have?", "When is the festival of {}?"),
                f"{name} has a {town.festival} festival every {town.festival_month}.",
            ),
            (
                ("When was {} founded?", "How old is {}?", "In which year was {} founded?"),
                f"{name} was founded in the year {town.founded}.",
            ),
            (
                ("How many people live in {}?", "How large is {}?"),
                f"About {town.num_people:,} people live in {name}.",
            ),
            (
                ("What do you know about {}?", "Tell me about {}.", "What is {}?"),
                "Here is what I know about this place.",
            ),
        )
    )
    return rng.choice(questions).format(name), f"{fact} {describe_town(town)}"


def _person(rng: Random) -> tuple[str, str]:
    person = rng.choice(ALL_PEOPLE)
    name, home = person.name, TOWN_BY_NAME[person.town]
    questions, fact = rng.choice(
        (
            (
                ("Who was {}?", "Tell me about {}.", "What do you know about {}?"),
                f"{name} was {with_article(person.profession)} from {person.town}.",
            ),
            (
                ("Where was {} born?", "Which town did {} come from?"),
                f"{name} was born in {person.town}.",
            ),
            (
                ("When was {} born?", "In which year was {} born?"),
                f"{name} was born in the year {person.born}.",
            ),
            (
                ("What was the job of {}?", "What did {} do for a living?"),
                f"{name} worked as {with_article(person.profession)}.",
            ),
            (
                ("What is {} famous for?", "Why do people remember {}?"),
                f"{name} is famous for {person.work}.",
            ),
        )
    )
    answer = (
        f"{fact} {name} was born in {person.born} in {person.town}, a town in {home.region}, and "
        f"worked as {with_article(person.profession)}. Today people remember {name} above all for "
        f"{person.work}, and there is a small museum near the {home.landmark} of {person.town}."
    )
    return rng.choice(questions).format(name), answer


def _country(rng: Random) -> tuple[str, str]:
    country = rng.choice(ALL_COUNTRIES)
    name = country.name
    questions, fact = rng.choice(
        (
            (
                ("What is the capital of {}?", "Which city is the capital of {}?"),
                f"The capital of {name} is {country.capital}.",
            ),
            (
                ("On which continent is {}?", "Where in the world is {}?"),
                f"{name} lies in {country.continent}.",
            ),
            (
                ("What is the currency of {}?", "How do people pay in {}?"),
                f"The currency of {name} is the {country.currency}.",
            ),
            (
                ("Which language do people speak in {}?", "What is the main language of {}?"),
                f"The main language of {name} is {country.language}.",
            ),
            (
                ("What should I know before a trip to {}?", "Tell me about {}."),
                f"There are some useful facts to know about {name}.",
            ),
        )
    )
    answer = (
        f"{fact} {name} is a country in {country.continent}, and its capital is {country.capital}. "
        f"The official language is {country.language}, and people pay with the "
        f"{country.currency}. If you travel there, {country.capital} is a good place to start, "
        f"and a few words of {country.language} will help you."
    )
    return rng.choice(questions).format(name), answer


def _two_towns(rng: Random) -> tuple[str, str]:
    one, two = rng.sample(ALL_TOWNS, 2)
    if rng.random() < 0.5:
        question = f"Which town has more people, {one.name} or {two.name}?"
        facts = (
            f"About {one.num_people:,} people live in {one.name}, and about "
            f"{two.num_people:,} people live in {two.name}."
        )
        if one.num_people == two.num_people:
            return question, f"{facts} So the two towns are equally large."
        larger = max(one, two, key=lambda town: town.num_people)
        return question, f"{facts} So {larger.name} is the larger of the two towns."
    question = f"Which town is older, {one.name} or {two.name}?"
    facts = (
        f"{one.name} was founded in the year {one.founded}, and {two.name} was founded in the "
        f"year {two.founded}."
    )
    if one.founded == two.founded:
        return question, f"{facts} So the two towns are equally old."
    older = min(one, two, key=lambda town: town.founded)
    return question, f"{facts} So {older.name} is the older of the two towns."


TOPICS = {
    "towns": partial(_compose, (_town, _town, _town, _town, _town, _two_towns)),
    "people": partial(_compose, (_person,)),
    "countries": partial(_compose, (_country,)),
}
