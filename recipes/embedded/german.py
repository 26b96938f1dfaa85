"""Translation: German texts of three to five sentences and their English."""

from dataclasses import dataclass
from functools import partial
from random import Random

from polybasic.recipes.embedded.lexicon import NAMES

Dialogue = list[tuple[str, str]]
Pair = tuple[str, str]
"""A German phrase and its English."""

_BY_SENTENCE_TASKS = (
    "Translate German to English, sentence by sentence: {}",
    "I am learning German. Please explain this text to me sentence by sentence: {}",
    "What does each of these sentences mean in English? {}",
)
_TASKS = (
    "Translate German to English: {}", "Translate this German text into English: {}",
    "Please translate into English: {}", "What does this mean in English? {}",
    "I received this message in German. Please translate it. {}",
    "How would you say this in English? {}",
)  # fmt: skip


def _pairs(text: str) -> tuple[Pair, ...]:
    pairs = (line.split("=") for line in text.strip().split("\n"))
    return tuple((german.strip(), english.strip()) for german, english in pairs)


@dataclass(frozen=True)
class _Verb:
    """Third person forms; `objects` are accusative phrases that fit."""

    german: tuple[str, str, str, str]  # singular and plural present, singular and plural past
    english: tuple[str, str, str, str]
    objects: tuple[Pair, ...]

    def form(self, is_plural: bool, is_past: bool) -> Pair:
        """German and English form, a phrasal verb with its particle ("looks for")."""
        index = 2 * is_past + is_plural
        return self.german[index], self.english[index].replace("-", " ")


_SINGULAR = _pairs("""der Lehrer=the teacher
die Lehrerin=the teacher
der Arzt=the doctor
die Ärztin=the doctor
der Bäcker=the baker
die Nachbarin=the neighbour
der Junge=the boy
das Mädchen=the girl
meine Schwester=my sister
mein Bruder=my brother
unser Großvater=our grandfather
unsere Großmutter=our grandmother
der alte Mann=the old man
die junge Frau=the young woman
der Student=the student
die Ingenieurin=the engineer
ihr Onkel=her uncle
seine Tante=his aunt""")
_PLURAL = _pairs("""die Kinder=the children
die Schüler=the pupils
meine Eltern=my parents
unsere Freunde=our friends
die Nachbarn=the neighbours
die Touristen=the tourists
zwei Frauen=two women
viele Leute=many people
die Arbeiter=the workers
drei Studenten=three students""")
_FOODS = _pairs("""einen Apfel=an apple
eine Suppe=a soup
frisches Brot=fresh bread
einen kleinen Kuchen=a small cake
Fisch mit Reis=fish with rice
drei Eier=three eggs
eine Orange=an orange
viel Gemüse=a lot of vegetables
Nudeln mit Käse=noodles with cheese
eine große Pizza=a big pizza""")
_THINGS = _pairs("""ein neues Fahrrad=a new bicycle
einen roten Mantel=a red coat
eine Lampe=a lamp
zwei Stühle=two chairs
einen alten Tisch=an old table
ein Geschenk=a present
eine blaue Tasche=a blue bag
einen Regenschirm=an umbrella
ein kleines Boot=a small boat
eine Uhr=a clock
einen Schlüssel=a key
schöne Blumen=beautiful flowers""")
_TEXTS = _pairs("""ein Buch=a book
einen langen Brief=a long letter
die Zeitung=the newspaper
ein Gedicht=a poem
eine Geschichte=a story
einen Bericht=a report
eine Postkarte=a postcard
das Rezept=the recipe""")
_LIVING = _pairs("""einen Hund=a dog
eine Katze=a cat
die Nachbarin=the neighbour
einen Freund=a friend
den Lehrer=the teacher
einen Vogel=a bird
das Pferd=the horse
die Ärztin=the doctor
ein Kind=a child""")
_SIGHTS = _pairs("""das Museum=the museum
die alte Kirche=the old church
den Garten=the garden
die Brücke=the bridge
das Schloss=the castle
den See=the lake
die Berge=the mountains
das Theater=the theatre""")


def _verb(german: str, english: str, objects: tuple[Pair, ...]) -> _Verb:
    german_forms, english_forms = german.split(), english.split()
    return _Verb(
        (german_forms[0], german_forms[1], german_forms[2], german_forms[3]),
        (english_forms[0], english_forms[1], english_forms[2], english_forms[2]),
        objects,
    )


VERBS = (
    _verb("kauft kaufen kaufte kauften", "buys buy bought", _FOODS + _THINGS + _TEXTS),
    _verb("isst essen aß aßen", "eats eat ate", _FOODS),
    _verb("kocht kochen kochte kochten", "cooks cook cooked", _FOODS[1:2] + _FOODS[4:6]),
    _verb("teilt teilen teilte teilten", "shares share shared", _FOODS),
    _verb("liest lesen las lasen", "reads read read", _TEXTS),
    _verb("schreibt schreiben schrieb schrieben", "writes write wrote", _TEXTS[1:2] + _TEXTS[3:7]),
    _verb("sucht suchen suchte suchten", "looks-for look-for looked-for", _THINGS + _LIVING),
    _verb("findet finden fand fanden", "finds find found", _THINGS + _LIVING),
    _verb("sieht sehen sah sahen", "sees see saw", _LIVING + _SIGHTS),
    _verb("besucht besuchen besuchte besuchten", "visits visit visited", _SIGHTS),
    _verb("malt malen malte malten", "paints paint painted", _LIVING + _SIGHTS),
    _verb("verkauft verkaufen verkaufte verkauften", "sells sell sold", _THINGS + _FOODS),
    _verb("braucht brauchen brauchte brauchten", "needs need needed", _THINGS),
    _verb("trägt tragen trug trugen", "carries carry carried", _THINGS[2:8]),
    _verb("begrüßt begrüßen begrüßte begrüßten", "greets greet greeted", _LIVING),
    _verb("vergisst vergessen vergaß vergaßen", "forgets forget forgot", _TEXTS + _THINGS),
)
_NOW = _pairs("""heute=today
jeden Tag=every day
am Abend=in the evening
am Morgen=in the morning
oft=often
jeden Montag=every Monday
im Sommer=in summer
im Winter=in winter""")
_THEN = _pairs("""gestern=yesterday
letzte Woche=last week
vor zwei Tagen=two days ago
letztes Jahr=last year
am Samstag=on Saturday
am Sonntag=on Sunday
gestern Abend=yesterday evening
im Juli=in July""")


@dataclass(frozen=True)
class _Topic:
    """What people do something with, where, and what else is said."""

    objects: tuple[Pair, ...]
    places: tuple[Pair, ...]
    remarks: tuple[Pair, ...]


_TOPICS = {
    "food": _Topic(
        _FOODS,
        _pairs("""auf dem Markt=at the market
zu Hause=at home
im Garten=in the garden
in der Küche=in the kitchen"""),
        _pairs("""Das Essen schmeckt sehr gut.=The food tastes very good.
Alle sind müde, aber glücklich.=Everyone is tired but happy.
Wir freuen uns auf den Besuch.=We are looking forward to the visit."""),
    ),
    "things": _Topic(
        _THINGS,
        _pairs("""in der Stadt=in the city
auf dem Markt=at the market
im Dorf=in the village
vor dem Haus=in front of the house"""),
        _pairs("""Der Laden ist am Sonntag geschlossen.=The shop is closed on Sunday.
Am Ende wird alles gut.=In the end everything will be fine.
Es regnet sehr stark.=It is raining very hard."""),
    ),
    "books and letters": _Topic(
        _TEXTS,
        _pairs("""in der Schule=at school
am Bahnhof=at the station
zu Hause=at home
im Zug=on the train"""),
        _pairs("""Der Zug kommt heute zu spät.=The train is late today.
Ich habe leider keine Zeit.=Unfortunately I have no time.
Vielen Dank für deine Hilfe.=Thank you very much for your help.
Bitte ruf mich morgen an.=Please call me tomorrow."""),
    ),
    "people and animals": _Topic(
        _LIVING,
        _pairs("""im Park=in the park
im Dorf=in the village
im Garten=in the garden
vor dem Haus=in front of the house"""),
        _pairs("""Die Kinder spielen auf der Straße.=The children are playing in the street.
Es ist kalt und windig.=It is cold and windy.
Alle sind müde, aber glücklich.=Everyone is tired but happy."""),
    ),
    "sights": _Topic(
        _SIGHTS,
        _pairs("""in der Stadt=in the city
im Park=in the park
am See=by the lake
neben der Brücke=next to the bridge"""),
        _pairs("""Das Wetter ist schön.=The weather is beautiful.
Die Karten kosten zehn Euro.=The tickets cost ten euros.
Wir freuen uns auf den Besuch.=We are looking forward to the visit."""),
    ),
}


def _compose(topic: _Topic, rng: Random) -> Dialogue:
    """A German text with its translation."""
    is_by_sentence = rng.random() < 0.5
    sentences = [_sentence(topic, rng) for _ in range(rng.randint(2, 3) + (not is_by_sentence))]
    sentences.insert(rng.randint(1, len(sentences)), rng.choice(topic.remarks))
    german = " ".join(pair[0] for pair in sentences)
    if is_by_sentence:
        lines = "\n".join(f'- "{german}" means: {english}' for german, english in sentences)
        answer = f"Here is the translation, sentence by sentence:\n{lines}"
        return [(rng.choice(_BY_SENTENCE_TASKS).format(german), answer)]
    english = " ".join(pair[1] for pair in sentences)
    return [(rng.choice(_TASKS).format(german), f"Here is the translation: {english}")]


def _sentence(topic: _Topic, rng: Random) -> Pair:
    subject, is_plural = _subject(rng)
    verb = rng.choice([verb for verb in VERBS if set(verb.objects) & set(topic.objects)])
    is_past = rng.random() < 0.5
    fitting = [pair for pair in verb.objects if pair in topic.objects and pair[1] != subject[1]]
    time = rng.choice(_THEN if is_past else _NOW)
    opening = rng.choice(("time", "place", "subject"))
    form = verb.form(is_plural, is_past)
    return arrange(opening, subject, form, rng.choice(fitting), time, rng.choice(topic.places))


def arrange(opening: str, subject: Pair, verb: Pair, obj: Pair, time: Pair, place: Pair) -> Pair:
    """A sentence from its parts, opened by the time, the place or the subject.

    German keeps the verb second, so an opening moves the subject behind it; the object comes last.
    English keeps subject, verb and object together.
    """
    german: tuple[Pair, ...] = (subject, verb, time, obj)
    english: tuple[Pair, ...] = (subject, verb, obj, time)
    if opening == "time":
        german, english = (time, verb, subject, place, obj), (time, subject, verb, obj, place)
    elif opening == "place":
        german, english = (place, verb, subject, time, obj), (place, subject, verb, obj, time)
    sentences = " ".join(part[0] for part in german), " ".join(part[1] for part in english)
    return f"{_capital(sentences[0])}.", f"{_capital(sentences[1])}."


def _subject(rng: Random) -> tuple[Pair, bool]:
    """A subject and whether it is plural."""
    match rng.randrange(3):
        case 0:
            name = rng.choice(NAMES)
            return (name, name), False
        case 1:
            return rng.choice(_SINGULAR), False
        case _:
            return rng.choice(_PLURAL), True


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


TOPICS = {name: partial(_compose, topic) for name, topic in _TOPICS.items()}
