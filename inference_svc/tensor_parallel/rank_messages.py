"""Messages between rank 0 and the other ranks, as JSON. Each rank executes its messages in order of arrival.

Messages never contain tensors: the ranks exchange tensors by collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from inference_svc.context_reuse.chunking import DocumentMarks
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.model_runner.forward_batch import Branch, SequenceSlice
from inference_svc.sequence.generation_request import CacheParams

Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class TableMessage:
    """A block table. All ranks use the same block numbers, each in its own pool."""

    ranges: Ranges
    first_valid_token: int

    @classmethod
    def of(cls, table: BlockTable) -> TableMessage:
        return cls(list(table.ranges), table.first_valid_token)

    def table(self) -> BlockTable:
        return BlockTable(list(self.ranges), self.first_valid_token)


@dataclass(frozen=True)
class BranchMessage:
    """A branch of a draft tree."""

    tokens: list[int]
    start: int
    behind: int
    first: int
    table: TableMessage
    copied: list[tuple[int, int]]

    @classmethod
    def of(cls, branch: Branch) -> BranchMessage:
        return cls(
            branch.tokens,
            branch.start,
            branch.behind,
            branch.first,
            TableMessage.of(branch.table),
            list(branch.copied),
        )

    def branch(self) -> Branch:
        return Branch(self.tokens, self.start, self.behind, self.first, self.table.table(), tuple(self.copied))


@dataclass(frozen=True)
class SliceMessage:
    """A sequence's slice of a step."""

    tokens: list[int]
    start: int
    table: TableMessage
    wants_logits: bool
    num_drafted: int
    num_scored: int
    branches: list[BranchMessage]

    @classmethod
    def of(cls, piece: SequenceSlice) -> SliceMessage:
        """Converts a slice of consecutive positions, without adapter and without pending layers."""
        assert piece.positions is None
        assert piece.gate is None
        assert piece.adapter is None
        return cls(
            piece.tokens,
            piece.start,
            TableMessage.of(piece.table),
            piece.wants_logits,
            piece.num_drafted,
            piece.num_scored,
            [BranchMessage.of(branch) for branch in piece.branches],
        )

    def slice(self) -> SequenceSlice:
        return SequenceSlice(
            self.tokens,
            self.start,
            self.table.table(),
            self.wants_logits,
            num_drafted=self.num_drafted,
            num_scored=self.num_scored,
            branches=tuple(branch.branch() for branch in self.branches),
        )


# ---- from rank 0 ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """The first message: settings of the worker (JSON), the rank, and the file at which the ranks meet."""

    config: str
    rank: int
    size: int
    store: str
    kind: Literal["start"] = "start"


@dataclass(frozen=True)
class Open:
    """Permission to attach to the daemon, with the common identity of all ranks' numerics."""

    numerics: str
    kind: Literal["open"] = "open"


@dataclass(frozen=True)
class Compute:
    """A step. The rank takes part in the collectives of rank 0's forward."""

    slices: list[SliceMessage]
    kind: Literal["compute"] = "compute"


@dataclass(frozen=True)
class CopySlots:
    """Copy pool slots pair by pair. With a ``count``, copy a contiguous range of this many slots."""

    source: list[int]
    target: list[int]
    count: int = 0
    kind: Literal["copy"] = "copy"


@dataclass(frozen=True)
class ZeroSlots:
    """Zero pool slots. With a ``count``, zero a contiguous range of this many slots."""

    slots: list[int]
    count: int = 0
    kind: Literal["zero"] = "zero"


@dataclass(frozen=True)
class CheckFinite:
    """Answer which pool slots are finite."""

    slots: list[int]
    id: int = 0
    kind: Literal["check"] = "check"


@dataclass(frozen=True)
class Load:
    """Load a prompt's stored tokens except the last. The first ``known`` tokens are in ``table`` already."""

    tokens: list[int]
    known: int
    table: TableMessage
    cache: CacheParams
    id: int = 0
    kind: Literal["load"] = "load"


@dataclass(frozen=True)
class Save:
    """Save the first ``tokens`` tokens of a sequence. With ``part``, save them only if their values are finite."""

    tokens: int
    known: list[int]
    table: TableMessage
    stored: StoredPrefix
    marks: DocumentMarks
    prefill: tuple[int, float]
    cache: CacheParams
    part: bool
    id: int = 0
    kind: Literal["save"] = "save"


@dataclass(frozen=True)
class Discard:
    """Delete the chunk at a position of a prompt."""

    tokens: list[int]
    position: int
    cache: CacheParams
    kind: Literal["discard"] = "discard"


@dataclass(frozen=True)
class Prefetch:
    """Load a prompt's stored chunks into the daemon's memory."""

    tokens: list[int]
    cache: CacheParams
    kind: Literal["prefetch"] = "prefetch"


@dataclass(frozen=True)
class Release:
    """Remove the chunks that only a client's session used."""

    salt: bytes
    name: str
    id: int = 0
    kind: Literal["release"] = "release"


@dataclass(frozen=True)
class Stop:
    """Finish queued saves, and end."""

    kind: Literal["stop"] = "stop"


# ---- to rank 0 --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """Report that the rank's process runs, and waits for the other ranks."""

    kind: Literal["joined"] = "joined"


@dataclass(frozen=True)
class Ready:
    """The rank's part of the model is loaded; ``numerics`` identifies the bits that it computes."""

    numerics: str
    kind: Literal["ready"] = "ready"


@dataclass(frozen=True)
class Checked:
    """Answer to CheckFinite: one flag per slot."""

    id: int
    finite: list[bool]
    kind: Literal["checked"] = "checked"


@dataclass(frozen=True)
class Loaded:
    """Answer to Load: the tokens that are now in ``table``, and the prefix that the daemon stores."""

    id: int
    tokens: int
    table: TableMessage
    stored: StoredPrefix
    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True)
class Saved:
    """Answer to Save: the stored prefix; None if the save failed."""

    id: int
    stored: StoredPrefix | None
    kind: Literal["saved"] = "saved"


@dataclass(frozen=True)
class Released:
    """Answer to Release: the number of removed chunks, or the error."""

    id: int
    chunks: int
    error: str = ""
    kind: Literal["released"] = "released"


Order = Start | Open | Compute | CopySlots | ZeroSlots | CheckFinite | Load | Save | Discard | Prefetch | Release | Stop
Question = CheckFinite | Load | Save | Release
Answer = Checked | Loaded | Saved | Released
Report = Joined | Ready | Answer
Message = Order | Report

_BYTES = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")], config=_BYTES)


def encode(message: Message) -> bytes:
    return _ADAPTER.dump_json(message)


def decode(data: bytes) -> Message:
    """Raises ValueError."""
    return _ADAPTER.validate_json(data)
