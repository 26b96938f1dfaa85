"""Arithmetic reasoning: word problems that are solved step by step."""

from collections.abc import Callable
from functools import partial
from random import Random

from polybasic.recipes.embedded.lexicon import (
    FRUITS,
    GOODS,
    NAMES,
    PROFESSIONS,
    WEEKDAYS,
    with_article,
)

Dialogue = list[tuple[str, str]]

_TASKS = ("{}", "{}", "{} Explain your steps.", "Solve this problem: {}", "{} Think step by step.")


def _compose(kind: Callable[[Random], tuple[str, str, int]], rng: Random) -> Dialogue:
    """One word problem with its worked solution, which ends in "The answer is N."."""
    problem, steps, result = kind(rng)
    question = problem.split(". ")[-1]
    answer = (
        f"Let us solve this step by step. {steps} Your question was: {question} "
        f"The answer is {result}."
    )
    return [(rng.choice(_TASKS).format(problem), answer)]


def _buying(rng: Random) -> tuple[str, str, int]:
    name, first, second = rng.choice(NAMES), *rng.sample(GOODS, 2)
    num_first, num_second = rng.randint(2, 9), rng.randint(2, 9)
    price_first, price_second = rng.randint(2, 9), rng.randint(2, 9)
    cost_first, cost_second = num_first * price_first, num_second * price_second
    total = cost_first + cost_second
    problem = (
        f"{name} buys {num_first} {first} for {price_first} dollars each and {num_second} {second} "
        f"for {price_second} dollars each. How much does {name} pay in total?"
    )
    steps = (
        f"First, the {first} cost {num_first} * {price_first} = {cost_first} dollars. "
        f"Next, the {second} cost {num_second} * {price_second} = {cost_second} dollars. "
        f"Together, {name} pays {cost_first} + {cost_second} = {total} dollars."
    )
    return problem, steps, total


def _giving(rng: Random) -> tuple[str, str, int]:
    (name, friend), things = rng.sample(NAMES, 2), rng.choice(FRUITS + GOODS)
    start, more = rng.randint(10, 40), rng.randint(5, 30)
    given = rng.randint(2, start)
    total = start + more
    left = total - given
    problem = (
        f"{name} has {start} {things}. Then {name} gets {more} more {things} and gives {given} of "
        f"them to {friend}. How many {things} does {name} have left?"
    )
    steps = (
        f"At the start, {name} has {start} {things}. After getting {more} more, {name} has "
        f"{start} + {more} = {total} {things}. After giving {given} to {friend}, {name} has "
        f"{total} - {given} = {left} {things} left."
    )
    return problem, steps, left


def _packing(rng: Random) -> tuple[str, str, int]:
    name, things = rng.choice(NAMES), rng.choice(FRUITS + GOODS)
    size, num_boxes, sold = rng.randint(2, 9), rng.randint(3, 9), rng.randint(1, 2)
    total, left = size * num_boxes, num_boxes - sold
    problem = (
        f"{name} packs {total} {things} into boxes of {size}. Then {name} sells {sold} of the "
        f"boxes. How many boxes are left?"
    )
    steps = (
        f"Each box holds {size} {things}, so {total} {things} fill {total} / {size} = {num_boxes} "
        f"boxes. {name} sells {sold} of the boxes, so {num_boxes} - {sold} = {left} boxes are left."
    )
    return problem, steps, left


def _working(rng: Random) -> tuple[str, str, int]:
    name, job, day = rng.choice(NAMES), rng.choice(PROFESSIONS), rng.choice(WEEKDAYS)
    wage, hours, extra = rng.randint(5, 12), rng.randint(3, 9), rng.randint(5, 30)
    pay = wage * hours
    total = pay + extra
    problem = (
        f"{name} works as {with_article(job)} and earns {wage} dollars an hour. On {day}, {name} "
        f"works for {hours} hours and gets {extra} dollars in tips. How much does {name} make?"
    )
    steps = (
        f"For {hours} hours of work, {name} earns {hours} * {wage} = {pay} dollars. The tips are "
        f"{extra} dollars. In total, {name} makes {pay} + {extra} = {total} dollars on {day}."
    )
    return problem, steps, total


def _travelling(rng: Random) -> tuple[str, str, int]:
    name, vehicle = rng.choice(NAMES), rng.choice(("train", "bus", "car", "truck", "boat"))
    speed, hours, rest = 10 * rng.randint(2, 9), rng.randint(2, 6), 10 * rng.randint(1, 9)
    distance = speed * hours
    total = distance + rest
    problem = (
        f"A {vehicle} travels at {speed} kilometres an hour for {hours} hours. Then {name} has to "
        f"go {rest} more kilometres to get home. How long is the whole way?"
    )
    steps = (
        f"In {hours} hours, the {vehicle} covers {hours} * {speed} = {distance} kilometres. After "
        f"that, {rest} kilometres remain. The whole way is {distance} + {rest} = {total} "
        f"kilometres long."
    )
    return problem, steps, total


def _saving(rng: Random) -> tuple[str, str, int]:
    name, things = rng.choice(NAMES), rng.choice(GOODS)
    weekly, weeks = rng.randint(3, 12), rng.randint(3, 9)
    saved = weekly * weeks
    spent = rng.randint(2, saved - 1)
    left = saved - spent
    problem = (
        f"{name} saves {weekly} dollars every week for {weeks} weeks and then spends {spent} "
        f"dollars on {things}. How many dollars are left?"
    )
    steps = (
        f"In {weeks} weeks, {name} saves {weeks} * {weekly} = {saved} dollars. The {things} cost "
        f"{spent} dollars. So {name} has {saved} - {spent} = {left} dollars left."
    )
    return problem, steps, left


def _ages(rng: Random) -> tuple[str, str, int]:
    name, friend = rng.sample(NAMES, 2)
    age, older, years = rng.randint(5, 40), rng.randint(2, 15), rng.randint(2, 12)
    friend_age = age + older
    later = friend_age + years
    problem = (
        f"{name} is {age} years old, and {friend} is {older} years older than {name}. How old will "
        f"{friend} be in {years} years?"
    )
    steps = (
        f"{friend} is {older} years older than {name}, so {friend} is {age} + {older} = "
        f"{friend_age} years old today. In {years} years, {friend} will be {friend_age} + {years} "
        f"= {later} years old."
    )
    return problem, steps, later


def _seating(rng: Random) -> tuple[str, str, int]:
    place = rng.choice(("theatre", "cinema", "school hall", "concert hall", "classroom", "ship"))
    rows, seats = rng.randint(3, 12), rng.randint(4, 10)
    total = rows * seats
    taken = rng.randint(1, total - 1)
    left = total - taken
    problem = (
        f"A {place} has {rows} rows with {seats} seats each. If {taken} people sit down, how many "
        f"seats stay empty?"
    )
    steps = (
        f"The {place} has {rows} * {seats} = {total} seats in all. Of these, {taken} seats are "
        f"taken. So {total} - {taken} = {left} seats stay empty."
    )
    return problem, steps, left


TOPICS = {
    "shopping": partial(_compose, _buying),
    "gifts": partial(_compose, _giving),
    "boxes": partial(_compose, _packing),
    "wages": partial(_compose, _working),
    "journeys": partial(_compose, _travelling),
    "savings": partial(_compose, _saving),
    "ages": partial(_compose, _ages),
    "seats": partial(_compose, _seating),
}
