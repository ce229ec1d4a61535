"""Synthetic look-up tasks whose answers cross document boundaries.

Each sample is a list of documents, a list of questions and one answer word per question. Names, places and
objects are drawn afresh for every sample, so nothing can be learned by heart. A fact is written with its
value right after its key ("home Anna Paris"), in the statement as in the question.

==========  ===========================================================================
task        what an answer needs
==========  ===========================================================================
alias       a document names a person, a later one says where "she" lives
two_hop     person -> object in one document, object -> place in another
relative    "home Bob with Ann": a place that another document sets through another person
passkey     control: one document holds the whole fact
latest      control: the last of several statements about the same person holds
==========  ===========================================================================
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAMES = (
    "Anna Bob Carl Dora Emma Fred Gina Hans Iris Jack Kate Liam Mary Nora Otto Paul Rosa Sam Tina Uma "
    "Vera Walt Xena Yara Zoe Adam Beth Cora Dan Elsa Finn Greta Hugo Ida Jane Karl Lena Max Nina Olaf "
    "Pia Rick Sara Tom Ursula Victor Wendy Alan Brian Chris Diana Eric Frank Grace Henry Ivan Julia Kevin "
    "Laura Mark Nancy Oscar Peter Quinn Ruth Steve Theo Vince Will Alice Bruce Clara David Ellen Felix "
    "George Helen Isaac James Linda Megan Noah Olga Patty Ralph Simon Tracy Wayne Aaron Betty Cindy Donna"
).split()
PLACES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Athens Prague Warsaw Moscow Cairo Delhi Tokyo "
    "Seoul Beijing Sydney Toronto Chicago Boston Dallas Denver Miami Seattle Portland Houston Phoenix Atlanta "
    "Geneva Munich Hamburg Milan Naples Venice Zurich Brussels Budapest Helsinki Lima Bogota Havana Quito "
    "Manila Jakarta Bangkok Nairobi Lagos Tunis Oakland Fremont Berkeley Sacramento"
).split()
OBJECTS = (
    "lamp chair table book ring watch coat hat bag key clock drum piano violin guitar bike boat car truck "
    "kite ball doll sword shield crown mask mirror vase rug bell candle bottle basket knife fork spoon plate "
    "cup glass phone camera radio laptop printer pencil brush hammer saw rope ladder tent map"
).split()
FILLERS = (
    "today the weather was fine and we had some tea in the garden before dinner with a few old friends who "
    "came by train from the north and told us about their long trip over the hills near the sea"
).split()


@dataclass(frozen=True)
class Sample:
    """One context. ``documents`` end with a period; ``questions[i]`` is completed by ``answers[i]``."""

    task: str
    documents: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def _filler(rng: random.Random, longest: int) -> str:
    words = [rng.choice(FILLERS) for _ in range(rng.randint(0, longest))]
    return " " + " ".join(words) + "." if words else ""


def _ask(task: str, documents: Sequence[str], facts: Sequence[tuple[str, str]], rng: random.Random) -> Sample:
    order = list(facts)
    rng.shuffle(order)
    return Sample(
        task,
        tuple(documents),
        tuple(f"home {name}" for name, _ in order),
        tuple(place for _, place in order),
    )


def alias(rng: random.Random, facts: int, filler: int) -> Sample:
    names, places = rng.sample(NAMES, facts), rng.sample(PLACES, facts)
    documents = []
    for name, place in zip(names, places, strict=True):
        documents.append(f"this is {name}.{_filler(rng, filler)}")
        documents.append(f"home she {place}.{_filler(rng, filler)}")
    return _ask("alias", documents, list(zip(names, places, strict=True)), rng)


def two_hop(rng: random.Random, facts: int, filler: int) -> Sample:
    names, places, objects = rng.sample(NAMES, facts), rng.sample(PLACES, facts), rng.sample(OBJECTS, facts)
    owns = [f"owns {n} {o}.{_filler(rng, filler)}" for n, o in zip(names, objects, strict=True)]
    stands = [f"home {o} {p}.{_filler(rng, filler)}" for o, p in zip(objects, places, strict=True)]
    rng.shuffle(owns)
    rng.shuffle(stands)
    return _ask("two_hop", owns + stands, list(zip(names, places, strict=True)), rng)


def relative(rng: random.Random, facts: int, filler: int) -> Sample:
    names, places = rng.sample(NAMES, 2 * facts), rng.sample(PLACES, facts)
    hosts, guests = names[:facts], names[facts:]
    known = [f"home {n} {p}.{_filler(rng, filler)}" for n, p in zip(hosts, places, strict=True)]
    joined = [f"with {g} {h}.{_filler(rng, filler)}" for g, h in zip(guests, hosts, strict=True)]
    rng.shuffle(known)
    rng.shuffle(joined)
    return _ask("relative", known + joined, list(zip(guests, places, strict=True)), rng)


def passkey(rng: random.Random, facts: int, filler: int) -> Sample:
    names, places = rng.sample(NAMES, facts), rng.sample(PLACES, facts)
    documents = [f"home {n} {p}.{_filler(rng, filler)}" for n, p in zip(names, places, strict=True)]
    return _ask("passkey", documents, list(zip(names, places, strict=True)), rng)


def latest(rng: random.Random, facts: int, filler: int) -> Sample:
    names, places = rng.sample(NAMES, max(1, facts // 2)), rng.sample(PLACES, facts)
    documents, current = [], {}
    for place in places:
        name = rng.choice(names)
        current[name] = place
        documents.append(f"home {name} {place}.{_filler(rng, filler)}")
    return _ask("latest", documents, list(current.items()), rng)


TASKS: dict[str, Callable[[random.Random, int, int], Sample]] = {
    "alias": alias,
    "two_hop": two_hop,
    "relative": relative,
    "passkey": passkey,
    "latest": latest,
}
CONTROLS = ("passkey", "latest")
