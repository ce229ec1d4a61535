"""Looking up what followed the same tokens: against a search that looks everywhere."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.sequence.generation_request import CacheParams
from inference_svc.spec_decode.ngram_index import SHORT_NGRAM, NgramIndex
from inference_svc.spec_decode.ngram_proposer import _GENERATION, _TENANTS, AnswerHistory, NgramProposer
from inference_svc.spec_decode.proposer import ROOT, Draft, DraftRequest
from tests.inference_svc.spec_decode.chance import sequence

few = st.lists(st.integers(0, 3), min_size=1, max_size=14)


def longest(text: list[int], tail: list[int]) -> int:
    """Of all places that something follows, the longest run that ends as ``tail`` does."""
    best = 0
    for place in range(len(text) - 1):
        n = 0
        while n < len(tail) and n <= place and text[place - n] == tail[-1 - n]:
            n += 1
        best = max(best, n)
    return best


@given(few, few)
def test_what_is_found_is_the_longest_match(text: list[int], tail: list[int]) -> None:
    chains = NgramIndex(64)
    chains.add(text)
    match, best = chains.find(tail), longest(text, tail)
    assert (match.length if match else 0) == (best if best >= SHORT_NGRAM else 0)
    if match:
        assert text[match.place + 1 - match.length : match.place + 1] == tail[-match.length :]


@given(st.lists(st.integers(-1, 3), min_size=60, max_size=200), st.integers(0, 60))
def test_many_tokens_at_once_are_entered_like_one_by_one(text: list[int], first: int) -> None:
    at_once, singly = NgramIndex(256), NgramIndex(256)
    at_once.add(text[:first])
    at_once.add(text[first:])
    for token in text:
        singly.add([token])
    assert at_once._heads == singly._heads
    assert at_once._before == singly._before


def test_a_loop_goes_on() -> None:
    chains = NgramIndex(16)
    chains.add([7, 1, 2, 3, 1, 2, 3])
    match = chains.find([1, 2, 3])
    assert match is not None
    assert chains.follow(match.place, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_past_answers_are_bounded_and_the_oldest_go() -> None:
    past = AnswerHistory()
    for i in range(40):
        past.add(b"", list(range(1000 * i, 1000 * i + 1000)))
    assert past.find(b"", [39_000, 39_001], 1)
    assert not past.find(b"", [0, 1], 1)
    assert sum(chains.capacity for chains in past._tenants[b""]) == 2 * _GENERATION
    past.add(b"long", list(range(10 * _GENERATION)))
    assert past.find(b"long", [10 * _GENERATION - 9, 10 * _GENERATION - 8], 1)
    for i in range(_TENANTS):
        past.add(b"%d" % i, [1, 2, 3])
    assert not past.find(b"", [39_000, 39_001], 1), "the tenant that came first is forgotten"


def guess(lookup: NgramProposer, tokens: list[int], use: CacheParams) -> list[int]:
    asking = sequence(tokens, 50)
    asking.request = replace(asking.request, cache=use)
    (draft,) = lookup.propose([DraftRequest(asking, 4)])
    return list(draft.tokens)


def test_past_answers_are_their_tenants_alone() -> None:
    lookup = NgramProposer()
    done = sequence([1, 2], 50)
    done.request = replace(done.request, cache=CacheParams(tenant_salt=b"a"))
    done.tokens += [3, 4, 5, 6, 7]
    lookup.finish(done)
    assert guess(lookup, [9, 3, 4], CacheParams(tenant_salt=b"a")) == [5, 6, 7]
    assert guess(lookup, [9, 3, 4], CacheParams(tenant_salt=b"b")) == []
    assert guess(lookup, [9, 3, 4], CacheParams()) == []
    assert guess(lookup, [9, 3, 4], CacheParams(tenant_salt=b"a", read=False)) == [], "it may read nothing"
    done = sequence([1, 2], 50)
    done.request = replace(done.request, cache=CacheParams(write=False))
    done.tokens += [11, 12, 13, 14]
    lookup.finish(done)
    assert guess(lookup, [9, 11, 12], CacheParams()) == [], "it leaves nothing behind"


def test_paths_go_on_along_first_children() -> None:
    tree = Draft((5, 6, 7, 8, 9), (ROOT, ROOT, 0, 0, 2), (0, 1, 2, 3, 4))
    assert tree.paths() == [[0, 2, 4], [1], [3]]
    assert tree.depth == 3
    assert tree.ancestors(4) == [ROOT, 0, 2]
    assert tree.accepted_path([5, 8, 7]) == [0, 3]
    assert tree.select([1, 0, 3]) == Draft((6, 5, 8), (ROOT, ROOT, 1), (1, 0, 3))
    assert Draft().paths() == []
    assert not Draft()


def test_other_branches_are_what_followed_elsewhere() -> None:
    text = [1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 7, 9, 9, 2, 3, 4]
    asking = sequence(text, 50)
    (chain,) = NgramProposer().propose([DraftRequest(asking, 3)])
    assert chain.tokens == (6, 7, 9)
    (tree,) = NgramProposer().propose([DraftRequest(asking, 3, 2)])
    assert [[tree.tokens[i] for i in path] for path in tree.paths()[:2]] == [[6, 7, 9], [5, 9, 2]]
    assert tree.buckets[:3] == chain.buckets
    assert all(parent < i for i, parent in enumerate(tree.parents))
    assert all(len({tree.tokens[i] for i in tree.children(at)}) == len(tree.children(at)) for at in range(-1, 6))


@given(few, few)
def test_what_else_is_found_has_other_tokens_behind_it(text: list[int], tail: list[int]) -> None:
    chains = NgramIndex(64)
    chains.add(text)
    found = chains.find_many(tail, 3)
    assert (found[0].length if found else 0) == max([0, *(m.length for m in found)])
    assert found[:1] == ([one] if (one := chains.find(tail)) else [])
    following = [chains.follow(match.place, 1)[0] for match in found]
    assert len(set(following)) == len(following) <= 3
    for match in found:
        assert text[match.place + 1 - match.length : match.place + 1] == tail[-match.length :]


def test_room_grows_with_the_text_and_not_with_what_an_answer_may_have() -> None:
    """Answers that may be as long as the context cost no more than others, and are guessed alike."""
    text = [1, 2, 3, 4, 5, 9, 2, 3, 4]
    short, long = sequence(text, 6000), sequence(text, 1 << 30)
    exact, growing = NgramProposer(), NgramProposer()
    exact._own[short] = NgramIndex(len(text) + 6000)
    for i in range(6000):
        if not i % 250:
            assert growing.propose([DraftRequest(long, 4)]) == exact.propose([DraftRequest(short, 4)])
            assert growing._own[long].capacity <= 1024 + 2 * len(long.tokens)
        for one in (short, long):
            one.tokens.append(i * i % 11)
    assert growing.propose([DraftRequest(long, 4)])[0].tokens
