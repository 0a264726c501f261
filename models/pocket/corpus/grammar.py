"""A tiny template language, and the cast of a story.

A template is text with {this|that} choices, which nest, and $names that are looked up in a
dictionary. `a~` becomes "a" or "an" by the word that follows, and `^` makes the next letter a
capital. An alternative may be empty. Everything random comes from one random.Random, so a seed
gives the same text everywhere.
"""
import re

from corpus import words as W

CHOICE = re.compile(r"\{([^{}]*)\}")
NAME = re.compile(r"\$([A-Za-z_0-9]+)")
ARTICLE = re.compile(r"\b([Aa])~(\s+)(\S)")
CAPITAL = re.compile(r"\^(\s*)([a-z])")
AN = set("aeiouAEIOU8")


def expand(rng, template, names=None):
    """One random reading of the template."""
    text = template
    for _ in range(12):  # a value may hold choices and names again
        before = text
        while True:
            new = CHOICE.sub(lambda m: rng.choice(m.group(1).split("|")), text)
            if new == text:
                break
            text = new
        if names is not None:
            text = NAME.sub(lambda m: str(names[m.group(1)]), text)
        if text == before:
            break
    text = ARTICLE.sub(
        lambda m: m.group(1) + ("n" if m.group(3) in AN else "") + m.group(2) + m.group(3), text)
    text = CAPITAL.sub(lambda m: m.group(1) + m.group(2).upper(), text)
    text = text.replace("^", "")
    text = re.sub(r" +([.,!?])", r"\1", text)
    return re.sub(r"  +", " ", text).replace(" \n", "\n").replace("\n ", "\n").strip()


PRONOUNS = {
    "m": ("he", "him", "his", "himself"), "f": ("she", "her", "her", "herself"),
    "n": ("it", "it", "its", "itself"),
}


def put_person(names, suffix, name, sex, kind, noun):
    """The names a template uses for one character: $N, $he, $him, $his, $himself, $kind, $the,
    each with the suffix."""
    he, him, his, himself = PRONOUNS[sex]
    names.update({
        "N" + suffix: name, "he" + suffix: he, "him" + suffix: him, "his" + suffix: his,
        "himself" + suffix: himself, "He" + suffix: he.capitalize(),
        "His" + suffix: his.capitalize(), "kind" + suffix: kind, "the" + suffix: "the " + noun,
        "noun" + suffix: noun,
    })


def cast(rng, beasts=0.45, hero=None):
    """A hero (no suffix), a friend (2), a grown-up (3), and a setting. `hero` may fix (name,
    sex, kind, noun)."""
    names = {}
    animal_world = rng.random() < beasts
    used = set()

    def fresh(sex, animal):
        pool = W.BEAST_NAMES[sex] if animal else W.CHILD_NAMES[sex]
        while True:
            name = rng.choice(pool)
            if name not in used:
                used.add(name)
                return name

    for suffix in ("", "2"):
        if hero is not None and suffix == "":
            name, sex, kind, noun = hero
            used.add(name)
            put_person(names, suffix, name, sex, kind, noun)
            continue
        sex = rng.choice("mf")
        animal = animal_world if rng.random() < 0.85 else not animal_world
        if animal:
            noun = rng.choice([b for b in W.BEASTS if b not in used])
            used.add(noun)
            kind = expand(
                rng, "a~ "
                "{little|young|small|gentle|cheerful|quiet|clever|playful|grey|"
                "brown|} " + noun)
        else:
            noun = "boy" if sex == "m" else "girl"
            kind = expand(rng,
                          "a~ {little|young|small|kind|cheerful|quiet|clever|curious|} " + noun)
        put_person(names, suffix, fresh(sex, animal), sex, kind, noun)
    name, sex, job = rng.choice(W.ELDERS)
    put_person(names, "3", name, sex, "a~ {kind|wise|friendly|patient|} " + job, job)
    animal_world = names["noun"] in W.BEASTS
    names["trait"] = rng.choice(W.TRAITS)
    names["town"] = rng.choice(W.TOWNS)
    names["home"] = rng.choice(W.BEAST_HOMES if animal_world else W.CHILD_HOMES)
    names["land"] = rng.choice(W.LANDS)
    names["season"] = rng.choice(["spring", "summer", "autumn", "winter"])
    names["weather"] = rng.choice(W.WEATHER[names["season"]])
    names["food"] = rng.choice(W.FOODS)
    names["food2"] = rng.choice([f for f in W.FOODS if f != names["food"]])
    names["color"] = rng.choice(W.COLORS)
    names["color2"] = rng.choice([c for c in W.COLORS if c != names["color"]])
    names["toy"] = rng.choice(W.COLORS + W.STUFFS + ["little", "old", "shiny"]) + " " + rng.choice(
        W.TOYS)
    names["thing"] = names["toy"].split()[-1]
    names["animal"] = rng.choice([b for b in W.STRAY_BEASTS if b not in used])
    names["tree"] = rng.choice(W.TREES)
    names["flower"] = rng.choice(W.FLOWERS)
    names["day"] = rng.choice(W.DAYS)
    names["n"] = rng.choice(W.NUMBERS[2:8])
    return names
