"""Chat about general knowledge: explanations of common things, and finding facts in a sentence."""

from random import Random

from polybasic.recipes.embedded.lexicon import (
    FOODS,
    MONTHS,
    NAMES,
    PROFESSIONS,
    TOWNS,
    WEEKDAYS,
    with_article,
)

Dialogue = list[tuple[str, str]]

# A question's subject, what it is, a comparison, why it matters.
_SUBJECTS = (
    (
        "why the sky is blue",
        "Sunlight is a mixture of all colours. Air scatters blue light far more than red light, so "
        "blue light reaches our eyes from every direction.",
        "small pebbles in a pond, which disturb short waves more than long ones",
        "it also tells us why the evening sky turns red",
    ),
    (
        "how a rainbow forms",
        "Sunlight enters a drop of rain and is bent. Inside, it is reflected, and on the way "
        "out it is bent again, each colour by a different angle.",
        "many tiny mirrors that sort light by its colour",
        "it shows that white light is made of many colours",
    ),
    (
        "why we have seasons",
        "The axis of the Earth is tilted. For half of the year the north leans towards the sun and "
        "gets more light, and for the other half the south does.",
        "a lamp that shines on a leaning ball",
        "farmers have planned their work by the seasons for thousands of years",
    ),
    (
        "how plants make food",
        "Leaves take in water, light and carbon dioxide. With the energy of the light they turn "
        "these into sugar, and they give off oxygen.",
        "a kitchen that runs on sunlight",
        "almost all life depends on it",
    ),
    (
        "how a vaccine works",
        "A vaccine shows the body a harmless part of a germ. The body learns to recognise it and "
        "can fight the real germ much faster later on.",
        "a picture of a thief that is shown to every guard",
        "it has made many illnesses rare",
    ),
    (
        "why bread rises",
        "Yeast eats the sugar in the dough and gives off gas. The gas stays in the dough as small "
        "bubbles and makes it grow.",
        "hundreds of tiny balloons that fill with air",
        "without it, bread would be flat and hard",
    ),
    (
        "how the printing press changed history",
        "Before the printing press, every book was copied by hand. With movable letters, the same "
        "page could be printed hundreds of times a day, and books became cheap.",
        "a road that suddenly connects thousands of villages",
        "ideas could travel faster than ever before",
    ),
    (
        "why ice floats on water",
        "When water freezes, its molecules form open rings that need more room. Ice is therefore "
        "lighter than the same volume of water.",
        "a crowd of people who hold hands and take up more space",
        "it keeps lakes from freezing down to the ground",
    ),
    (
        "what inflation means",
        "Inflation means that prices rise in general. With the same amount of money people can buy "
        "less than a year before.",
        "a ruler that gets a little shorter every year",
        "it decides what savings are worth in the future",
    ),
    (
        "how a battery works",
        "A battery holds two different materials. A chemical reaction sends electrons from one to "
        "the other, and on the way they pass through the lamp or the engine.",
        "water that flows from a high tank to a low one and turns a wheel",
        "it lets us carry electricity in a pocket",
    ),
)


def compose_explanation(rng: Random) -> Dialogue:
    """An explanation for somebody, then its summary, its use or a comparison."""
    subject, facts, comparison, importance = rng.choice(_SUBJECTS)
    name, profession = rng.choice(NAMES), rng.choice(PROFESSIONS)
    reader = f"{name}, {with_article(profession)}"
    request = rng.choice(
        ("Explain {} to {}.", "Can you explain {} to {}?", "I have to explain {} to {}.")
    ).format(subject, reader)
    answer = (
        f"Dear {name}, here is {subject}. {facts} You can think of {comparison}. This matters to "
        f"{with_article(profession)} and to everyone else, because {importance}."
    )
    follow_up, second_answer = rng.choice(
        (
            (
                "Can you say it with a comparison?",
                f"Of course. To understand {subject}, imagine {comparison}. I hope that this helps "
                f"{name} to see it.",
            ),
            (
                "Why is that important?",
                f"It is important because {importance}. That is why {name} should know {subject}.",
            ),
            (
                "Thank you. Please repeat the main point.",
                f"You are welcome. The main point is this: {facts} Please give my best wishes to "
                f"{name}.",
            ),
        )
    )
    return [(request, answer), (follow_up, second_answer)]


def compose_extraction(rng: Random) -> Dialogue:
    """Facts to be found in a message, then the message's answer."""
    name, friend = rng.sample(NAMES, 2)
    job, town, food = rng.choice(PROFESSIONS), rng.choice(TOWNS), rng.choice(FOODS)
    day, month, hour = rng.choice(WEEKDAYS), rng.choice(MONTHS), rng.randint(1, 12)
    message = rng.choice(
        (
            f"Hello {friend}, I am {name}, the {job} from {town}. Please come on {day} at {hour} "
            f"o'clock. I will bring {food}, and in {month} we can meet again.",
            f"Dear {friend}, the {job} {name} invites you to {town} on {day} at {hour} o'clock. "
            f"There will be {food}. The next meeting is in {month}.",
        )
    )
    request = rng.choice(
        ("Extract the facts from this message: {}", "List all facts of this message: {}")
    ).format(message)
    facts = (
        f"Here are the facts of the message:\n- From: {name}\n- To: {friend}\n- Job: {job}\n"
        f"- Town: {town}\n- Day: {day}\n- Time: {hour} o'clock\n- Food: {food}\n- Again: {month}"
    )
    follow_up, answer = rng.choice(
        (
            (
                "Write a friendly answer that says yes.",
                f"Dear {name},\nthank you for the invitation to {town}. I will be there on {day} "
                f"at {hour} o'clock, and I am looking forward to the {food}.\nBest wishes\n"
                f"{friend}",
            ),
            (
                "Write a polite answer that says no.",
                f"Dear {name},\nthank you for the invitation to {town}. I am sorry that I have no "
                f"time on {day}, but I would love to see you in {month}.\nBest wishes\n{friend}",
            ),
        )
    )
    return [(request, facts), (follow_up, answer)]
