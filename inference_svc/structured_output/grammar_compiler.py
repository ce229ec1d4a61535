"""Requests' grammars into what steers an answer, compiled by llguidance (https://github.com/guidance-ai/llguidance).

What compiling costs is bounded by size and by the compiler's own limits, which count work instead of time: the same
grammar is refused everywhere, however busy the machine is. At 64 KiB nothing that was found takes longer than two
seconds, without the GIL and on a thread that reads requests.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import structlog
from kvsidecar.errors import InvalidRequest, UnsupportedOption
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import MAX_GRAMMAR_BYTES
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, hf
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inference_svc.equivalents import rewritten
from inference_svc.structured_output.grammar_state import Matcher, Steering
from inference_svc.structured_output.schema_normalize import plain
from inference_svc.unique.compiling import places_of
from inference_svc.unique.matcher import UniqueMatcher
from inference_svc.unique.vocabulary import Vocabulary
from inference_svc.unique.watch import Watch
from inference_svc.unique.within import Opening, Tags, UniqueWithin

log = structlog.get_logger("worker")

_MAX_CHOICES = 1024
# Between two parts of JSON: nothing, a space, or a line's end and indentation. Small models would write nothing else.
WHITESPACE = r"( |\r?\n[ \t]{0,24})?"
_KEPT = 64
_MAX_THREADS = 8
_MAX_SHOWN = 300
_UNIQUE = "uniqueItems"
# The compiler's advice to programs that call it.
_ADVICE = re.compile(r"constraints are not supported\. Enable 'coerce_one_of' .*", re.DOTALL)


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones: a program sends the same one again and again.
    Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stops: frozenset[int]) -> None:
        """``vocabulary`` is the width of the model's logits, ``stops`` its end-of-sequence tokens."""
        self._source, self._vocabulary, self._stops = tokenizer, vocabulary, stops
        self._tokenizer: LLTokenizer | None = None
        self._unreadable = False
        self._words: Vocabulary | None = None  # read when the first schema needs it
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()
        self._lock = threading.Lock()
        # They compute with NumPy's and llguidance's own code alone: torch would keep a team of threads for each.
        threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._threads = ThreadPoolExecutor(threads, "mask")

    def prepare(self) -> None:
        """Reads the vocabulary, which takes seconds for a large one and holds the GIL: not while others are answered.
        Without it that is done for the first grammar."""
        with suppress(UnsupportedOption):  # said to who sends one
            self._ready()

    def steering(self, grammar: pb.Grammar) -> Steering:
        """What keeps an answer to a grammar. Raises InvalidRequest, UnsupportedOption, about ``grammar``."""
        source = _source_of(grammar)
        schema = _schema(grammar) if _UNIQUE in grammar.json_schema else {}
        bare = plain(schema, unique=False)
        if bare == schema:
            return self._steering(source)
        return self._steering(source, lambda: self._compile_unique(bare, schema))

    def of_lark(
        self, lark: str, openings: Sequence[Opening] = (), marker: int | None = None, tags: Tags | None = None
    ) -> Steering:
        """The same for a grammar of our own making, in Lark's form. Behind ``openings``, of which some come after the
        token ``marker`` or between ``tags``, stand values whose ``uniqueItems`` it lacks."""
        if len(lark) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the grammar has {len(lark)} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", param="grammar"
            )
        source = LLMatcher.grammar_from_lark(lark)
        if not openings:
            return self._steering(source)
        name = source + "".join(json.dumps(opening.schema) for opening in openings)
        return self._steering(name, lambda: self._compile_within(source, openings, marker, tags))

    def special_token(self, text: str) -> int | None:
        """The one token that a text is, if it is one that text cannot spell."""
        ready, source = self._ready(), self._source
        assert isinstance(source, PreTrainedTokenizerFast)
        token: int | None = source.backend_tokenizer.token_to_id(text)
        return token if token is not None and ready.is_special_token(token) else None

    def special_tokens(self) -> list[int]:
        """Tokens that text cannot spell, without those that end an answer."""
        ready, known = self._ready(), getattr(self._source, "added_tokens_decoder", {})
        return [token for token in known if token not in self._stops and ready.is_special_token(token)]

    def _steering(self, source: str, compiled: Callable[[], Matcher] | None = None) -> Steering:
        with self._lock:
            found = self._compiled.get(source)
            if found is not None:
                self._compiled.move_to_end(source)
        if found is None:
            found = self._compile(source) if compiled is None else compiled()
            _check_begins(found)
            with self._lock:
                self._compiled[source] = found
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return Steering(found.deep_copy(), self._threads)

    def _compile(self, source: str, tokenizer: LLTokenizer | None = None) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokenizer or self._ready(), source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher

    def _compile_unique(self, bare: dict[str, Any], schema: dict[str, Any]) -> UniqueMatcher:
        """A JSON schema whose ``uniqueItems`` the grammar of ``bare``, which lacks them, is kept to besides."""
        tokens = self._compile(LLMatcher.grammar_from_json_schema(bare))
        return UniqueMatcher(tokens, self._watch(schema), self._vocabulary_read().texts)

    def _compile_within(
        self, source: str, openings: Sequence[Opening], marker: int | None, tags: Tags | None
    ) -> UniqueWithin:
        tokens, watches = self._compile(source), dict[str, Watch]()
        for opening in openings:
            name = json.dumps(opening.schema)
            watches[name] = watches.get(name) or self._watch(opening.schema)
        found = [(opening, watches[json.dumps(opening.schema)]) for opening in openings]
        return UniqueWithin(tokens, found, self._vocabulary_read(), marker, tags)

    def _watch(self, schema: dict[str, Any]) -> Watch:
        """What keeps a value to a schema's ``uniqueItems``. Raises InvalidRequest."""
        by_bytes = LLTokenizer("byte")
        try:
            places = places_of(schema, by_bytes)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error)) from error
        source = LLMatcher.grammar_from_json_schema(plain(schema, unique=False))
        return Watch(self._compile(source, by_bytes), self._vocabulary_read(), places)

    def _vocabulary_read(self) -> Vocabulary:
        ready = self._ready()
        with self._lock:
            if self._words is None:
                self._words = Vocabulary(ready)
            return self._words

    def _ready(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None and not self._unreadable:
                self._tokenizer = self._read()
                self._unreadable = self._tokenizer is None
            if self._tokenizer is None:
                raise UnsupportedOption(
                    "this model's tokenizer is none that grammars can be used with; leave the grammar out",
                    param="grammar",
                )
            return self._tokenizer

    def _read(self) -> LLTokenizer | None:
        if not isinstance(self._source, PreTrainedTokenizerFast):
            return None
        size = max(self._vocabulary, len(self._source))
        try:
            found: LLTokenizer = hf.from_tokenizer(self._source, size, sorted(self._stops) or None)
        except Exception as error:  # it reads some kinds of tokenizers only, and says so in its own ways
            log.warning("grammars are not served: the tokenizer cannot be read for them", error=str(error))
            return None
        return found


def _check_begins(matcher: Matcher) -> None:
    """Raises InvalidRequest for a grammar that has no text at all, such as a schema that refers to itself alone: the
    compiler says so when it is asked for a first token."""
    tried = matcher.deep_copy()
    tried.compute_bitmask()
    if tried.is_error():
        raise _refused(f"no text begins as it says ({tried.stop_reason()})")


def _refused(why: str) -> InvalidRequest:
    """One sentence of a compiler's message of several lines."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    shown = next((line for line in lines if line.startswith("error:")), "")
    text = lines[0] + (f" {shown}" if shown else "") if lines else "no reason was given"
    text = _ADVICE.sub("of what nothing tells apart; anyOf says that several may hold", text)
    return InvalidRequest(f"the grammar cannot be served: {text[:_MAX_SHOWN]}", param="grammar")


def _source_of(grammar: pb.Grammar) -> str:
    """A request's grammar as llguidance's."""
    _check_size(grammar)
    kind = grammar.WhichOneof("kind")
    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(_schema(grammar))
        if kind == "regex":
            return LLMatcher.grammar_from_regex(grammar.regex)
        if kind == "choice":
            return LLMatcher.grammar_from_lark("start: " + _of_choice(list(grammar.choice.texts)))
        if kind == "grammar":
            return grammar_from("grammar", grammar.grammar)
    except (ValueError, RecursionError) as error:
        raise _refused(str(error)) from error
    raise InvalidRequest("the grammar is empty; set json_schema, regex, choice or grammar", param="grammar")


def _check_size(grammar: pb.Grammar) -> None:
    size = grammar.ByteSize()
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", param="grammar")
    if grammar.HasField("json_whitespace") and not grammar.HasField("json_schema"):
        raise InvalidRequest("json_whitespace is for a json_schema; leave it out with others", param="grammar")


def _schema(grammar: pb.Grammar) -> dict[str, Any]:
    """A request's JSON schema, with how llguidance is to write white space."""
    try:
        schema = json.loads(grammar.json_schema)
    except ValueError as error:
        raise ValueError(f"the JSON schema is not JSON: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"the JSON schema is {grammar.json_schema[:40]}; it must be an object")
    pattern = grammar.json_whitespace if grammar.HasField("json_whitespace") else WHITESPACE
    return with_whitespace(schema, pattern)


def with_whitespace(schema: dict[str, Any], pattern: str = WHITESPACE) -> dict[str, Any]:
    """A schema whose JSON has between its parts what the regular expression matches; empty for nothing."""
    how: dict[str, Any] = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {**rewritten(plain(schema)), "x-guidance": how}


def _of_choice(texts: list[str]) -> str:
    if not texts or not all(texts):
        raise ValueError("a choice needs at least one text, and none that is empty")
    if len(texts) > _MAX_CHOICES:
        raise ValueError(f"the choice has {len(texts)} texts; at most {_MAX_CHOICES} are allowed")
    return " | ".join(json.dumps(text) for text in texts)
