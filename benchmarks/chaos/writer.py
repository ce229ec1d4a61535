"""Writer process, which a fault stops or kills while the process fills staging.

``python -m benchmarks.chaos.writer SOCKET`` writes one chunk for each line of its input. It prints ``half`` when it has
a lease and has written half of the chunk, and the chunk's final status at the end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.process.runtime_dir import socket_target

from benchmarks.node import Node
from benchmarks.peer import Peer, payload_of


def write(node: Node, ids: list[int]) -> str:
    """Write one chunk slowly; return its final status."""
    peer = Peer(node)
    try:
        found = peer.match(ids[:1])
        reserved = peer.reserve(peer.header(ids))[0]
        if reserved.outcome != pb.RESERVE_OUTCOME_GRANTED:
            peer.release(found)
            return pb.ReserveOutcome.Name(reserved.outcome)
        whole, view = payload_of(ids, reserved.staging.size_bytes), peer.staged(reserved.staging)
        middle = len(whole) // 2
        view[:middle] = whole[:middle]
        print("half", flush=True)
        for at in range(middle, len(whole), 4096):
            view[at : at + 4096] = whole[at : at + 4096]
            time.sleep(0.001)
        item = pb.CommitItem(reservation_id=reserved.reservation_id, checksum=keys.checksum(whole))
        request = pb.CommitRequest(session_id=peer.session, epoch=peer.welcome.epoch, items=[item])
        return pb.CommitOutcome.Name(peer.stub.Commit(request, timeout=10).outcomes[0])
    except grpc.RpcError as error:
        return cast(Any, error).code().name
    finally:
        peer.close()


def main() -> None:
    target = socket_target(Path(sys.argv[1]))
    options = [("grpc.use_local_subchannel_pool", 1)]
    node = cast(Node, SimpleNamespace(cache_channel=lambda: grpc.insecure_channel(target, options=options)))
    for line in sys.stdin:
        print(write(node, [int(line)] * 4000), flush=True)


if __name__ == "__main__":
    main()
