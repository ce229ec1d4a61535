"""Tool calls and finish reasons as protocol fields."""

from __future__ import annotations

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.sequence.sequence import FinishReason
from inference_svc.tool_calls.tool_call_parser import ToolCallParser

FINISH = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


def read_calls(parser: ToolCallParser, part: pb.GenerateStreamResponse) -> list[pb.GenerateStreamResponse]:
    """Move calls from a part's text to ``tool_calls``; set the finish reason of the last part.

    Returns the part. If text follows a call, parts with the reasoning, text and calls up to there precede it.
    """
    deltas = parser.feed(part.text)
    if part.finish_reason:
        deltas += parser.finish()
    if part.finish_reason == pb.FINISH_REASON_STOP and parser.calls:
        part.finish_reason = pb.FINISH_REASON_TOOL_CALLS
    found = [pb.GenerateStreamResponse(reasoning=part.reasoning)]
    for d in deltas:
        if d.index is not None:
            found[-1].tool_calls.add(index=d.index, id=d.id, name=d.name, arguments=d.arguments)
            continue
        if found[-1].tool_calls:
            found.append(pb.GenerateStreamResponse())
        found[-1].text += d.text
    part.text = part.reasoning = ""
    part.MergeFrom(found.pop())
    return [*found, part]
