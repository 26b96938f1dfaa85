"""Summarization: short news reports, and retrieval: passages of which one holds the answer."""

from dataclasses import dataclass
from functools import partial
from random import Random

from polybasic.recipes.embedded.lexicon import (
    COLOURS,
    FOODS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    PROFESSIONS,
    SURNAMES,
    TOWNS,
    WEEKDAYS,
    listed,
    with_article,
)

Dialogue = list[tuple[str, str]]


@dataclass(frozen=True)
class _Event:
    """A kind of news. All texts are formatted with the report's words."""

    headline: str  # who does what; comes back in the summary
    details: tuple[str, ...]
    result: str  # comes back in the summary
    plan: str  # comes back in the summary


_EVENTS = {
    "a new shop": _Event(
        "the {job} {name} opened a new shop for {food} in {town}",
        (
            "More than {number} guests came to the first day.",
            "The walls of the shop are painted {colour}.",
            "{friend} had helped to build the kitchen.",
            "A band played music in the street until late in the evening.",
        ),
        "all the {food} was sold before noon",
        "{name} wants to hire {small} people in {month}",
    ),
    "a storm": _Event(
        "a storm damaged the roof of the school in {town}",
        (
            "The wind broke {number} windows and pulled down trees.",
            "{friend}, {a_job}, said that nobody had seen such weather for years.",
            "The fire brigade worked through the whole night.",
            "A {colour} car was hit by a falling branch.",
        ),
        "nobody was hurt",
        "{name} will lead the repairs, which end in {month}",
    ),
    "a lost animal": _Event(
        "{name} found a lost {animal} in the harbour of {town}",
        (
            "It was sitting in a {colour} boat between {number} boxes of fish.",
            "Many people had looked for it for {small} days.",
            "{friend} gave it water and something to eat.",
            "The local paper printed a picture of the rescue.",
        ),
        "the {animal} is healthy again",
        "{friend} will take care of it until {month}",
    ),
    "a cooking contest": _Event(
        "the {job} {name} won the cooking contest of {town}",
        (
            "There were {number} cooks from {small} towns.",
            "Every cook had two hours for one dish.",
            "{friend} took second place and was very happy about it.",
            "The jury wore {colour} hats, as they do every year.",
        ),
        "the winning dish was {food}",
        "the next contest takes place in {month}",
    ),
    "an old bridge": _Event(
        "the town of {town} closed its old bridge",
        (
            "About {number} cars crossed it every day.",
            "{friend}, {a_job}, found deep cracks in {small} of its pillars.",
            "Now everyone has to take the ferry with the {colour} flag.",
            "Some shops near the bridge fear that they will lose customers.",
        ),
        "the repair costs {number} thousand dollars",
        "{name} promises that the bridge will open again in {month}",
    ),
    "new trees": _Event(
        "pupils of {town} planted {number} trees with the {job} {name}",
        (
            "They worked for {small} hours in the rain.",
            "Every tree got a {colour} ribbon with the name of a child.",
            "{friend} brought hot {food} for everybody.",
            "The parents watched from the road and took pictures.",
        ),
        "the old field is now a small forest",
        "the pupils will build a house for {animal}s there in {month}",
    ),
    "a long walk": _Event(
        "{name} finished a walk of {number} miles from the sea to {town}",
        (
            "The journey took {small} weeks and led over high mountains.",
            "Only a {colour} dog came along, and it never got tired.",
            "{friend}, {a_job}, waited at the gate with flowers.",
            "On the way there was often nothing to eat but {food}.",
        ),
        "the walk raised money for a new hospital",
        "{name} will write a book about it in {month}",
    ),
    "a painting": _Event(
        "the museum of {town} showed a painting by {name} for the first time",
        (
            "It shows a {colour} {animal} in front of {small} hills.",
            "{friend}, {a_job}, had found it behind an old cupboard.",
            "About {number} visitors stood in line on the first morning.",
            "In the café of the museum there was {food} for everyone.",
        ),
        "the painting is worth more than the house it was found in",
        "it can be seen until {month}",
    ),
}
_TASKS = (
    "Summarize this report: {}", "Please give me a short summary of this text: {}",
    "Sum up the following news in a few sentences: {}", "What happened here? Keep it short. {}",
    "Write a summary. {}", "I have no time to read this. What does it say? {}",
)  # fmt: skip


def _compose_report(event: _Event, rng: Random) -> Dialogue:
    """A report of six or seven sentences and its summary in three."""
    words, day = _report_words(rng), rng.choice(WEEKDAYS)
    headline, result, plan = (
        text.format(**words) for text in (event.headline, event.result, event.plan)
    )
    details = [text.format(**words) for text in event.details]
    rng.shuffle(details)
    num_before = rng.randint(1, 3)
    report = " ".join(
        [
            f"On {day}, {headline}.",
            *details[:num_before],
            f"{_capital(result)}.",
            *details[num_before:],
            f"{_capital(plan)}.",
        ]
    )
    summary = (
        f"On {day}, {headline}. The report says that {result}. It also mentions "
        f"{words['friend']}. Looking ahead, {plan}."
    )
    return [(rng.choice(_TASKS).format(report), summary)]


def _report_words(rng: Random) -> dict[str, str]:
    name, friend = (
        f"{first_name} {surname}"
        for first_name, surname in zip(rng.sample(NAMES, 2), rng.sample(SURNAMES, 2), strict=True)
    )
    job, other_job = rng.sample(PROFESSIONS, 2)
    return {
        "name": name,
        "friend": friend,
        "job": job,
        "a_job": with_article(other_job),
        "town": rng.choice(TOWNS),
        "food": rng.choice(FOODS),
        "animal": rng.choice(("owl", "otter", "goat", "donkey", "cat", "dog", "swan", "duck")),
        "colour": rng.choice(tuple(c for c in COLOURS if c != "orange")),
        "month": rng.choice(MONTHS),
        "number": str(rng.randint(12, 99)),
        "small": rng.choice(NUMBER_WORDS[2:]),
    }


_PASSAGE_TASKS = (
    "Answer the question with the help of these passages.\n{passages}\nQuestion: {question}",
    "{passages}\nUse the passages above to answer: {question}",
    "Here are some notes.\n{passages}\n{question}",
    "Read the passages and answer.\n{passages}\nQuestion: {question}",
)
_FACTS = {
    "homes": (
        ("{name} keeps {small} {animal}s behind the house", "How many {animal}s does {name} keep?"),
        ("the door of {name}'s house is painted {colour}", "Which colour is the door of {name}?"),
        ("{name} pays {number} dollars a week for a room", "How much does {name} pay for a room?"),
        ("the favourite food of {name} is {food}", "What is the favourite food of {name}?"),
    ),
    "journeys": (
        ("{name} was born in {town} and moved away in {month}", "Where was {name} born?"),
        ("{name} takes the boat to {town} every {day}", "When does {name} take the boat?"),
        ("{name} will visit {town} together with {friend}", "Who will go to {town} with {name}?"),
        ("the train of {name} leaves {number} minutes before noon", "When does {name} leave?"),
    ),
    "people and work": (
        ("{name} works as {a_job} in {town}", "What is the job of {name}?"),
        ("{name} met {friend} in {month} at the market", "When did {name} meet {friend}?"),
        ("{name} lost a {colour} hat near the river", "What did {name} lose?"),
        ("{name} learned to make {food} from {friend}", "Who taught {name} to make {food}?"),
    ),
}


def _compose_passages(known: tuple[tuple[str, str], ...], rng: Random) -> Dialogue:
    """Two or three numbered passages about different people, and an answer that quotes one.

    Args:
        known: facts that passages may state, each with its question.
        rng: what is chosen by.
    """
    num_passages = rng.randint(2, 3)
    first_names = rng.sample(NAMES, num_passages)
    passages: list[list[tuple[str, str]]] = []
    for first_name in first_names:
        facts = []
        for fact, question in rng.sample(known, 3):
            words = {**_report_words(rng), "name": first_name, "day": rng.choice(WEEKDAYS)}
            facts.append((f"{_capital(fact.format(**words))}.", question.format(**words)))
        passages.append(facts)
    chosen, sentence = rng.randrange(num_passages), rng.randrange(3)
    quote, question = passages[chosen][sentence]
    text = "\n".join(
        f"Passage {index}: {' '.join(fact for fact, _ in facts)}"
        for index, facts in enumerate(passages, 1)
    )
    name = first_names[chosen]
    others = [other for other in first_names if other != name]
    answer = (
        f"The answer is in passage {chosen + 1}, which is about {name}. Passage {chosen + 1} says: "
        f'"{quote}" The rest of the text is about {listed(others)} and does not help here. So the '
        f"answer to your question is: {quote}"
    )
    return [(rng.choice(_PASSAGE_TASKS).format(passages=text, question=question), answer)]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


REPORT_TOPICS = {topic: partial(_compose_report, event) for topic, event in _EVENTS.items()}
PASSAGE_TOPICS = {topic: partial(_compose_passages, facts) for topic, facts in _FACTS.items()}
