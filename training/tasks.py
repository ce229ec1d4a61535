"""Synthetic look-up tasks whose answers cross document boundaries.

A sample is a list of documents, a list of questions, and one answer word per question. Every sample draws new names,
places and objects, so the model cannot memorize answers. Statements and questions write the value of a fact right after
its key ("home Anna Paris").

==========  ===========================================================================
task        knowledge that an answer needs
==========  ===========================================================================
alias       a document names a person, a later one says where "she" lives
two_hop     object -> place in one document, person -> object in a later one
relative    "home Bob with Ann": a place that another document sets through another person
passkey     control: one document holds the whole fact
latest      control: several documents state the home of a person, and the last one is right
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
class Document:
    """A fact of a few words among filler words.

    ``implied`` is the word that follows from the fact and earlier documents.
    """

    before: str
    fact: str
    after: str
    implied: str = ""

    @property
    def text(self) -> str:
        return f"{self.before}{self.fact}.{self.after}"


@dataclass(frozen=True)
class Sample:
    """Documents with their questions; ``answers[i]`` completes ``questions[i]``."""

    task: str
    documents: tuple[Document, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(FILLERS) for _ in range(count)) + "." if count else ""


def _document(rng: random.Random, longest_filler: int, fact: str, implied: str = "") -> Document:
    count = rng.randint(0, longest_filler)
    first = rng.randint(0, count)
    before, after = _words(rng, first), _words(rng, count - first)
    return Document(before + " " if before else "", fact, " " + after if after else "", implied)


def _ask(task: str, documents: Sequence[Document], facts: Sequence[tuple[str, str]], rng: random.Random) -> Sample:
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
        documents.append(_document(rng, filler, f"this is {name}"))
        documents.append(_document(rng, filler, f"home she {place}", name))
    return _ask("alias", documents, list(zip(names, places, strict=True)), rng)


def two_hop(rng: random.Random, facts: int, filler: int) -> Sample:
    names, places, objects = rng.sample(NAMES, facts), rng.sample(PLACES, facts), rng.sample(OBJECTS, facts)
    stands = [_document(rng, filler, f"home {o} {p}") for o, p in zip(objects, places, strict=True)]
    owns = [_document(rng, filler, f"owns {n} {o}", p) for n, o, p in zip(names, objects, places, strict=True)]
    rng.shuffle(owns)
    rng.shuffle(stands)
    return _ask("two_hop", stands + owns, list(zip(names, places, strict=True)), rng)


def relative(rng: random.Random, facts: int, filler: int) -> Sample:
    names, places = rng.sample(NAMES, 2 * facts), rng.sample(PLACES, facts)
    hosts, guests = names[:facts], names[facts:]
    known = [_document(rng, filler, f"home {n} {p}") for n, p in zip(hosts, places, strict=True)]
    joined = [_document(rng, filler, f"with {g} {h}", p) for g, h, p in zip(guests, hosts, places, strict=True)]
    rng.shuffle(known)
    rng.shuffle(joined)
    return _ask("relative", known + joined, list(zip(guests, places, strict=True)), rng)


def passkey(rng: random.Random, facts: int, filler: int) -> Sample:
    names, places = rng.sample(NAMES, facts), rng.sample(PLACES, facts)
    documents = [_document(rng, filler, f"home {n} {p}") for n, p in zip(names, places, strict=True)]
    return _ask("passkey", documents, list(zip(names, places, strict=True)), rng)


def latest(rng: random.Random, facts: int, filler: int, names: int | None = None) -> Sample:
    people, places = rng.sample(NAMES, names or max(1, facts // 2)), rng.sample(PLACES, facts)
    documents, current = [], {}
    for place in places:
        name = rng.choice(people)
        current[name] = place
        documents.append(_document(rng, filler, f"home {name} {place}"))
    return _ask("latest", documents, list(current.items()), rng)


TASKS: dict[str, Callable[[random.Random, int, int], Sample]] = {
    "alias": alias,
    "two_hop": two_hop,
    "relative": relative,
    "passkey": passkey,
    "latest": latest,
}
CONTROLS = ("passkey", "latest")
