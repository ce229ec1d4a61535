"""Request builder: builds sequences from requests, tokenizes prompts, checks options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from secrets import token_hex

from kvsidecar.errors import InvalidRequest, PromptTooLong, UnknownModel
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import REST_OF_CONTEXT

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.chat_template.reasoning_splitter import ReasoningSplitter
from inference_svc.chat_template.template_messages import prompt_texts
from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.models.loader import LoadedModel
from inference_svc.request import request_options
from inference_svc.request.breakpoint_finder import BreakpointFinder
from inference_svc.request.sampled_calls import SampledCalls
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.scheduling.context_limits import ContextLimits
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.generation_request import GenerationRequest, SpeculationMode
from inference_svc.sequence.sequence import Sequence, SequenceOutput
from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.tool_calls.tool_call_parser import ToolCallParser

# A text of more than _USUAL_CHARACTERS_PER_TOKEN characters per token of the context is first tokenized in pieces of
# _PIECE_CHARACTERS, to count its tokens. A cut between pieces causes at most _CUT_TOKENS additional tokens.
_USUAL_CHARACTERS_PER_TOKEN, _PIECE_CHARACTERS, _CUT_TOKENS = 8, 1 << 15, 64
_MODES = {
    pb.SPECULATION_OFF: SpeculationMode.OFF,
    pb.SPECULATION_NGRAM: SpeculationMode.NGRAM,
    pb.SPECULATION_DRAFT: SpeculationMode.DRAFT,
    pb.SPECULATION_AUTO: SpeculationMode.AUTO,
}
_MAX_ID, _MAX_SEPARATOR = 128, 64
_TAIL_TOKENS = 16  # last tokens of a prompt, in which a template may open the reasoning
# A prompt that will be truncated may be at most this many times as long as the context.
_MAX_TRUNCATION_FACTOR = 4


@dataclass(frozen=True)
class RequestDefaults:
    """Worker settings that apply to requests without their own."""

    document_separator: str = ""
    tool_call_parser: str = "auto"
    speculate: str = "off"
    has_draft_model: bool = False
    reuse_anywhere: bool = False


class RequestBuilder:
    """Builds sequences for one model.

    Any thread may call the methods. For a bad request they raise InvalidRequest.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        context_length: int,
        defaults: RequestDefaults = RequestDefaults(),
        adapters: Mapping[str, LoraAdapter] | None = None,
        context_limits: ContextLimits | None = None,
    ) -> None:
        """``adapters`` may change while requests run. ``context_limits`` are the pool's limits, for error messages."""
        self._adapters = adapters if adapters is not None else {}
        self._context_limits = context_limits or ContextLimits(context_length, context_length, 0)
        self._speculate, self._has_draft_model = SpeculationMode(defaults.speculate), defaults.has_draft_model
        self._loaded, self._tokenizer, self._context = loaded, loaded.tokenizer, context_length
        self._separator, self._reuse_anywhere = defaults.document_separator, defaults.reuse_anywhere
        self._vocabulary = int(loaded.config.vocab_size)
        self._grammar_compiler = GrammarCompiler(self._tokenizer, self._vocabulary, loaded.stop_tokens)
        self.chat_template = ChatTemplate(loaded.id, self._tokenizer, self._grammar_compiler, defaults.tool_call_parser)
        self.breakpoints = BreakpointFinder(self.chat_template, lambda text: self._ids(text, False))
        self._sampled_calls = SampledCalls()
        # A longer text cannot fit, because no token has more characters than the longest one of the vocabulary.
        self._max_characters = context_length * max(map(len, self._tokenizer.get_vocab()), default=1)

    def warm_up(self) -> None:
        """Prepare the grammar compiler. Its first use holds the GIL for seconds and must not delay requests."""
        self._grammar_compiler.warm_up()

    def checked_tokens(
        self,
        prompt: pb.Prompt,
        generation_prompt: bool = True,
        cache: pb.CacheOptions | None = None,
        max_tokens: int | None = None,
        truncation: pb.Truncation.ValueType = pb.TRUNCATION_UNSPECIFIED,
    ) -> tuple[list[int], DocumentMarks]:
        """Return the result of ``tokens`` for a prompt that must fit into the context.

        With ``max_tokens``, a longer prompt is truncated as ``truncation`` says, by default to its last tokens. Raises
        PromptTooLong; a text with too many characters is not even tokenized.
        """
        if max_tokens is not None:
            size = self._check_characters(*prompt_texts(prompt))
            if size > _MAX_TRUNCATION_FACTOR * self._context * _USUAL_CHARACTERS_PER_TOKEN:
                raise PromptTooLong(
                    f"the prompt is too long: it has {size} characters, too many to be read for its end; send less"
                )
            ids, marks = self._truncate(prompt, *self.tokens(prompt, generation_prompt, cache), max_tokens, truncation)
            self._check_length(len(ids))
            return ids, marks
        self._check_length(len(prompt.token_ids.ids))
        self._check_size(*prompt_texts(prompt))
        ids, marks = self.tokens(prompt, generation_prompt, cache)
        self._check_length(len(ids))
        return ids, marks

    def _truncate(
        self, prompt: pb.Prompt, ids: list[int], marks: DocumentMarks, most: int, side: pb.Truncation.ValueType
    ) -> tuple[list[int], DocumentMarks]:
        """Truncate a prompt to ``most`` tokens.

        At the left, it removes tokens behind the special tokens at the start and keeps the last tokens. In the middle,
        it keeps equal numbers of first and last tokens. At the right, it keeps the first tokens.
        """
        kept = {pb.TRUNCATION_MIDDLE: most // 2, pb.TRUNCATION_RIGHT: most}.get(side)
        head = kept or 0
        if kept is None and prompt.WhichOneof("kind") == "text" and not prompt.without_special_tokens:
            special = self._ids("", True)
            head = len(special) if ids[: len(special)] == special and len(special) < most else 0
        cut = len(ids) - most
        if cut <= 0:
            return ids, marks
        before = [end for end in marks.segment_ends if end <= head] if kept is not None else []
        ends = (*before, *(end - cut for end in marks.segment_ends if end > cut + head))
        return ids[:head] + ids[cut + head :], replace(marks, segment_ends=ends)

    def _check_length(self, tokens: int) -> None:
        self._context_limits.check(tokens)

    def counted_tokens(self, prompt: pb.Prompt, salt: bytes) -> list[int]:
        """Return the tokens of a prompt that need not fit into the context; only its characters are limited."""
        self._check_characters(*prompt_texts(prompt))
        return self.tokens(prompt, cache=pb.CacheOptions(tenant_salt=salt))[0]

    def _check_characters(self, *texts: str) -> int:
        """Return the number of characters. Raises PromptTooLong if they cannot fit into the context."""
        size = sum(map(len, texts))
        if size > self._max_characters:
            raise PromptTooLong(
                f"the prompt is too long: it has {size} characters; a context of {self._context} tokens holds at most "
                f"{self._max_characters}"
            )
        return size

    def _check_size(self, *texts: str) -> None:
        """Refuse texts that cannot fit, before they are tokenized as a whole.

        Tokenization takes hundreds of bytes per character, so the tokens of long texts are first counted in pieces.
        """
        size = self._check_characters(*texts)
        if size <= self._context * _USUAL_CHARACTERS_PER_TOKEN:
            return
        counted = 0
        for text in texts:
            for at in range(0, len(text), _PIECE_CHARACTERS):
                # A cut within a word results in a few additional tokens.
                cut = _CUT_TOKENS if len(text) > _PIECE_CHARACTERS else 0
                counted += max(0, len(self._ids(text[at : at + _PIECE_CHARACTERS], False)) - cut)
                self._context_limits.check(counted, f"its first {at + _PIECE_CHARACTERS} characters have about")

    def tokens(
        self, prompt: pb.Prompt, generation_prompt: bool = True, cache: pb.CacheOptions | None = None
    ) -> tuple[list[int], DocumentMarks]:
        """Return the token ids of a prompt (at least one) and its document marks.

        Text with document separators is tokenized document by document, so that a document has the same tokens at any
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
            ids, marks = self._encode_chat(prompt, generation_prompt, separator, cache.tenant_salt)
        else:
            raise InvalidRequest("the prompt is missing; set text, token_ids or chat")
        if not ids:
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        return ids, marks

    def _encode_chat(
        self, prompt: pb.Prompt, generation_prompt: bool, separator: str, salt: bytes
    ) -> tuple[list[int], DocumentMarks]:
        """Render and tokenize a chat. Tool calls from earlier answers keep the tokens that the model sampled."""
        chat, special = prompt.chat, prompt.with_special_tokens
        sampled = {
            i: ids for i, m in enumerate(chat.messages) if (ids := self._sampled_calls.find(salt, m)) is not None
        }
        marker, pieces = token_hex(16), list[str]()  # no text has this marker, and templates write it as it is
        if sampled:
            with suppress(InvalidRequest):  # templates may demand a call before a result
                rendered = self.chat_template.render(chat, generation_prompt, dict.fromkeys(sampled, marker))
                pieces = rendered.split(marker)
        if len(pieces) != len(sampled) + 1:
            return self._encode(self.chat_template.render(chat, generation_prompt), special, separator)
        ids, ends = [], list[int]()
        for piece, tokens in zip(pieces, [*sampled.values(), []], strict=True):
            found, marks = self._encode(piece, special and not ids, separator)
            ends += [len(ids) + end for end in marks.segment_ends]
            ids += found + tokens
        return ids, DocumentMarks(segment_ends=tuple(ends))

    def keep_calls(self, salt: bytes, sequence: Sequence, message: pb.ChatMessage) -> None:
        """Keep the tokens of a complete answer with calls; clients send the answer back as ``message``."""
        tokens = sequence.tokens[sequence.request.num_prompt_tokens :]
        self._sampled_calls.keep(salt, message, tokens[: -1 if tokens[-1] in self._loaded.stop_tokens else None])

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
        """Convert token ids to text, with special tokens; padding ids of the vocabulary have no text."""
        known = len(self._tokenizer)
        return str(self._tokenizer.decode([i for i in ids if i < known]))

    def token_names(self, ids: list[int]) -> list[str]:
        """Return the tokens' names in the vocabulary; empty for padding ids."""
        return [name or "" for name in self._tokenizer.convert_ids_to_tokens(ids)]

    def tokenizer_config(self) -> str:
        """Return the tokenizer's settings as a JSON object, without paths."""
        given = {k: v for k, v in self._tokenizer.init_kwargs.items() if not k.endswith(("_file", "_path"))}
        own = {"tokenizer_class": type(self._tokenizer).__name__, "chat_template": self._tokenizer.chat_template}
        return json.dumps({**given, **own}, default=str)

    def build(self, request: pb.GenerateRequest, sink: Callable[[SequenceOutput], None], arrived: float) -> Sequence:
        """Build a sequence to submit. Raises UnknownModel, PromptTooLong, InvalidRequest."""
        return self.tokenize(request, sink, arrived)(self.grammar_state(request))

    def grammar_state(self, request: pb.GenerateRequest) -> GrammarState | None:
        """Compile the request's grammar, which may take seconds; None without a grammar. Raises InvalidRequest."""
        return self.chat_template.grammar_state(request)

    def tokenize(
        self, request: pb.GenerateRequest, sink: Callable[[SequenceOutput], None], arrived: float
    ) -> Callable[[GrammarState | None], Sequence]:
        """Tokenize and check a request; return a function that builds the sequence from its grammar state.

        Raises UnknownModel, PromptTooLong, InvalidRequest.
        """
        adapter = self.adapter(request.model)
        most = self._max_prompt_tokens(request)
        side = request.truncation
        tokens, marks = self.checked_tokens(request.prompt, cache=request.cache, max_tokens=most, truncation=side)
        free_tokens = self._context - len(tokens)
        wanted = request_options.max_new_tokens(request, free_tokens)
        if len(request.request_id) > _MAX_ID:
            raise InvalidRequest(f"request_id has {len(request.request_id)} characters; at most {_MAX_ID} are allowed")
        scored = request_options.logprobs("prompt_logprobs", request)
        request_options.check_prompt_logprobs(scored, len(tokens))
        ends = self._loaded.stop_tokens
        # Stop strings and tokens in the arguments of a required call must not end the call.
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
            shown or self.chat_template.shows_special(request),
            request.include_stop,
            request.min_tokens,
        )
        retained = self.breakpoints.retained(request.prompt, request.cache, len(tokens))
        cache = request_options.cache_use(request.cache, marks, self._reuse_anywhere, retained)
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
            logprob_tokens=request_options.logprob_tokens(request, self._vocabulary),
            num_prompt_logprobs=scored,
            speculation=self.speculation(request.speculation),
            max_branches=request_options.max_branches(request.speculation_branches),
            adapter=adapter,
            report_provenance=request.explain,
            explain_across_tenants=request.explain and request.explain_across_tenants,
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
        """Return the prompt's text after truncation."""
        if request.prompt.WhichOneof("kind") == "text" and self._max_prompt_tokens(request) is None:
            return request.prompt.text
        return self.text(sequence.tokens[: sequence.request.num_prompt_tokens])

    def _max_prompt_tokens(self, request: pb.GenerateRequest) -> int | None:
        """Maximum prompt tokens for truncation; None for no truncation. Raises InvalidRequest."""
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
        """Return a parser of tool calls for the answer's text; None if the request allows no calls."""
        return self.chat_template.parser(request)

    def reasoning_splitter(self, request: pb.GenerateRequest, sequence: Sequence) -> ReasoningSplitter | None:
        """Return a splitter of reasoning and answer for a chat; None if there is no reasoning."""
        if not request.prompt.HasField("chat"):
            return None
        prompt = sequence.tokens[: sequence.request.num_prompt_tokens]
        return self.chat_template.reasoning_splitter(request.prompt.chat, self.text(prompt[-_TAIL_TOKENS:]))

    def sampling(self, given: pb.Sampling, min_tokens: int = 0) -> SamplingParams:
        """Build a request's sampling parameters; unset fields get the model's defaults (generation_config.json)."""
        # ListFields contains each field that was set, also to its default, because scalar fields are `optional`.
        sent = {field.name: value for field, value in given.ListFields()}
        if given.logit_bias:
            sent["logit_bias"] = dict(given.logit_bias)
        if given.allowed_tokens:
            sent["allowed_tokens"] = frozenset(given.allowed_tokens)
        return SamplingParams(**(self._loaded.sampling | sent), min_tokens=min_tokens)

    def speculation(self, given: pb.Speculation.ValueType) -> SpeculationMode:
        """Return the speculation mode of a request. Raises InvalidRequest."""
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
