"""Prompt provenance: the parts of a prompt and their texts, for ``explain``."""

from __future__ import annotations

from collections.abc import Callable

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.context_reuse.token_provenance import Provenance
from inference_svc.models.loader import LoadedModel
from inference_svc.sequence.detokenizer import split_text
from inference_svc.sequence.sequence import Sequence

_READING = {
    Provenance.EXACT: pb.READING_EXACT,
    Provenance.RELOCATED: pb.READING_MOVED,
    Provenance.RECOMPUTED: pb.READING_REPAIRED,
    Provenance.COMPUTED: pb.READING_COMPUTED,
}


def prompt_parts(sequence: Sequence, decode: Callable[[list[int]], str]) -> list[pb.PromptPart]:
    """Build the parts of a prompt by provenance.

    The request must have set ``explain``, and the answer must have its first token. Detokenizes the prompt twice.
    """
    tokens = sequence.tokens[: sequence.request.num_prompt_tokens]
    texts = split_text(decode, tokens, [part.end for part in sequence.usage.provenance])
    return [
        pb.PromptPart(reading=_READING[part.provenance], tokens=part.end - part.start, text=text)
        for part, text in zip(sequence.usage.provenance, texts, strict=True)
    ]


def numerics_of(loaded: LoadedModel) -> pb.Numerics:
    """Build the message with a model's numerics identity."""
    return pb.Numerics(id=loaded.numerics.id, shared_across_machines=loaded.numerics.shared)
