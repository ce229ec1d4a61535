"""Request builder: builds sequences from requests, and checks options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from secrets import token_hex

import structlog
from kvsidecar.errors import InvalidRequest, UnknownModel
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import REST_OF_CONTEXT

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.chat_template.reasoning_splitter import ReasoningSplitter
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.models.loader import LoadedModel
from inference_svc.request import request_options
from inference_svc.request.breakpoint_finder import BreakpointFinder
from inference_svc.request.prompt_tokenizer import PromptTokenizer, PromptTruncation
from inference_svc.sampling.sampling_params import SamplingParams, valid_defaults
from inference_svc.scheduling.context_limits import ContextLimits
from inference_svc.sequence.detokenizer import IncrementalDetokenizer, ReasoningMarkers
from inference_svc.sequence.generation_request import GenerationRequest, SpeculationMode
from inference_svc.sequence.sequence import Sequence, SequenceOutput
from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.tool_calls.tool_call_parser import ToolCallParser

log = structlog.get_logger("worker")

_MODES = {
    pb.SPECULATION_OFF: SpeculationMode.OFF,
    pb.SPECULATION_NGRAM: SpeculationMode.NGRAM,
    pb.SPECULATION_DRAFT: SpeculationMode.DRAFT,
    pb.SPECULATION_AUTO: SpeculationMode.AUTO,
}
_MAX_ID = 128
_CONTEXT_TOKENS = 4  # last tokens of a prompt, on which the text of the answer's first token may depend
_TAIL_TOKENS = 16  # last tokens of a prompt, in which a template may open the reasoning


@dataclass(frozen=True)
class RequestDefaults:
    """Worker settings that apply to requests without their own."""

    document_separator: str = ""
    tool_call_parser: str = "auto"
    speculate: str = "off"
    has_draft_model: bool = False
    reuse_anywhere: bool = False


@dataclass(frozen=True)
class TokenizedRequest:
    """A checked request without its grammar; ``sequence`` builds its sequence from the grammar's state."""

    sequence: Callable[[GrammarState | None], Sequence]
    reasoning: ReasoningMarkers | None


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
        self._speculate, self._has_draft_model = SpeculationMode(defaults.speculate), defaults.has_draft_model
        self._loaded, self._context = loaded, context_length
        self._sampling = valid_defaults(loaded.sampling)
        if refused := {name: value for name, value in loaded.sampling.items() if name not in self._sampling}:
            log.warning("generation_config.json recommends values that are not allowed; they are not used", **refused)
        self._reuse_anywhere = defaults.reuse_anywhere
        self._vocabulary = int(loaded.config.vocab_size)
        self._grammar_compiler = GrammarCompiler(loaded.tokenizer, self._vocabulary, loaded.stop_tokens)
        self.chat_template = ChatTemplate(
            loaded.id, loaded.tokenizer, self._grammar_compiler, defaults.tool_call_parser
        )
        limits = context_limits or ContextLimits(context_length, context_length, 0)
        self.tokenizer = PromptTokenizer(
            loaded, self.chat_template, context_length, limits, defaults.document_separator
        )
        self.breakpoints = BreakpointFinder(self.chat_template, lambda text: self.tokenizer.ids(text, False))

    def warm_up(self) -> None:
        """Prepare the grammar compiler. Its first use holds the GIL for seconds and must not delay requests."""
        self._grammar_compiler.warm_up()

    def build(self, request: pb.GenerateRequest, sink: Callable[[SequenceOutput], None], arrived: float) -> Sequence:
        """Build a sequence to submit. Raises UnknownModel, PromptTooLong, InvalidRequest."""
        tokenized = self.tokenize(request, sink, arrived)
        return tokenized.sequence(self.grammar_state(request, tokenized))

    def grammar_state(self, request: pb.GenerateRequest, tokenized: TokenizedRequest) -> GrammarState | None:
        """Compile the request's grammar, which may take seconds; None without a grammar. Raises InvalidRequest."""
        return self.chat_template.grammar_state(request, tokenized.reasoning)

    def tokenize(
        self, request: pb.GenerateRequest, sink: Callable[[SequenceOutput], None], arrived: float
    ) -> TokenizedRequest:
        """Tokenize and check a request. Raises UnknownModel, PromptTooLong, InvalidRequest."""
        adapter = self.adapter(request.model)
        truncation = self._truncation(request)
        tokens, marks = self.tokenizer.checked_tokens(request.prompt, cache=request.cache, truncation=truncation)
        free_tokens = self._context - len(tokens)
        wanted = request_options.max_new_tokens(request, free_tokens)
        if len(request.request_id) > _MAX_ID:
            raise InvalidRequest(f"request_id has {len(request.request_id)} characters; at most {_MAX_ID} are allowed")
        scored = request_options.logprobs("prompt_logprobs", request)
        request_options.check_prompt_logprobs(scored, len(tokens))
        ends = self._loaded.stop_tokens
        # Stop strings and tokens in the arguments of a required call must not end the call. In the arguments of another
        # call, the detokenizer ignores stop strings.
        must_call = request.tool_use.mode == pb.TOOL_MODE_REQUIRED
        strings = () if must_call else request_options.stop_strings(request)
        own_stops = frozenset() if must_call else request_options.request_stop_ids(request, self._vocabulary)
        stops = own_stops if request.ignore_eos else ends | own_stops
        params = self.sampling(request.sampling, request.min_tokens)
        params.check(self._vocabulary)
        reasoning = self._reasoning_markers(request, tokens)
        shown = request.show_special_tokens
        text = IncrementalDetokenizer(
            self._loaded.tokenizer,
            strings,
            frozenset() if shown else ends,
            shown or self.chat_template.shows_special(request),
            request.include_stop,
            request.min_tokens,
            self.chat_template.call_markers(request, reasoning) if strings else None,
            tokens[-_CONTEXT_TOKENS:] if _continues_text(request.prompt) else (),
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
            end_token_ids=ends,
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
        return TokenizedRequest(lambda grammar: Sequence(parameters, tokens, text, sink, grammar), reasoning)

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
        if request.prompt.WhichOneof("kind") == "text" and self._truncation(request) is None:
            return request.prompt.text
        return self.tokenizer.text(sequence.tokens[: sequence.request.num_prompt_tokens])

    def _truncation(self, request: pb.GenerateRequest) -> PromptTruncation | None:
        """Return the truncation of a request's prompt; None for no truncation. Raises InvalidRequest."""
        side = request.truncation
        if side not in pb.Truncation.values():
            raise InvalidRequest(f"truncation is {side}, which is none", param="truncation")
        sets_length = request.HasField("truncate_prompt_tokens")
        if not sets_length and not side:
            return None
        if request.truncate_prompt_tokens:
            most = request.truncate_prompt_tokens
            return PromptTruncation(most, most, side, "truncate_prompt_tokens")
        named = request.HasField("max_tokens") and request.max_tokens != REST_OF_CONTEXT
        answer = max(1, request.max_tokens if named else request_options.DEFAULT_MAX_TOKENS, request.min_tokens)
        rest = self._context - answer
        if sets_length:
            return PromptTruncation(rest, rest, side, "truncate_prompt_tokens")
        return PromptTruncation(self._context - max(1, request.min_tokens), rest, side, "max_tokens")

    def call_parser(self, request: pb.GenerateRequest) -> ToolCallParser | None:
        """Return a parser of tool calls for the answer's text; None if the request allows no calls."""
        return self.chat_template.parser(request)

    def reasoning_splitter(self, request: pb.GenerateRequest, sequence: Sequence) -> ReasoningSplitter | None:
        """Return a splitter of reasoning and answer for a chat; None if there is no reasoning."""
        reasoning = self._reasoning_markers(request, sequence.tokens[: sequence.request.num_prompt_tokens])
        return ReasoningSplitter(begun=not reasoning.begin) if reasoning is not None else None

    def _reasoning_markers(self, request: pb.GenerateRequest, prompt: list[int]) -> ReasoningMarkers | None:
        if not request.prompt.HasField("chat"):
            return None
        return self.chat_template.reasoning_markers(request, self.tokenizer.text(prompt[-_TAIL_TOKENS:]))

    def sampling(self, given: pb.Sampling, min_tokens: int = 0) -> SamplingParams:
        """Build a request's sampling parameters; unset fields get the model's defaults (generation_config.json)."""
        # ListFields contains each field that was set, also to its default, because scalar fields are `optional`.
        sent = {field.name: value for field, value in given.ListFields()}
        if given.logit_bias:
            sent["logit_bias"] = dict(given.logit_bias)
        if given.allowed_tokens:
            sent["allowed_tokens"] = frozenset(given.allowed_tokens)
        return SamplingParams(**(self._sampling | sent), min_tokens=min_tokens)

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


def _continues_text(prompt: pb.Prompt) -> bool:
    """True if the answer continues the prompt's last text. It does not continue a chat's generation prompt."""
    return prompt.WhichOneof("kind") != "chat" or prompt.chat.answer_start == pb.ANSWER_START_LAST_MESSAGE
