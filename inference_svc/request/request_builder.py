"""Builds sequences from requests: tokenizes prompts, checks options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from secrets import token_hex

from kvsidecar.errors import InvalidRequest, PromptTooLong, UnknownModel
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import REST_OF_CONTEXT

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.chat_template.template_messages import chat_texts
from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.kv_pool import MAX_BRANCHES
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.models.loader import LoadedModel
from inference_svc.request import request_options
from inference_svc.request.request_options import PartTtls
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.scheduling.pool_capacity import PoolCapacity
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import GenerationRequest, SpeculationMode
from inference_svc.sequence.sequence import Sequence, SequenceOutput
from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.tool_calls.tool_call_parser import ToolCallParser

# Texts with more characters per token are unusual: they are counted in pieces first.
_USUAL_CHARACTERS_PER_TOKEN, _PIECE_CHARACTERS, _CUT_TOKENS = 8, 1 << 15, 64
_MODES = {
    pb.SPECULATION_OFF: SpeculationMode.OFF,
    pb.SPECULATION_NGRAM: SpeculationMode.NGRAM,
    pb.SPECULATION_DRAFT: SpeculationMode.DRAFT,
    pb.SPECULATION_AUTO: SpeculationMode.AUTO,
}
_MAX_ID, _MAX_SEPARATOR = 128, 64
# A prompt that is truncated may be this many times as long as the context.
_MAX_TRUNCATION_FACTOR = 4


@dataclass(frozen=True)
class RequestDefaults:
    """Worker settings for requests that set nothing else."""

    document_separator: str = ""
    tool_call_parser: str = "auto"
    speculate: str = "off"
    has_draft_model: bool = False


class RequestBuilder:
    """Builds sequences for one model. Methods may run on any thread, and raise InvalidRequest in one sentence."""

    def __init__(
        self,
        loaded: LoadedModel,
        context_length: int,
        defaults: RequestDefaults = RequestDefaults(),
        adapters: Mapping[str, LoraAdapter] | None = None,
        room: PoolCapacity | None = None,
    ) -> None:
        """``adapters`` may change while requests run. ``room`` explains a context shorter than the model's."""
        self._adapters = adapters if adapters is not None else {}
        self._room = room or PoolCapacity(context_length, context_length, 0)
        self._speculate, self._has_draft_model = SpeculationMode(defaults.speculate), defaults.has_draft_model
        self._loaded, self._tokenizer = loaded, loaded.tokenizer
        self._context = context_length
        self._separator = defaults.document_separator
        self._vocabulary = int(loaded.config.vocab_size)
        self._grammar_compiler = GrammarCompiler(self._tokenizer, self._vocabulary, loaded.stop_tokens)
        self._chat_template = ChatTemplate(
            loaded.id, self._tokenizer, self._grammar_compiler, defaults.tool_call_parser
        )
        # A longer text cannot fit: no token has more characters than the longest one of the vocabulary.
        self._max_characters = context_length * max(map(len, self._tokenizer.get_vocab()), default=1)

    def warm_up(self) -> None:
        """Prepare grammars, which would hold the GIL for seconds during the first request with one."""
        self._grammar_compiler.warm_up()

    def checked_tokens(
        self,
        prompt: pb.Prompt,
        generation_prompt: bool = True,
        cache: pb.CacheOptions | None = None,
        max_tokens: int | None = None,
        middle: bool = False,
    ) -> tuple[list[int], DocumentMarks]:
        """``tokens`` of a prompt that must fit into the context.

        With ``max_tokens``, a longer prompt is truncated to its last tokens, or with ``middle`` to its first and last
        ones. Raises PromptTooLong, before tokenization if the number of characters tells.
        """
        if max_tokens is not None:
            size = self._check_characters(*_prompt_texts(prompt))
            if size > _MAX_TRUNCATION_FACTOR * self._context * _USUAL_CHARACTERS_PER_TOKEN:
                raise PromptTooLong(
                    f"the prompt is too long: it has {size} characters, too many to be read for its end; send less"
                )
            ids, marks = self._truncate(prompt, *self.tokens(prompt, generation_prompt, cache), max_tokens, middle)
            self._check_length(len(ids))
            return ids, marks
        self._check_length(len(prompt.token_ids.ids))
        self._check_size(*_prompt_texts(prompt))
        ids, marks = self.tokens(prompt, generation_prompt, cache)
        self._check_length(len(ids))
        return ids, marks

    def _truncate(
        self, prompt: pb.Prompt, ids: list[int], marks: DocumentMarks, most: int, middle: bool
    ) -> tuple[list[int], DocumentMarks]:
        """Truncate a prompt to ``most`` tokens.

        Keeps the special tokens at its start and its last tokens, or with ``middle`` equally many first and last ones.
        """
        head = most // 2 if middle else 0
        if not middle and prompt.WhichOneof("kind") == "text" and not prompt.without_special_tokens:
            special = self._ids("", True)
            head = len(special) if ids[: len(special)] == special and len(special) < most else 0
        cut = len(ids) - most
        if cut <= 0:
            return ids, marks
        before = [end for end in marks.segment_ends if end <= head] if middle else []
        ends = (*before, *(end - cut for end in marks.segment_ends if end > cut + head))
        return ids[:head] + ids[cut + head :], replace(marks, segment_ends=ends)

    def _check_length(self, tokens: int) -> None:
        self._room.check(tokens)

    def counted_tokens(self, prompt: pb.Prompt) -> list[int]:
        """``tokens`` of a prompt that need not fit into the context; only its characters are limited."""
        self._check_characters(*_prompt_texts(prompt))
        return self.tokens(prompt)[0]

    def _check_characters(self, *texts: str) -> int:
        """Return the number of characters. Raises PromptTooLong for more than the context can hold."""
        size = sum(map(len, texts))
        if size > self._max_characters:
            raise PromptTooLong(
                f"the prompt is too long: it has {size} characters; a context of {self._context} tokens holds at most "
                f"{self._max_characters}"
            )
        return size

    def _check_size(self, *texts: str) -> None:
        """Refuse texts that cannot fit before they are tokenized as a whole.

        Tokenization takes hundreds of bytes for each character, so texts that hardly fit are counted in pieces first.
        """
        size = self._check_characters(*texts)
        if size <= self._context * _USUAL_CHARACTERS_PER_TOKEN:
            return
        counted = 0
        for text in texts:
            for at in range(0, len(text), _PIECE_CHARACTERS):
                # A boundary within a word makes a few more tokens of it.
                cut = _CUT_TOKENS if len(text) > _PIECE_CHARACTERS else 0
                counted += max(0, len(self._ids(text[at : at + _PIECE_CHARACTERS], False)) - cut)
                self._room.check(counted, f"its first {at + _PIECE_CHARACTERS} characters have about")

    def tokens(
        self, prompt: pb.Prompt, generation_prompt: bool = True, cache: pb.CacheOptions | None = None
    ) -> tuple[list[int], DocumentMarks]:
        """Token ids of a prompt (at least one), and its document marks.

        Text with a document separator is tokenized piece by piece, so that a document has the same tokens at any
        position.
        """
        cache = pb.CacheOptions() if cache is None else cache
        separator = cache.document_separator if cache.HasField("document_separator") else self._separator
        if len(separator) > _MAX_SEPARATOR:
            raise InvalidRequest(
                f"document_separator has {len(separator)} characters; at most {_MAX_SEPARATOR} are allowed"
            )
        kind = prompt.WhichOneof("kind")
        if cache.segment_ends and kind != "token_ids":
            raise InvalidRequest("segment_ends counts tokens; send the prompt as token_ids with it")
        if kind == "token_ids":
            ids = list(prompt.token_ids.ids)
            wrong = next((i for i in ids if i >= self._vocabulary), None)
            if wrong is not None:
                raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {self._vocabulary}")
            marks = self._marks(cache, separator, len(ids))
        elif kind == "text":
            ids, marks = self._encode(prompt.text, not prompt.without_special_tokens, separator)
        elif kind == "chat":
            ids, marks = self._encode(self._chat_template.render(prompt.chat, generation_prompt), False, separator)
        else:
            raise InvalidRequest("the prompt is missing; set text, token_ids or chat")
        if not ids:
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        return ids, marks

    def parts_in_tokens(
        self, prompt: pb.Prompt, cache: pb.CacheOptions, tokens: int, generation_prompt: bool = True
    ) -> PartTtls:
        """``(end in tokens, TTL in seconds)`` of the parts of a prompt of ``tokens`` tokens. Raises InvalidRequest.

        Where a message ends is seen by rendering the messages up to it. The pieces are tokenized one by one, so an end
        may be off by a token where one token has text of two messages; chunks are longer than that by far. Parts
        without a token (text that the template leaves out, or that was truncated) are dropped.
        """
        request_options.check_parts(cache, prompt)
        chat = bool(cache.parts) and prompt.WhichOneof("kind") == "chat"
        whole = self._chat_template.render(prompt.chat, generation_prompt) if chat else ""
        parts: list[tuple[int, int]] = []
        begin = at = 0
        for part in cache.parts:
            end = part.tokens
            if chat:
                stop = max(begin, self._chat_template.end_of_messages(prompt.chat, part.messages, whole))
                end, begin = at + len(self._ids(whole[begin:stop], False)), stop
            end = min(end, tokens)
            if end > at:
                parts.append((end, part.ttl_seconds))
            at = end
        return tuple(parts)

    def _encode(self, text: str, special: bool, separator: str) -> tuple[list[int], DocumentMarks]:
        if not separator or separator not in text:
            return self._ids(text, special), DocumentMarks()
        first, *others = text.split(separator)
        ids, ends = self._ids(first, special), []
        for other in others:
            ends.append(len(ids))
            ids += self._ids(separator + other, False)
        return ids, DocumentMarks(segment_ends=tuple(end for end in ends if end))

    def _ids(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _marks(self, cache: pb.CacheOptions, separator: str, tokens: int) -> DocumentMarks:
        ends = tuple(cache.segment_ends)
        if any(b <= a for a, b in pairwise((0, *ends))) or (ends and ends[-1] > tokens):
            raise InvalidRequest(f"segment_ends must rise from 1 to at most the prompt's {tokens} tokens")
        return DocumentMarks(tuple(self._ids(separator, False)) if separator else (), ends)

    def text(self, ids: list[int]) -> str:
        """Decode token ids, special tokens included; padding ids of the vocabulary have no text."""
        known = len(self._tokenizer)
        return str(self._tokenizer.decode([i for i in ids if i < known]))

    def build(self, request: pb.GenerateRequest, sink: Callable[[SequenceOutput], None], arrived: float) -> Sequence:
        """Build a sequence to submit. Raises UnknownModel, PromptTooLong, InvalidRequest."""
        return self.tokenize(request, sink, arrived)(self.grammar_state(request))

    def grammar_state(self, request: pb.GenerateRequest) -> GrammarState | None:
        """Compile the request's grammar, which may take seconds; None without one. Raises InvalidRequest."""
        return self._chat_template.grammar_state(request)

    def tokenize(
        self, request: pb.GenerateRequest, sink: Callable[[SequenceOutput], None], arrived: float
    ) -> Callable[[GrammarState | None], Sequence]:
        """Tokenize and check a request; return a function from its grammar state to the sequence.

        Raises UnknownModel, PromptTooLong, InvalidRequest.
        """
        adapter = self.adapter(request.model)
        middle = request.truncation == pb.TRUNCATION_MIDDLE
        most = self._max_prompt_tokens(request)
        tokens, marks = self.checked_tokens(request.prompt, cache=request.cache, max_tokens=most, middle=middle)
        room = self._context - len(tokens)
        wanted = request_options.max_new_tokens(request, room)
        if len(request.request_id) > _MAX_ID:
            raise InvalidRequest(f"request_id has {len(request.request_id)} characters; at most {_MAX_ID} are allowed")
        scored = request_options.logprobs("prompt_logprobs", request)
        request_options.check_prompt_logprobs(scored, len(tokens))
        ends = self._loaded.stop_tokens
        # Stop strings and tokens may occur in the arguments of a required call, and must not end it.
        must_call = request.tool_use.mode == pb.TOOL_MODE_REQUIRED
        strings = () if must_call else request_options.stop_strings(request)
        own_stops = frozenset() if must_call else request_options.request_stop_ids(request, self._vocabulary)
        stops = own_stops if request.ignore_eos else ends | own_stops
        params = self.sampling(request.sampling, request.min_tokens)
        params.check(self._vocabulary)
        shown = request.show_special_tokens
        text = IncrementalDetokenizer(
            self._tokenizer,
            strings,
            frozenset() if shown else ends,
            shown or self._chat_template.shows_special(request),
            request.include_stop,
            request.min_tokens,
        )
        parts = self.parts_in_tokens(request.prompt, request.cache, len(tokens))
        cache = request_options.cache_use(request.cache, marks, parts)
        parameters = GenerationRequest(
            id=request.request_id or token_hex(12),
            num_prompt_tokens=len(tokens),
            max_tokens=wanted,
            sampling_params=params,
            stop_token_ids=stops,
            own_stop_token_ids=own_stops if request.ignore_eos else own_stops - ends,
            include_stop=request.include_stop,
            cache=cache if scored is None else replace(cache, read=False),
            num_logprobs=request_options.logprobs("logprobs", request),
            num_prompt_logprobs=scored,
            speculation=self.speculation(request.speculation),
            max_branches=_branches(request.speculation_branches),
            adapter=adapter,
            report_provenance=request.explain,
            arrived_at=arrived,
        )
        return lambda grammar: Sequence(parameters, tokens, text, sink, grammar)

    def adapter(self, name: str) -> LoraAdapter | None:
        """Return the adapter of this name; None for the model itself. Raises UnknownModel."""
        if name in ("", self._loaded.id):
            return None
        found = self._adapters.get(name)
        if found is None:
            raise UnknownModel.among(name, [self._loaded.id, *self._adapters])
        return found

    def prompt_text(self, request: pb.GenerateRequest, sequence: Sequence) -> str:
        """The prompt's text after truncation."""
        if request.prompt.WhichOneof("kind") == "text" and self._max_prompt_tokens(request) is None:
            return request.prompt.text
        return self.text(sequence.tokens[: sequence.request.num_prompt_tokens])

    def _max_prompt_tokens(self, request: pb.GenerateRequest) -> int | None:
        """Tokens to which a prompt is truncated; None for no truncation. Raises InvalidRequest."""
        if request.truncation not in pb.Truncation.values():
            raise InvalidRequest(f"truncation is {request.truncation}, which is none", param="truncation")
        if not request.HasField("truncate_prompt_tokens") and not request.truncation:
            return None
        if request.truncate_prompt_tokens:
            return request.truncate_prompt_tokens
        named = request.HasField("max_tokens") and request.max_tokens != REST_OF_CONTEXT
        answer = max(1, request.max_tokens if named else request_options.DEFAULT_MAX_TOKENS, request.min_tokens)
        if answer >= self._context:
            raise InvalidRequest(
                f"the prompt is to leave room for an answer of {answer} tokens; a context of {self._context} has none "
                "for the prompt then",
                param="truncate_prompt_tokens",
            )
        return self._context - answer

    def call_parser(self, request: pb.GenerateRequest) -> ToolCallParser | None:
        """Return a parser of tool calls for the answer's text; None if the request allows none."""
        return self._chat_template.parser(request)

    def sampling(self, given: pb.Sampling, min_tokens: int = 0) -> SamplingParams:
        """Sampling parameters of a request, over the model's defaults (generation_config.json)."""
        # ListFields omits no field that was set: scalar fields are `optional`.
        sent = {field.name: value for field, value in given.ListFields()}
        if given.logit_bias:
            sent["logit_bias"] = dict(given.logit_bias)
        if given.allowed_tokens:
            sent["allowed_tokens"] = frozenset(given.allowed_tokens)
        return SamplingParams(**(self._loaded.sampling | sent), min_tokens=min_tokens)

    def speculation(self, given: pb.Speculation.ValueType) -> SpeculationMode:
        """SpeculationMode mode of a request. Raises InvalidRequest."""
        if given == pb.SPECULATION_UNSPECIFIED:
            return self._speculate
        if given not in _MODES:
            raise InvalidRequest(f"speculation is {given}; allowed are off, ngram, draft and auto", param="speculation")
        if given == pb.SPECULATION_DRAFT and not self._has_draft_model:
            raise InvalidRequest(
                "speculation is draft, but this worker has no draft model; start it with --draft-model, or ask for "
                "ngram",
                param="speculation",
            )
        return _MODES[given]


def _branches(given: int) -> int | None:
    """Number of draft branches that a request asks for; None for the worker's setting."""
    if given > MAX_BRANCHES:
        raise InvalidRequest(
            f"speculation_branches is {given}; allowed are 1 to {MAX_BRANCHES}", param="speculation_branches"
        )
    return given or None


def _prompt_texts(prompt: pb.Prompt) -> list[str]:
    """Texts of a prompt that will be tokenized, for counting."""
    return [prompt.text, *chat_texts(prompt.chat)]
