"""Miss probe: finds the reason of a sequence's miss during its prefill."""

from __future__ import annotations

from itertools import pairwise

import grpc
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.kv_transfer.session import Session

from inference_svc.kv_client.chunk_loader import ChunkLoader, document_marks
from inference_svc.kv_client.client_context import ClientContext
from inference_svc.sequence.kv_connector import MISS_UNAVAILABLE
from inference_svc.sequence.sequence import Sequence

MISS_REUSE_OFF = "reuse_off"
# Text behind another prefix is the reason of a miss if it has this many tokens and this share of the missing tokens.
_MIN_STORED_TOKENS, _MIN_STORED_SHARE = 32, 0.25
_MIN_CHUNK_TOKENS = 8
_TEXT_KINDS = (pb.MISS_KIND_NEVER_SEEN, pb.MISS_KIND_DIFFERS)


class MissProbe:
    """Sets the reasons of misses. Methods block; several threads may call them at once."""

    def __init__(self, context: ClientContext, loader: ChunkLoader) -> None:
        self._policy, self._timeout, self._loader = context.policy, context.timeout_seconds, loader

    def explain(
        self,
        session: Session,
        root: bytes,
        namespace: bytes,
        sequence: Sequence,
        known_tokens: int,
        answer: pb.MatchResponse | None = None,
    ) -> None:
        """Set the reason of the miss from a lookup's ``answer``. Without an answer, send a probe, which leases nothing.

        The pool already has the prompt's first ``known_tokens`` tokens.
        """
        tokens = sequence.tokens[: sequence.request.num_prompt_tokens]
        if answer is None:
            request = pb.MatchRequest(
                tenant_salt=sequence.request.cache.tenant_salt,
                token_ids=tokens,
                namespace=namespace,
                explain=True,
                known_tokens=known_tokens,
                across_tenants=sequence.request.explain_across_tenants,
            )
            try:
                answer = session.stub.Match(request, timeout=self._timeout)
            except grpc.RpcError:  # the cache works without the reason
                sequence.set_miss(MISS_UNAVAILABLE)
                return
        behind_other_text = self._is_stored_behind_other_text(session, root, sequence, tokens, answer.miss)
        sequence.set_miss(MISS_REUSE_OFF if behind_other_text else answer.miss)

    def _is_stored_behind_other_text(
        self, session: Session, root: bytes, sequence: Sequence, tokens: list[int], miss: pb.MissReason
    ) -> bool:
        """True if many missing tokens are probably stored behind another prefix, and relocation is not allowed."""
        if miss.kind not in _TEXT_KINDS or self._policy.key_rotation is None or session.summary is None:
            return False
        if self._loader.allows_relocation(session, sequence):
            return False
        ends = self._policy.chunker.ends(tokens, document_marks(sequence))
        found = sum(
            b - a
            for a, b in pairwise([0, *ends])
            if a >= miss.position
            and _MIN_CHUNK_TOKENS <= b - a <= session.max_chunk_tokens
            and session.may_contain_content(root, tokens[a:b])
        )
        return found >= max(_MIN_STORED_TOKENS, (len(tokens) - miss.position) * _MIN_STORED_SHARE)
