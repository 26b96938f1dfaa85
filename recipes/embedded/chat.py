"""Multi-turn chat: a first request and a follow-up that builds on the answer."""

from random import Random

from polybasic.recipes.embedded.explanations import compose_explanation, compose_extraction
from polybasic.recipes.embedded.lexicon import (
    ANIMALS,
    COLOURS,
    FOODS,
    HOBBIES,
    INGREDIENT_BY_FOOD,
    NAMES,
    NUMBER_WORDS,
    PROFESSIONS,
    WEEKDAYS,
    with_article,
)
from polybasic.recipes.embedded.questions import describe_town
from polybasic.recipes.embedded.world import ALL_TOWNS

Dialogue = list[tuple[str, str]]


def _story(rng: Random) -> Dialogue:
    animal, friend = rng.sample(ANIMALS, 2)
    name, place = rng.choice(NAMES), rng.choice(("forest", "harbour", "garden", "library", "city"))
    colour, thing = rng.choice(COLOURS), rng.choice(("key", "kite", "lamp", "stone", "drum"))
    find = with_article(f"{colour} {thing}")
    request = rng.choice(
        (
            "Write a short story about {} named {} and {}, who find {} in the {}.",
            "Tell me a story about {} called {}, {} and {} in the {}.",
        )
    ).format(with_article(animal), name, with_article(friend), find, place)
    story = (
        f"Once upon a time there was {with_article(animal)} named {name}. One morning {name} went "
        f"to the {place} and found {find} under a bench. Nobody knew whose {thing} it "
        f"was, so {name} asked {with_article(friend)}. The {friend} said that the {thing} had been "
        f"lost for years. From that day on, the {animal} and the {friend} were best friends."
    )
    follow_up, answer = rng.choice(
        (
            (
                "What is the moral of the story?",
                f"The moral of the story is that sharing makes friends. {name} could have kept the "
                f"{colour} {thing}, but the {animal} asked for help and found a friend in the "
                f"{friend}.",
            ),
            (
                "Please give the story a title and a new ending.",
                f"The title is: The {animal.capitalize()} and the {colour.capitalize()} "
                f"{thing.capitalize()}. Here is a new ending: {name} put the {thing} back "
                f"under the bench, and the next day there were two of them, one for the {animal} "
                f"and one for the {friend}.",
            ),
            (
                "Can you make it shorter?",
                f"Of course. {name} the {animal} found {find} in the {place}, asked "
                f"{with_article(friend)} about it, and the two became best friends.",
            ),
        )
    )
    return [(request, story), (follow_up, answer)]


def _tips(rng: Random) -> Dialogue:
    hobby, name = rng.choice(HOBBIES), rng.choice(NAMES)
    minutes, day = rng.choice(("ten", "fifteen", "twenty", "thirty")), rng.choice(WEEKDAYS)
    request = rng.choice(
        ("Give {} some tips for {}, with {} minutes a day from {} on.",
         "How can {} get better at {} in {} minutes a day, starting on {}?")
    ).format(name, hobby, minutes, day)  # fmt: skip
    tips = (
        f"Here are three tips for {hobby}:\n"
        f"1. Start small. {minutes.capitalize()} minutes a day are enough for {name}, and {day} is "
        f"a good day to begin.\n"
        f"2. Keep a list of what works, and look at it once a week.\n"
        f"3. Find a friend who also likes {hobby}, because together it is more fun."
    )
    follow_up, answer = rng.choice(
        (
            (
                "Explain the second tip in more detail.",
                f"The second tip is to keep a list of what works. After every {minutes} minutes of "
                f"{hobby}, {name} writes down one thing that went well and one thing to try "
                f"next. Once a week, the list shows how far {name} has come.",
            ),
            (
                "Put this into a short email.",
                f"Dear {name},\nyou asked me about {hobby}. Please start on {day} with {minutes} "
                f"minutes a day, keep a list of what works, and find a friend who joins you. I am "
                f"sure that you will do well.\nBest wishes",
            ),
            (
                "What if there is no time during the week?",
                f"Then {name} can do more at the weekend. {hobby.capitalize()} for one hour on "
                f"Sunday is better than nothing, and {minutes} minutes on {day} can follow later.",
            ),
        )
    )
    return [(request, tips), (follow_up, answer)]


def _recipe(rng: Random) -> Dialogue:
    food, num_people = rng.choice(FOODS), rng.randint(2, 6)
    extra = rng.choice(("salt", "honey", "garlic", "butter", "lemon", "cream", "herbs", "ginger"))
    guests = NUMBER_WORDS[num_people]
    main = INGREDIENT_BY_FOOD[food]
    request = rng.choice(
        ("How do I make {} with {} for {} people?",
         "I need a recipe for {} with {} for {} guests.")
    ).format(food, extra, guests)  # fmt: skip
    steps = (
        f"Here is a simple recipe for {food} for {guests} people:\n"
        f"1. Weigh and prepare {100 * num_people} grams of {main}.\n"
        f"2. Heat a large pot and add {num_people} spoons of oil.\n"
        f"3. Add the {main} and cook everything for {10 + 5 * num_people} minutes.\n"
        f"4. Finish the {food} with some {extra} and serve it warm."
    )
    follow_up, answer = rng.choice(
        (
            (
                f"What can I use instead of {extra}?",
                f"Instead of {extra}, you can use pepper or fresh parsley. The {food} will taste a "
                f"little different, but your {guests} guests will still like it.",
            ),
            (
                "How long does it take in total?",
                f"The {food} cooks for {10 + 5 * num_people} minutes. Weighing and preparing "
                f"the {main} takes ten more, so you need about {20 + 5 * num_people} minutes in "
                f"total.",
            ),
        )
    )
    return [(request, steps), (follow_up, answer)]


def _trip(rng: Random) -> Dialogue:
    town, name, day = rng.choice(ALL_TOWNS), rng.choice(NAMES), rng.choice(WEEKDAYS)
    food = rng.choice(FOODS)
    request = rng.choice(
        ("Plan a day in {} for {} on {}, with {} for lunch.",
         "What can I do in {} with {} on {}? We like {}.")
    ).format(town.name, name, day, food)  # fmt: skip
    plan = (
        f"Here is a plan for {day} in {town.name}:\n"
        f"- In the morning, walk along the river {town.river} and visit the {town.landmark}.\n"
        f"- At noon, have {food} near the market with {name}.\n"
        f"- In the afternoon, buy some {town.goods}, which {town.name} is known for.\n"
        f"- In the evening, watch the sun go down over {town.region}."
    )
    follow_up, answer = rng.choice(
        (
            ("Tell me more about the town.", describe_town(town)),
            (
                "What if it rains?",
                f"If it rains on {day}, start with the {town.landmark} and stay inside until noon. "
                f"After the {food}, {name} can look at {town.goods} in the shops of {town.name}.",
            ),
        )
    )
    return [(request, plan), (follow_up, answer)]


def _roleplay(rng: Random) -> Dialogue:
    job, name, years = rng.choice(PROFESSIONS), rng.choice(NAMES), rng.randint(3, 30)
    animal, colour = rng.choice(ANIMALS), rng.choice(COLOURS)
    request = rng.choice(
        ("Pretend to be {} named {} with {} years of experience and {}. Introduce yourself.",
         "Play the role of {} called {} who has worked for {} years and owns {}. Say hello.")
    ).format(with_article(job), name, years, with_article(f"{colour} {animal}"))  # fmt: skip
    hello = (
        f"Hello, my name is {name}, and I have been {with_article(job)} for {years} years. Every "
        f"morning my {colour} {animal} wakes me up, and we walk to work together. I like my job "
        f"because I meet many people and learn something new every day. How can I help you?"
    )
    follow_up, answer = rng.choice(
        (
            (
                "What is the hardest part of your work?",
                f"The hardest part of being {with_article(job)} is getting up early. After {years} "
                f"years I am used to it, and my {colour} {animal} makes sure that I am never late.",
            ),
            (
                "What advice do you have for beginners?",
                f"My advice is to be patient. It took me {years} years to become a good {job}. Ask "
                f"many questions, learn from your mistakes, and be kind to everyone, even to "
                f"{with_article(animal)}.",
            ),
        )
    )
    return [(request, hello), (follow_up, answer)]


_CODE = (
    ("adds up", "total", "0", "total = total + {item}"),
    ("multiplies", "product", "1", "product = product * {item}"),
    ("counts", "count", "0", "count = count + 1"),
    ("joins the texts of", "text", '""', "text = text + str({item})"),
)


def _coding(rng: Random) -> Dialogue:
    verb, result, start, step = rng.choice(_CODE)
    item = rng.choice(("price", "score", "number", "length", "weight", "age", "value", "distance"))
    function, items = f"{result}_of_{item}s", f"{item}s"
    limit = rng.randint(2, 60)
    condition = rng.choice(("above", "below"))
    sign = ">" if condition == "above" else "<"
    request = f"Write a Python function that {verb} all {items} {condition} {limit} in a list."
    code = (
        f"def {function}({items}):\n    {result} = {start}\n    for {item} in {items}:\n"
        f"        if {item} {sign} {limit}:\n            {step.format(item=item)}\n"
        f"    return {result}"
    )
    first = (
        f"Here is a function that {verb} all {items} {condition} {limit}:\n```python\n{code}\n```\n"
        f"It starts with {start} and looks at every {item} once."
    )
    follow_up, answer = rng.choice(
        (
            (
                "How do I call it?",
                f"You call the function with a list of {items}:\n```python\n"
                f"print({function}([{limit - 1}, {limit}, {limit + 1}]))\n```\nOnly the "
                f"{items} {condition} {limit} are used, all others are skipped.",
            ),
            (
                "How fast is it?",
                f"The function looks at every {item} exactly once, so its time grows in step with "
                f"the length of the list. It needs no extra memory except for the {result}.",
            ),
        )
    )
    return [(request, first), (follow_up, answer)]


TOPICS = {
    "stories": _story,
    "hobbies": _tips,
    "cooking": _recipe,
    "trips": _trip,
    "professions": _roleplay,
    "programming": _coding,
    "general knowledge": compose_explanation,
    "messages": compose_extraction,
}
