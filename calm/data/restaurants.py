"""The embedded corpus: facts about invented places and a sentence or two that says them.

In the manner of E2E (meaning representation -> description), from a grammar and a lexicon of our own, so that
it needs no network and no licence. Difficulty varies by token: the name must be copied, a food or a price is
read off, the connecting words are nearly free. Which phrasing is taken is chance, so no model reaches 1.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ..records import Example

_FIRST = (
    "", "Copper", "Silver", "Golden", "Crooked", "Hidden", "Quiet", "Rusty",
    "Velvet", "Painted", "Wandering", "Lucky", "Frosty", "Scarlet", "Hungry", "Old",
)  # fmt: skip
_SECOND = (
    "Fox", "Lantern", "Anchor", "Kettle", "Sparrow", "Orchard", "Barrel", "Compass",
    "Badger", "Clover", "Harbour", "Mill", "Pepper", "Saddle", "Thistle", "Willow",
)  # fmt: skip
NAMES = tuple(f"{first} {second}".strip() for first in _FIRST for second in _SECOND)
_LANDMARKS = (
    "city hall",
    "the museum",
    "the market",
    "the stadium",
    "the library",
    "the theatre",
    "the bridge",
    "the zoo",
)
_TYPES = ("restaurant", "pub", "bistro", "diner", "tea room")
_FOODS = ("Thai", "Greek", "Mexican", "Korean", "Turkish", "Indian", "seafood", "vegan")

_AREAS = {
    "riverside": ("on the riverside", "in the riverside area"),
    "city centre": ("in the city centre", "in the heart of the city centre"),
    "old town": ("in the old town", "in the old town area"),
    "suburbs": ("in the suburbs", "out in the suburbs"),
}
_PRICES = {
    "very cheap": ("very cheap", "really cheap"),
    "cheap": ("cheap", "rather cheap"),
    "medium": ("moderately priced", "medium priced"),
    "expensive": ("expensive", "rather expensive"),
    "very expensive": ("very expensive", "really expensive"),
}
_RATINGS = {
    "none": ("has no rating yet", "is not rated yet"),
    "one star": ("is rated one star", "has a poor rating of one star"),
    "two stars": ("is rated two stars", "has a low rating of two stars"),
    "three stars": ("is rated three stars", "has an average rating of three stars"),
    "four stars": ("is rated four stars", "has a good rating of four stars"),
    "five stars": ("is rated five stars", "has a top rating of five stars"),
}
_FAMILY = {
    "yes": ("Families are welcome.", "Children are welcome.", "It is family friendly."),
    "no": ("It is not for families.", "Children are not admitted.", "It is for adults only."),
}
_PRESENT = {"food": 0.8, "area": 0.6, "price": 0.55, "rating": 0.55, "family": 0.45, "near": 0.4}


def _facts(rng: random.Random) -> dict[str, str]:
    """A slot set in a fixed order of slots: name and type always, the others by chance, at least one of them."""
    choices = {
        "food": _FOODS,
        "area": tuple(_AREAS),
        "price": tuple(_PRICES),
        "rating": tuple(_RATINGS),
        "family": tuple(_FAMILY),
        "near": _LANDMARKS,
    }
    facts = {"name": rng.choice(NAMES), "type": rng.choice(_TYPES)}
    facts.update({slot: rng.choice(values) for slot, values in choices.items() if rng.random() < _PRESENT[slot]})
    if len(facts) == 2:
        facts["food"] = rng.choice(_FOODS)
    return facts


def _opening(facts: dict[str, str], rng: random.Random) -> str:
    """Name, type, food, area and landmark in one sentence."""
    name, kind = facts["name"], facts["type"]
    food = facts.get("food")
    places = [rng.choice(_AREAS[facts["area"]])] if "area" in facts else []
    if "near" in facts:
        places.append(f"{rng.choice(('near', 'next to'))} {facts['near']}")
    place = " ".join(places)
    if food is None:
        return f"{name} is a {kind} {place}." if place else f"{name} is a {kind}."
    phrasings = [f"{name} is a {kind} {place} serving {food} food.", f"{name} is a {food} {kind} {place}."]
    return " ".join(rng.choices(phrasings, weights=(3, 1))[0].split()).replace(" .", ".")


def _judgement(facts: dict[str, str], rng: random.Random) -> str:
    """Price and rating in one sentence, or one of them; empty without either."""
    price = rng.choice(_PRICES[facts["price"]]) if "price" in facts else None
    rating = rng.choices(_RATINGS[facts["rating"]], weights=(2, 1))[0] if "rating" in facts else None
    if price and rating:
        return f"It is {price} and {rating}."
    if price:
        return rng.choice((f"It is {price}.", f"The food is {price}."))
    return f"It {rating}." if rating else ""


def describe(facts: dict[str, str], rng: random.Random) -> str:
    """One to three sentences that say all facts, one phrasing of each drawn from ``rng``."""
    sentences = [_opening(facts, rng), _judgement(facts, rng)]
    if "family" in facts:
        sentences.append(rng.choice(_FAMILY[facts["family"]]))
    return " ".join(sentence for sentence in sentences if sentence)


def rows(size: int, seed: int = 0) -> Iterator[Example]:
    """``size`` rows; a pure function of (size's prefix, seed): a longer corpus begins with the shorter one.

    The family is the whole slot set, whatever order the source lists it in; names recur between families.
    """
    rng = random.Random(seed)
    for i in range(size):
        facts = _facts(rng)
        family = "; ".join(f"{slot}={value}" for slot, value in facts.items())
        slots = list(facts.items())
        rng.shuffle(slots)
        source = ", ".join(f"{slot}[{value}]" for slot, value in slots)
        yield Example(id=f"restaurants-{i:06d}", family=family, source=source, target=describe(facts, rng))
