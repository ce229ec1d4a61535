"""Tool calls and finish reasons as protocol fields."""

from __future__ import annotations

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.sequence.sequence import FinishReason
from inference_svc.tool_calls.tool_call_parser import ToolCallParser

FINISH = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


def read_calls(parser: ToolCallParser, part: pb.GenerateStreamResponse) -> None:
    """Move calls from a part's text to its ``tool_calls``; set the finish reason of the last part."""
    deltas = parser.feed(part.text)
    if part.finish_reason:
        deltas += parser.finish()
    part.text = "".join(delta.text for delta in deltas)
    part.tool_calls.extend(
        pb.ToolCallDelta(index=d.index, id=d.id, name=d.name, arguments=d.arguments)
        for d in deltas
        if d.index is not None
    )
    if part.finish_reason == pb.FINISH_REASON_STOP and parser.calls:
        part.finish_reason = pb.FINISH_REASON_TOOL_CALLS
