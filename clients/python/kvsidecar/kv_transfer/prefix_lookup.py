"""Prefix lookups: finds and leases the stored chunks of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry, layout_of
from kvsidecar.kv_transfer.block_chunking import BlockChunking
from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints
from kvsidecar.kv_transfer.session import CompletedLoad, Session

# Assumed disk speed. The daemon may have to load chunks from disk, so each byte extends a Match's timeout.
_MIN_DISK_BYTES_PER_SECOND = 200e6
# Longest time that the daemon waits for a remote tier.
_MAX_REMOTE_SECONDS = 10.0
_MAX_CONCURRENT_CALLS = 32


@dataclass(frozen=True)
class PrefixMatch:
    """The longest stored prefix of some tokens and their content matches, leased until released.

    ``chunking`` gives the chunk boundaries that nodes with a shared remote tier use; None without such a tier.
    """

    session: Session
    matches: tuple[pb.ChunkMatch, ...]
    tokens: int
    lease_id: bytes
    contents: tuple[pb.ContentMatch, ...] = ()
    chunking: BlockChunking | None = None

    @property
    def full_chunks(self) -> tuple[int, bytes]:
        """Tokens of the leading complete matches, and the last chunk's prefix hash.

        A store continues after them. With a shared remote tier, this counts only chunks that end at the shared
        boundaries. Other nodes do not look for a shorter chunk in between, and would not find the chunks after it. A
        store therefore continues before the shorter chunk and replaces it.
        """
        tokens, last, most = 0, b"", self.session.max_chunk_tokens
        for match in self.matches:
            if match.matched_tokens < match.tokens:
                break
            if self.chunking is not None and match.tokens != self.chunking.full_length(most):
                break
            tokens, last = tokens + match.tokens, match.prefix_hash
        return tokens, last


@dataclass(frozen=True)
class PrefixLookup:
    """Sends Match calls to the daemon.

    ``timeout`` (seconds) limits a Match of an empty prompt; longer prompts get more time. With a ``chunking``, the
    daemon also fetches missing chunks from its remote tier, if it has one: the chunk boundaries determine the tier's
    keys. Thread-safe.
    """

    geometry: Geometry
    timeout: float
    chunking: BlockChunking | None = None

    def match(
        self,
        session: Session,
        tokens: list[int],
        salt: bytes,
        *,
        leased: bool = False,
        contents: Sequence[pb.ContentProbe] = (),
        seconds_per_token: float = 0.0,
        hints: CacheHints = NO_HINTS,
        known_tokens: int | None = None,
    ) -> PrefixMatch:
        """Find and lease the stored chunks of a prompt.

        ``leased`` says that some session already leases the chunks: they are in memory, so the timeout includes no disk
        time. ``seconds_per_token`` is the prefill time, 0 when unknown; the daemon does not fetch chunks if that takes
        longer than their prefill. ``known_tokens`` is the number of leading tokens that the engine has in its own pool.
        If it is given, the daemon counts the reason why later tokens are missing. Raises grpc.RpcError, and ValueError
        for an invalid answer.
        """
        chunking = self.chunking if session.remote else None
        request = pb.MatchRequest(session_id=session.id, tenant_salt=salt, token_ids=tokens, contents=contents)
        hints.add_to(request)
        if known_tokens is not None:
            request.explain, request.known_tokens = True, known_tokens
        timeout = self._match_timeout(0 if leased else len(tokens))
        if chunking is not None and not leased:
            request.cuts.extend(chunking.shared_boundaries(len(tokens), session.max_chunk_tokens))
            request.seconds_per_token = 0.0 if hints.fetch else seconds_per_token
            timeout += min(len(tokens) * seconds_per_token, _MAX_REMOTE_SECONDS)
        answer = session.match(request, timeout)
        if answer.epoch != session.epoch:
            raise ValueError(f"an answer of epoch {answer.epoch:x} in a session of epoch {session.epoch:x}")
        found = PrefixMatch(
            session, tuple(answer.matches), answer.matched_tokens, answer.lease_id, tuple(answer.contents), chunking
        )
        at = 0
        for match in found.matches:
            if match.start_position != at:
                self.release(found)
                raise ValueError(f"a chunk at {match.start_position} does not continue {at} tokens")
            at += match.matched_tokens
        return found

    def prefetch(self, session: Session, prompts: Sequence[list[int]], salt: bytes) -> Iterator[list[bytes]]:
        """Make the daemon prefetch prompts of one chunk each from its remote tier.

        Sends at most ``_MAX_CONCURRENT_CALLS`` calls at a time. Yields the leases of the chunks that arrived; the
        caller releases them. Raises grpc.RpcError.
        """
        for at in range(0, len(prompts), _MAX_CONCURRENT_CALLS):
            calls = [
                session.match_async(
                    pb.MatchRequest(session_id=session.id, tenant_salt=salt, token_ids=tokens, cuts=[len(tokens)]),
                    self._match_timeout(len(tokens)),
                )
                for tokens in prompts[at : at + _MAX_CONCURRENT_CALLS]
            ]
            leases, failed = list[bytes](), None
            for call in calls:  # consume every answer; otherwise its lease would stay
                try:
                    leases += filter(None, [call().lease_id])
                except grpc.RpcError as error:
                    failed = error
            yield leases
            if failed is not None:
                raise failed

    def release(self, found: PrefixMatch, load: CompletedLoad | None = None) -> None:
        """Release the lease without waiting for the answer.

        ``load`` describes the load that ran under this lease; the daemon gets a report of it together with the release.
        """
        found.session.release([found.lease_id], load)

    def count_miss(self, session: Session, namespace: bytes, tokens: list[int], salt: bytes, known_tokens: int) -> None:
        """Let the daemon count a miss that the index summary has shown.

        The tokens after ``known_tokens`` are missing; the daemon finds the reason. A failed call is not counted.
        """
        request = pb.MatchRequest(
            namespace=namespace, tenant_salt=salt, token_ids=tokens, explain=True, known_tokens=known_tokens
        )
        with suppress(grpc.RpcError):
            session.stub.Match(request, timeout=self.timeout)

    def _match_timeout(self, tokens: int) -> float:
        """Return the seconds to wait for a Match that may read ``tokens`` from disk."""
        g = self.geometry
        token_bytes = 4 * g.layers * g.kv_heads * g.head_dim * g.bits / 8  # estimate: keys and values without scales
        return self.timeout + tokens * token_bytes / _MIN_DISK_BYTES_PER_SECOND


def header_of(match: pb.ChunkMatch, geometry: Geometry) -> ChunkHeader:
    """Return a matched chunk's header, without token ids.

    Raises ValueError when its payload has another size.
    """
    header = ChunkHeader(
        layers=geometry.layers,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
        bits=geometry.bits,
        token_count=match.tokens,
        key_group_tokens=match.key_group_tokens,
        sink_tokens=match.sink_tokens,
        format_version=keys.FORMAT_VERSION,
    )
    if match.payload_bytes != layout_of(header).size_bytes:
        raise ValueError(f"{match.payload_bytes} bytes are not a chunk of {match.tokens} tokens of this model")
    return header
