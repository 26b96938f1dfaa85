"""Word lists that all task groups draw from."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(phrase.strip() for phrase in text.split(","))


NAMES = _words(
    """Anna Ben Clara David Elena Felix Grace Hugo Iris Jonas Karin Leo Maria Noah Olga Paul
    Rosa Simon Tara Victor Wanda Xavier Yusuf Zoe Amir Bruno Carla Dora Emil Frida Georg Hanna
    Ivan Julia Kofi Lena Marco Nina Oscar Priya Quentin Ruth Samuel Tilda Ulrich Vera Walter
    Yara Aisha Boris Celia Dmitri Esther Farid Greta Hassan Ingrid Jamal"""
)

SURNAMES = _words(
    """Alden Barlow Castle Dorsey Ebner Fontaine Gruber Hollis Ivers Jansen Keller Lindqvist
    Marlow Novak Okafor Pereira Quist Rossi Sandoval Tanaka Ullman Varga Weston Yilmaz Zeller
    Ashby Brandt Coleman Duarte Engel"""
)

PROFESSIONS = _words(
    """baker teacher nurse carpenter farmer librarian gardener pilot painter mechanic tailor
    chemist journalist plumber sailor musician dentist engineer architect translator florist
    potter photographer cook electrician"""
)

ANIMALS = _words(
    """fox owl hedgehog otter rabbit squirrel heron badger tortoise sparrow goat donkey cat
    dog horse penguin beaver mouse swan raven deer bear frog duck"""
)

INGREDIENT_BY_FOOD = dict(
    pair.split("=")
    for pair in _phrases(
        """tomato soup=tomatoes, apple pie=apples, potato salad=potatoes,
        mushroom risotto=mushrooms, lentil stew=lentils, cheese omelette=cheese,
        vegetable curry=vegetables, banana bread=bananas, pumpkin soup=pumpkin, bean chili=beans,
        rice pudding=rice, spinach pasta=spinach, carrot cake=carrots, onion tart=onions,
        fish stew=fish, pepper salad=peppers, plum cake=plums, noodle soup=noodles"""
    )
)
FOODS = tuple(INGREDIENT_BY_FOOD)

HOBBIES = _phrases(
    """playing chess, growing tomatoes, learning Spanish, running, painting with watercolours,
    playing the guitar, baking bread, taking photographs, swimming, keeping bees, writing a diary,
    learning to sew, bird watching, cycling to work, drawing portraits, speaking in public,
    saving money, sleeping better, reading more books, learning the piano"""
)

FRUITS = _words(
    "apples pears plums oranges lemons peaches cherries melons figs bananas grapes limes"
)

GOODS = _words(
    """pencils notebooks candles cups plates books postcards lamps chairs baskets bottles boxes
    buttons ribbons shirts stamps tickets toys tiles flowerpots"""
)

COLOURS = _words("red blue green yellow white black brown grey orange purple silver golden")

MONTHS = _words(
    """January February March April May June July August September October November December"""
)

WEEKDAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

TOWNS = _words(
    """Aldermoor Brackenford Calderwick Dunhollow Elmsworth Fennbridge Glasmere Hartsgate
    Kestrelford Larkhaven Millowick Pebbleton Ravensby Silverfen Thornwick Yarrowdale"""
)

NUMBER_WORDS = _words("zero one two three four five six seven eight nine ten eleven twelve")


def with_article(noun: str) -> str:
    """The noun behind "a" or "an" ("an owl")."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def listed(items: list[str]) -> str:
    """The items as a sentence lists them ("a, b and c")."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
