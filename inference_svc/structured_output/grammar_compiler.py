"""Grammar compiler: compiles requests' grammars with llguidance.

See https://github.com/guidance-ai/llguidance. The grammar's size and the compiler's own limits bound the cost of a
compilation. The limits count work, not time, so the decision to refuse a grammar does not depend on the machine's load.
No grammar of 64 KiB in the tests takes longer than two seconds. Grammars compile on a separate thread, without the GIL.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import structlog
from kvsidecar.errors import InvalidRequest, UnsupportedOption
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.process.cpus import usable_cpus
from kvsidecar.process.thread_pool import started_pool
from kvsidecar.requests import MAX_GRAMMAR_BYTES
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, hf
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.structured_output.schema_cleanup import keyword_of_pattern, plain

log = structlog.get_logger("worker")

_MAX_CHOICES = 1024
# White space between two parts of JSON: nothing, a space, or a line end and indentation. It is limited, because small
# models would otherwise write white space forever.
WHITESPACE = r"( |\r?\n[ \t]{0,24})?"
_MAX_CACHED = 64
# Work of a lexer up to the first mask. Large schemas need less, and the library's default of 1,000,000 lets the regular
# expression a{1000}{1000} take 9 seconds and 200 MB.
_MAX_LEXER_FUEL = 200_000
_MAX_THREADS = 8
# llguidance recurses along rules that name each other, and a stack overflow ends the process. The longest chain in a
# grammar of MAX_GRAMMAR_BYTES needs less than this. The system provides only the part of a stack that is used.
_STACK_BYTES = 256 << 20
_stack_lock = threading.Lock()
_MAX_SHOWN = 300
# Causes in the compiler's messages that lead to a keyword of the JSON schema, which the error then names.
_UNKNOWN_KEYWORD = re.compile(r"Unimplemented keys: \[(.+?)\]")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
_NOT_FETCHED = re.compile(r"Resource '(.*?)' is not present in a registry")
_BAD_PATTERN = re.compile(r"regex parse error:\n    (.*)\n")
_WRONG_VALUE = re.compile(r"^(\w+) (must be .*)", re.MULTILINE)
_HARD_PATTERN = "Unable to determine if regex is empty"
_TOO_COMPLEX = re.compile(r"lexer error: (too many .*)")
_INCOMPATIBLE_TYPES = "Unsatisfiable schema: incompatible types"
_KNOWN_KEYWORDS = "docs/protocol.md lists the supported keywords"


class GrammarCompiler:
    """Compiles grammars for one tokenizer, with a cache of recent ones. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stops: frozenset[int]) -> None:
        """``vocabulary`` is the width of the model's logits. ``stops`` are the model's end-of-sequence tokens."""
        self._source, self._vocabulary, self._stops = tokenizer, vocabulary, stops
        self._tokenizer: LLTokenizer | None = None
        self._unreadable = False
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        # These threads must run only NumPy and llguidance: torch would keep a team of OpenMP threads for each of them.
        threads = max(1, min(_MAX_THREADS, usable_cpus() // 2))
        self._threads = started_pool(threads, "mask")

    def warm_up(self) -> None:
        """Read the vocabulary before the first grammar. This may take seconds and holds the GIL."""
        with suppress(UnsupportedOption):  # each request with a grammar gets this error
            self._llguidance_tokenizer()

    def compile(self, grammar: pb.Grammar) -> GrammarState:
        """Compile a request's grammar. Raises InvalidRequest, UnsupportedOption, with param ``grammar``."""
        schema = _schema(grammar) if grammar.WhichOneof("kind") == "json_schema" else None
        return self._cached_state(_source_of(grammar, schema), schema)

    def compile_lark(self, lark: str, schema: Any = None) -> GrammarState:
        """Compile a Lark grammar. ``schema`` has the grammar's JSON schemas, so that errors can name a keyword."""
        try:
            size = len(lark.encode())
        except UnicodeEncodeError as error:  # JSON can name a lone surrogate by an escape
            raise _refused("it has a lone surrogate; send whole characters") from error
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", param="grammar"
            )
        return self._cached_state(LLMatcher.grammar_from_lark(lark), schema)

    def special_token(self, text: str) -> int | None:
        """Special token with this text; None if the text is not a special token."""
        ready, source = self._llguidance_tokenizer(), self._source
        assert isinstance(source, PreTrainedTokenizerFast)
        token: int | None = source.backend_tokenizer.token_to_id(text)
        return token if token is not None and ready.is_special_token(token) else None

    def special_tokens(self) -> list[int]:
        """Special tokens, except those that end an answer."""
        ready, known = self._llguidance_tokenizer(), getattr(self._source, "added_tokens_decoder", {})
        return [token for token in known if token not in self._stops and ready.is_special_token(token)]

    def _cached_state(self, source: str, schema: Any) -> GrammarState:
        with self._lock:
            found = self._compiled.get(source)
            if found is not None:
                self._compiled.move_to_end(source)
        # All copies of a matcher share its lexer. An answer that exceeds the lexer's limits breaks it for later ones.
        if found is None or _first_mask_error(found):
            found = self._compile(source, schema)
            with self._lock:
                self._compiled[source] = found
                while len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
        return GrammarState(found.deep_copy(), self._threads)

    def _compile(self, source: str, schema: Any) -> LLMatcher:
        tokenizer = self._llguidance_tokenizer()
        limits = LLParserLimits(verbose_errors=False, initial_lexer_fuel=_MAX_LEXER_FUEL)
        matcher = _on_large_stack(lambda: LLMatcher(tokenizer, source, log_level=0, limits=limits))
        if matcher.is_error():
            raise _refused(matcher.get_error(), schema)
        # The first mask may exceed a limit without an error, and leave a broken lexer.
        if why := _first_mask_error(matcher) or _first_mask_error(matcher):
            raise _without_first_token(why)
        return matcher

    def _llguidance_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None and not self._unreadable:
                self._tokenizer = self._read_tokenizer()
                self._unreadable = self._tokenizer is None
            if self._tokenizer is None:
                raise UnsupportedOption(
                    "this model's tokenizer is none that grammars can be used with; leave the grammar out",
                    param="grammar",
                )
            return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer | None:
        if not isinstance(self._source, PreTrainedTokenizerFast):
            return None
        size = max(self._vocabulary, len(self._source))
        try:
            found: LLTokenizer = hf.from_tokenizer(self._source, size, sorted(self._stops) or None)
        except Exception as error:  # unsupported kinds of tokenizers raise various exceptions
            log.warning("grammars are not served: the tokenizer cannot be read for them", error=str(error))
            return None
        return found


def _on_large_stack(make: Callable[[], LLMatcher]) -> LLMatcher:
    """Return ``make()``, called on a thread with a stack of ``_STACK_BYTES``."""
    with ThreadPoolExecutor(1, "grammar") as thread:
        with _stack_lock:  # the size is a setting of the process
            before = threading.stack_size(_STACK_BYTES)
            try:
                made = thread.submit(make)  # starts the thread
            finally:
                threading.stack_size(before)
        return made.result()


def _first_mask_error(matcher: LLMatcher) -> str:
    """Compute a first mask, and return the matcher's message; empty if the grammar has a first token."""
    tried = matcher.deep_copy()
    tried.compute_bitmask()
    error: str = tried.get_error()
    return error


def _without_first_token(why: str) -> InvalidRequest:
    """Build the error of a grammar without a first token: too complex, or a schema that refers only to itself."""
    log.debug("a grammar has no first token", reason=why)
    if found := _TOO_COMPLEX.search(why):
        return _refused(f"it is too complex: {found[1]}; send a simpler one")
    return _refused("no text begins as it says, for example because a schema or rule refers only to itself")


def _refused(why: str, schema: Any = None) -> InvalidRequest:
    """Build a one-sentence error from a compiler's message. Names the keyword of ``schema`` that causes it."""
    text = _about_keyword(why, schema) if schema is not None else ""
    return InvalidRequest(f"the grammar cannot be served: {(text or _first_line(why))[:_MAX_SHOWN]}", param="grammar")


def _first_line(why: str) -> str:
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    shown = next((line for line in lines if line.startswith("error:")), "")
    return lines[0] + (f" {shown}" if shown else "") if lines else "no reason was given"


def _about_keyword(why: str, schema: Any) -> str:
    """Describe the keyword that causes a message; empty if the message itself names the keyword."""
    if found := _UNKNOWN_KEYWORD.search(why):
        names = found[1].replace('"', "'")
        said = (
            f"keywords {names} are not supported; leave them out"
            if "," in names
            else (f"keyword {names} is not supported; leave it out")
        )
        return f"the JSON schema {said} ({_KNOWN_KEYWORDS})"
    if found := _UNKNOWN_FORMAT.search(why):
        return f"Unknown format: {found[1]}; leave the keyword 'format' out, or use a pattern ({_KNOWN_KEYWORDS})"
    if found := _NOT_FETCHED.search(why):
        return f"the keyword '$ref' names {found[1]!r}, and only references within the schema are followed"
    if found := _BAD_PATTERN.search(why):
        keyword, shown = keyword_of_pattern(schema, found[1]), _first_line(why).partition("error: error: ")[2]
        return f"the keyword {keyword!r} has a regular expression that is not supported: {shown}"
    if found := _WRONG_VALUE.search(why):
        return f"the keyword {found[1]!r} {found[2]}"
    if _HARD_PATTERN in why:
        return "the keyword 'pattern' is too hard to combine with 'minLength' or 'maxLength'; leave one of them out"
    if _INCOMPATIBLE_TYPES in why:
        return "no value satisfies the schema: the keyword 'type' and its other keywords allow different types"
    return ""


def _source_of(grammar: pb.Grammar, schema: dict[str, Any] | None) -> str:
    """Translate a request's grammar for llguidance; ``schema`` is the schema of a JSON schema grammar."""
    _check_size(grammar)
    kind = grammar.WhichOneof("kind")
    try:
        if schema is not None:
            return LLMatcher.grammar_from_json_schema(schema)
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
    """Return a request's JSON schema with llguidance's white space options. Raises InvalidRequest."""
    _check_size(grammar)
    try:
        schema = json.loads(grammar.json_schema)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _refused(f"the JSON schema is {grammar.json_schema[:40]}; it must be an object")
        pattern = grammar.json_whitespace if grammar.HasField("json_whitespace") else WHITESPACE
        return for_compiler(schema, pattern)
    except ValueError as error:
        raise _refused(f"the JSON schema is not JSON: {error}") from error
    except RecursionError as error:
        raise _refused(str(error)) from error


def for_compiler(schema: dict[str, Any], pattern: str = WHITESPACE) -> dict[str, Any]:
    """Return a schema with llguidance's options.

    ``pattern`` is a regular expression for white space between parts of the JSON; empty for none. llguidance treats
    ``oneOf`` with overlapping alternatives as ``anyOf``.
    """
    options: dict[str, Any] = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {**plain(schema), "x-guidance": {**options, "coerce_one_of": True}}


def _of_choice(texts: list[str]) -> str:
    if not texts or not all(texts):
        raise ValueError("a choice needs at least one text, and none that is empty")
    if len(texts) > _MAX_CHOICES:
        raise ValueError(f"the choice has {len(texts)} texts; at most {_MAX_CHOICES} are allowed")
    return " | ".join(json.dumps(text) for text in texts)
