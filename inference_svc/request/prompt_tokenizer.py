"""Prompt tokenizer: tokenizes the prompts of requests within the context's limits, and converts tokens to text."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from secrets import token_hex

from kvsidecar.errors import InvalidRequest, PromptTooLong
from kvsidecar.inference.v1 import inference_pb2 as pb
from transformers import PreTrainedTokenizerBase

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.chat_template.template_messages import prompt_texts
from inference_svc.context_reuse.chunking import DocumentMarks, separator_cuts
from inference_svc.context_reuse.text_structure import special_tokens
from inference_svc.models.loader import LoadedModel
from inference_svc.request.sampled_calls import SampledCalls
from inference_svc.request.token_bytes import REPLACEMENT, token_bytes
from inference_svc.scheduling.context_limits import ContextLimits
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.sequence.sequence import Sequence

# A text of more than _USUAL_CHARACTERS_PER_TOKEN characters per token of the context is first tokenized in pieces of
# _PIECE_CHARACTERS, to count its tokens. A cut between pieces causes at most _CUT_TOKENS additional tokens.
_USUAL_CHARACTERS_PER_TOKEN, _PIECE_CHARACTERS, _CUT_TOKENS = 8, 1 << 15, 64
_MAX_SEPARATOR = 64
# SentencePiece writes a space as this character in the names of tokens.
_SPACE = "\u2581"
# A prompt that will be truncated may be at most this many times as long as the context.
_MAX_TRUNCATION_FACTOR = 4
# A list of token ids to convert may have so many, or as many as the context holds.
_MAX_IDS = 1 << 17
# Number of tokens whose texts are kept: log probabilities with alternatives name the same tokens often.
_MAX_DECODED = 1 << 16


@dataclass(frozen=True)
class PromptTruncation:
    """Shortens a prompt of more than ``limit`` tokens to ``length`` tokens, which may be none or fewer."""

    limit: int
    length: int
    side: pb.Truncation.ValueType
    """Unspecified: it removes the first tokens."""
    param: str
    """Option of the request that sets the length."""


class PromptTokenizer:
    """Tokenizes the prompts of one model. Any thread may call the methods."""

    def __init__(
        self,
        loaded: LoadedModel,
        chat_template: ChatTemplate,
        context_length: int,
        context_limits: ContextLimits,
        document_separator: str,
    ) -> None:
        """``context_limits`` are the pool's limits, for error messages. Requests may set another separator."""
        self._tokenizer, self._stop_tokens = loaded.tokenizer, loaded.stop_tokens
        self._vocabulary = int(loaded.config.vocab_size)
        self._chat_template, self._separator = chat_template, document_separator
        self._context, self._context_limits = context_length, context_limits
        self._sampled_calls = SampledCalls()
        self._removes_space = _removes_space(self._tokenizer)
        self._decoded = lru_cache(_MAX_DECODED)(self._decode)
        self.max_ids = max(context_length, _MAX_IDS)
        """Maximum number of token ids that are converted for a caller."""
        # A longer text cannot fit, because no token has more characters than the longest one of the vocabulary.
        self._max_characters = context_length * max(map(len, self._tokenizer.get_vocab()), default=1)

    def checked_tokens(
        self,
        prompt: pb.Prompt,
        generation_prompt: bool = True,
        cache: pb.CacheOptions | None = None,
        truncation: PromptTruncation | None = None,
    ) -> tuple[list[int], DocumentMarks]:
        """Return the result of ``tokens`` for a prompt that must fit into the context, after its truncation.

        Raises PromptTooLong, and InvalidRequest if the truncation would leave no token. A text with too many characters
        is not even tokenized.
        """
        if truncation is not None:
            size = self._check_characters(*prompt_texts(prompt))
            most = _MAX_TRUNCATION_FACTOR * self._context * _USUAL_CHARACTERS_PER_TOKEN
            if size > most:
                raise PromptTooLong(
                    f"the prompt is too long: it has {size} characters, too many to be read for its end; send less"
                )
            _check_num_ids(prompt, most)
            ids, marks = self._truncate(prompt, *self.tokens(prompt, generation_prompt, cache), truncation)
            self._check_length(len(ids))
            return ids, marks
        self._check_length(len(prompt.token_ids.ids))
        self._check_size(*prompt_texts(prompt))
        ids, marks = self.tokens(prompt, generation_prompt, cache)
        self._check_length(len(ids))
        return ids, marks

    def _truncate(
        self, prompt: pb.Prompt, ids: list[int], marks: DocumentMarks, truncation: PromptTruncation
    ) -> tuple[list[int], DocumentMarks]:
        """Truncate a prompt that is too long.

        At the left, it removes tokens behind the special tokens at the start and keeps the last tokens. In the middle,
        it keeps equal numbers of first and last tokens. At the right, it keeps the first tokens.
        """
        most, side = truncation.length, truncation.side
        if len(ids) <= truncation.limit:
            return ids, marks
        if most < 1:
            raise InvalidRequest(
                f"the prompt is to leave room for an answer of {self._context - most} tokens; a context of "
                f"{self._context} has none for the prompt then",
                param=truncation.param,
            )
        kept = {pb.TRUNCATION_MIDDLE: most // 2, pb.TRUNCATION_RIGHT: most}.get(side)
        head = kept or 0
        if kept is None and prompt.WhichOneof("kind") == "text" and not prompt.without_special_tokens:
            special = self.ids("", True)
            head = len(special) if ids[: len(special)] == special and len(special) < most else 0
        cut = len(ids) - most
        before = [end for end in marks.segment_ends if end <= head] if kept is not None else []
        ends = (*before, *(end - cut for end in marks.segment_ends if end > cut + head))
        return ids[:head] + ids[cut + head :], replace(marks, segment_ends=ends)

    def _check_length(self, tokens: int) -> None:
        self._context_limits.check(tokens)

    def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Tokenize a prompt that need not fit into the context; only its characters, or its ids, are limited.

        Raises PromptTooLong, InvalidRequest.
        """
        self._check_characters(*prompt_texts(request.prompt))
        _check_num_ids(request.prompt, self.max_ids)
        ids, _ = self.tokens(request.prompt, cache=pb.CacheOptions(tenant_salt=request.tenant_salt))
        names = self.token_names(ids) if request.return_token_names else ()
        return pb.TokenizeResponse(token_ids=ids, token_names=names)

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
                counted += max(0, len(self.ids(text[at : at + _PIECE_CHARACTERS], False)) - cut)
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
                rendered = self._chat_template.render(chat, generation_prompt, dict.fromkeys(sampled, marker))
                pieces = rendered.split(marker)
        if len(pieces) != len(sampled) + 1:
            return self._encode(self._chat_template.render(chat, generation_prompt), special, separator)
        ids, ends = [], list[int]()
        for piece, tokens in zip(pieces, [*sampled.values(), []], strict=True):
            found, marks = self._encode(piece, special and not ids, separator)
            ends += [len(ids) + end for end in marks.segment_ends]
            ids += found + tokens
        return ids, DocumentMarks(segment_ends=tuple(ends))

    def keep_calls(self, salt: bytes, sequence: Sequence, message: pb.ChatMessage) -> None:
        """Keep the tokens of a complete answer with calls; clients send the answer back as ``message``."""
        tokens = sequence.tokens[sequence.request.num_prompt_tokens :]
        self._sampled_calls.keep(salt, message, tokens[: -1 if tokens[-1] in self._stop_tokens else None])

    def _encode(self, text: str, special: bool, separator: str) -> tuple[list[int], DocumentMarks]:
        if not separator or separator not in text:
            return self.ids(text, special), DocumentMarks()
        first, *others = text.split(separator)
        ids, ends = self.ids(first, special), []
        for other in others:
            ends.append(len(ids))
            ids += self.ids(separator + other, False)
        return ids, DocumentMarks(segment_ends=tuple(end for end in separator_cuts(ends, len(ids)) if end))

    def ids(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text; with ``special``, also the special tokens that the tokenizer adds."""
        # verbose: transformers would log that a text is longer than its own limit; we have limits of our own.
        ids: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids

    def _marks(self, cache: pb.CacheOptions, separator: str, tokens: int) -> DocumentMarks:
        ends = tuple(cache.segment_ends)
        if any(b <= a for a, b in pairwise((0, *ends))) or (ends and ends[-1] > tokens):
            raise InvalidRequest(f"segment_ends must rise from 1 to at most the prompt's {tokens} tokens")
        return DocumentMarks(tuple(self.ids(separator, False)) if separator else (), ends)

    def text(self, ids: list[int]) -> str:
        """Convert token ids to text, with special tokens; padding ids of the vocabulary have no text."""
        known = len(self._tokenizer)
        return str(self._tokenizer.decode([i for i in ids if i < known]))

    def text_and_bytes(self, token: int) -> tuple[str, bytes]:
        """Return a token's text and its bytes; see ``token_bytes``. Calls the tokenizer once per token."""
        return self._decoded(token)

    def _decode(self, token: int) -> tuple[str, bytes]:
        text = self.text([token])
        # The name matters only for a part of a character or for a space that the decoder removed.
        name = self.token_names([token])[0] if self._removes_space or REPLACEMENT in text else ""
        if self._removes_space and name.startswith(_SPACE):
            text = f" {text}"
        return text, token_bytes(name, text)

    def text_offsets(self, tokens: list[int], text: str) -> list[int]:
        """Return the offset of each token in ``text``, the text of all tokens, in characters.

        A special token that the tokenizer added before the text has the offset of the text.
        """
        detokenizer = IncrementalDetokenizer(self._tokenizer, (), frozenset(), shows_special=True)
        special, offsets, begun = special_tokens(self._tokenizer), list[int](), False
        for token in tokens:
            begun = begun or token not in special or text.startswith(self.text([token]))
            detokenizer.push(token, has_text=begun)
            offsets.append(min(detokenizer.text_offset, len(text)))
        return offsets

    def token_names(self, ids: list[int]) -> list[str]:
        """Return the tokens' names in the vocabulary; empty for padding ids."""
        return [name or "" for name in self._tokenizer.convert_ids_to_tokens(ids)]

    def config(self) -> str:
        """Return the tokenizer's settings as a JSON object, without paths."""
        given = {k: v for k, v in self._tokenizer.init_kwargs.items() if not k.endswith(("_file", "_path"))}
        own = {"tokenizer_class": type(self._tokenizer).__name__, "chat_template": self._tokenizer.chat_template}
        return json.dumps({**given, **own}, default=str)


def _check_num_ids(prompt: pb.Prompt, most: int) -> None:
    """Raise PromptTooLong for a prompt of more than ``most`` token ids, before they are copied."""
    found = len(prompt.token_ids.ids)
    if found > most:
        raise PromptTooLong(f"the prompt is too long: it has {found} token ids; at most {most} are read")


def _removes_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the tokenizer's decoder removes the space before the first word, as SentencePiece does for Llama 2."""
    ids = tokenizer("a a", add_special_tokens=False)["input_ids"]
    spaces = [i for i in ids if str(tokenizer.convert_ids_to_tokens(i)).startswith(_SPACE)]
    return bool(spaces) and not tokenizer.decode(spaces[-1:]).startswith(" ")
