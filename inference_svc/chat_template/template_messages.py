"""Template messages: messages and tools in the form that chat templates expect.

For a template that supports tools, the form is that of Hugging Face's documentation: tools as ``tools=`` of
``apply_chat_template``, calls as ``tool_calls`` of a message, arguments as an object. For any other template, the
system message describes the tools, calls are JSON text, and results are user messages, because such templates often
allow no other roles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.tool_calls.json_call_parser import FUNCTION_NAME
from inference_svc.tool_calls.tool_call_format import ToolCallFormat, parameters_schema

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_MAX_TOOLS, _MAX_NAME, _MAX_ARGUMENTS_BYTES = 1024, 256, 1 << 16
# Arguments that a request may not set: the worker sets them, or they are not arguments of the template.
_NOT_ARGUMENTS = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding truncation"
    " max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)
_INSTRUCTIONS = (
    "You can call functions. To call one or several of them, answer with nothing but JSON of this form:\n"
    '{{"tool_calls": [{{"name": "NAME", "arguments": {{...}}}}]}}\n'
    "You are then told their results. Call only these functions:\n{tools}"
)


def check_chat(chat: pb.Chat) -> None:
    """Raise InvalidRequest for a conversation that no template can render."""
    if not chat.messages:
        raise InvalidRequest("messages is empty; at least one message is needed", param="messages")
    for message in chat.messages:
        if not _ROLE.fullmatch(message.role):
            raise InvalidRequest(
                f"role is {message.role[:80]!r}; allowed are system, user, assistant, tool, and names of 1 to 64 "
                "letters, digits, '_' and '-' that the chat template knows",
                param="messages",
            )
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest(
                f"tool_calls stand in a message of {message.role}; only an assistant calls", param="messages"
            )
        longest = max(map(len, _names_in(message)))
        if longest > _MAX_NAME:
            raise InvalidRequest(
                f"a message has a name or id of {longest} characters; at most {_MAX_NAME} are allowed", param="messages"
            )
    if len(chat.tools) > _MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(chat.tools)} tools; at most {_MAX_TOOLS} are allowed", param="tools")
    names = set[str]()
    for tool in chat.tools:
        if not FUNCTION_NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"a tool is called {tool.name[:160]!r}; allowed are letters, digits, '_', '-', '.', 1 to 128 of them",
                param="tools",
            )
        if tool.name in names:
            raise InvalidRequest(f"two tools are called {tool.name!r}; give each a name of its own", param="tools")
        names.add(tool.name)


def template_arguments(chat: pb.Chat) -> dict[str, Any]:
    """Parse the additional template arguments of a request. Raises InvalidRequest."""
    text, param = chat.template_arguments, "chat_template_kwargs"
    if len(text) > _MAX_ARGUMENTS_BYTES:
        raise InvalidRequest(
            f"the template's arguments have {len(text)} characters; at most {_MAX_ARGUMENTS_BYTES} are allowed",
            param=param,
        )
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the template's arguments are not JSON: {error}", param=param) from error
    if not isinstance(given, dict):
        raise InvalidRequest(f"the template's arguments are {text[:40]}; they must be a JSON object", param=param)
    wrong = sorted(_NOT_ARGUMENTS & given.keys())
    if wrong:
        raise InvalidRequest(f"{wrong[0]} is no argument that a request may give the template", param=param)
    return given


def _names_in(message: pb.ChatMessage) -> list[str]:
    """Names and ids of a message and of its calls."""
    return [message.name, message.tool_call_id, *(s for call in message.tool_calls for s in (call.id, call.name))]


def uses_tools(chat: pb.Chat) -> bool:
    """True if the conversation has tools or contains calls."""
    return bool(chat.tools) or any(m.tool_calls or m.tool_call_id for m in chat.messages)


def chat_texts(chat: pb.Chat) -> list[str]:
    """All texts that a template will render, for a count of characters."""
    written = [text for m in chat.messages for text in (m.content, m.reasoning)]
    written += [call.arguments for m in chat.messages for call in m.tool_calls]
    written += [name for m in chat.messages for name in _names_in(m) if name]
    written += [text for tool in chat.tools for text in (tool.description, tool.parameters)]
    return [*written, chat.template_arguments]


def prompt_texts(prompt: pb.Prompt) -> list[str]:
    """Return all texts of a prompt that will be tokenized, for counting."""
    return [prompt.text, *chat_texts(prompt.chat)]


def template_tools(chat: pb.Chat) -> list[dict[str, Any]]:
    """Convert tools to the form that templates expect. Raises InvalidRequest."""
    return [{"type": "function", "function": _function(tool)} for tool in chat.tools]


def template_messages(chat: pb.Chat, dialect: ToolCallFormat, written: Mapping[int, str]) -> list[dict[str, Any]]:
    """Convert messages for a template that supports tools, or for a conversation without tools.

    ``written`` maps the index of a message to a text that replaces its content and calls.
    """
    names = {call.id: call.name for m in chat.messages for call in m.tool_calls}
    messages = []
    for i, m in enumerate(chat.messages):
        message: dict[str, Any] = {"role": m.role, "content": written.get(i, m.content)}
        name = m.name or (names.get(m.tool_call_id, "") if m.role == "tool" else "")
        if name:
            message["name"] = name
        if m.tool_call_id:
            message["tool_call_id"] = _shown_id(m.tool_call_id, dialect)
        if m.tool_calls and i not in written:
            message["tool_calls"] = [_call(call, dialect) for call in m.tool_calls]
        if m.reasoning and i not in written:
            message["reasoning_content"] = m.reasoning
        messages.append(message)
    return messages


def messages_with_described_tools(chat: pb.Chat, in_system: bool, written: Mapping[int, str]) -> list[dict[str, Any]]:
    """Convert messages for a template without support for tools.

    With ``in_system``, the system message describes the tools; without, the first message does. Raises InvalidRequest.
    """
    names = {call.id: call.name for m in chat.messages for call in m.tool_calls}
    said: list[tuple[str, list[str]]] = []  # a role, and its consecutive messages
    for i, m in enumerate(chat.messages):
        role, content = m.role, written.get(i, m.content)
        if m.tool_calls and i not in written:
            calls = [{"name": call.name, "arguments": _arguments(call)} for call in m.tool_calls]
            content = "\n".join(filter(None, (content, _json({"tool_calls": calls}))))
        if m.role == "tool":
            role, name = "user", m.name or names.get(m.tool_call_id, "")
            content = f"Result of {name or 'the call'}: {content}"
        if said and role == "user" == said[-1][0]:
            said[-1][1].append(content)
        else:
            said.append((role, [content]))
    messages = [{"role": role, "content": "\n\n".join(parts)} for role, parts in said]
    if not chat.tools:
        return messages
    text = _INSTRUCTIONS.format(tools="\n".join(_json(_function(tool)) for tool in chat.tools))
    if messages[0]["role"] == "system" or not in_system:
        messages[0]["content"] = "\n\n".join(_ordered(messages[0], text))
    else:
        messages.insert(0, {"role": "system", "content": text})
    return messages


def _ordered(first: dict[str, Any], text: str) -> Sequence[str]:
    """Order the first message and the tools' description: a system message comes first, a user message second."""
    return (first["content"], text) if first["role"] == "system" else (text, first["content"])


def _function(tool: pb.Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": parameters_schema(tool)}


def _call(call: pb.ToolCall, dialect: ToolCallFormat) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call)}
    return {"id": _shown_id(call.id, dialect), "type": "function", "function": function}


def _arguments(call: pb.ToolCall) -> Any:
    """Return the arguments as an object, which templates write as JSON. Truncated arguments are returned as text."""
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments


def _shown_id(name: str, dialect: ToolCallFormat) -> str:
    """Convert an id to the template's form: Mistral's templates require nine characters."""
    return re.sub(r"[^A-Za-z0-9]", "", name)[-9:].rjust(9, "0") if dialect == "mistral" else name


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest("a message or a tool has JSON that is nested too deeply", param="messages") from error
