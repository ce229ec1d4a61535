"""Validates request bodies: refuses unsupported options by name, and ignores advisory options."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from kvsidecar.cli.flags import did_you_mean
from kvsidecar.errors import InvalidRequest, UnsupportedOption
from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from inference_svc.gateway.body_model import BodyModel

B = TypeVar("B", bound="BodyModel")

# Options of OpenAI's or vLLM's API that this server does not support. It accepts only the neutral values listed here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "bad_words": (None, []),
    "context_management": (None, []),
    "detokenize": (None, True),
    "early_stopping": (None, False),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1.0),
    "logits_processors": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "prompt": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
# Advisory options: hints to the model, and options for the service around the model. They are accepted without effect.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "guided_decoding_backend",
    "verbosity",
    "include_reasoning",
    "separate_reasoning",
    "client_metadata",
    # vLLM's option; it has no effect with fast tokenizers, and the workers use only these.
    "spaces_between_special_tokens",
)
# The same two groups of options in Anthropic's API.
NEUTRAL_OF_MESSAGES: dict[str, tuple[Any, ...]] = {
    "compaction": (None,),
    "mcp_servers": (None, []),
    "thread": (None,),
}
IGNORED_OF_MESSAGES = (
    "betas",
    "billing_policy",
    "container",
    "context_management",
    "fallback_credit_token",
    "fallbacks",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
)
# UTF-8 cannot encode surrogates, so a body can contain them only as JSON escapes.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_NAME_CHARS = 200  # maximum length of a field name in an error message
_MAX_ALIKE = 3  # maximum number of additional fields in an error message that are wrong in the same way
# pydantic's error locations contain fields and, for a union, the type of an alternative. This matches the latter.
_ALTERNATIVE = re.compile(r"(str|int|bool|dict|list|literal|function-\w+)(\[|$)|[A-Z]")
# repr() that shortens values for error messages.
_SHORTENED = reprlib.Repr()
_SHORTENED.maxlevel, _SHORTENED.maxlist, _SHORTENED.maxdict = 3, 27, 27
_SHORTENED.maxstring = _SHORTENED.maxlong = 200


def _refuse_surrogates(body: dict[str, Any]) -> None:
    """Raise InvalidRequest for a lone surrogate, which JSON can express but UTF-8 cannot encode."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                name = where[:_MAX_NAME_CHARS].encode("ascii", "backslashreplace").decode()
                raise InvalidRequest(
                    f"{name} has the lone surrogate U+{ord(value[error.start]):04X} at character {error.start}; send "
                    f"whole characters",
                    param=name,
                ) from None
        elif isinstance(value, dict):
            names = [(f"{where}.{name}" if where else name, name, part) for name, part in value.items()]
            left += [(at, part) for at, _, part in names] + [(at, name) for at, name, _ in names]
        elif isinstance(value, list):
            left += [(f"{where}.{i}", part) for i, part in enumerate(value) if isinstance(part, str | dict | list)]


def parse(
    kind: type[B],
    raw: bytes,
    body: Any,
) -> B:
    """Validate the decoded ``body``, whose bytes are ``raw``.

    Raises UnsupportedOption and InvalidRequest; both name the wrong field.
    """
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    if _SURROGATE.search(raw):
        _refuse_surrogates(body)
    kept = {}
    for name, value in body.items():
        if name in kind.neutral_options and name not in kind.model_fields:
            if value not in kind.neutral_options[name]:
                allowed = " or ".join(json.dumps(one) for one in kind.neutral_options[name])
                raise UnsupportedOption(
                    f"{name} is not supported by this server; allowed is {allowed}, or leave it out", param=name
                )
        elif name in kind.model_fields:
            if value is not None:  # null is the default
                kept[name] = value
        elif name not in kind.ignored_options:
            kept[name] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise _sentence(kind, error) from error


def _sentence(kind: type[BaseModel], error: ValidationError) -> InvalidRequest:
    """Return one error, about the first wrong field.

    If the field is a union, pydantic reports errors for every alternative. The client meant the alternative with its
    ``type``; without a ``type``, probably the alternative whose error has the deepest location.
    """
    errors = error.errors(include_url=False)
    of_field = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]
    other_types = [one for one in of_field if _is_type_of_alternative(one)]
    rejected = {one["loc"][:-1] for one in other_types}  # alternatives for objects of another type
    meant = [one for one in of_field if not any(_has_error_in([one], place) for place in rejected)]
    unknown = [
        one for one in other_types if one["type"] == "literal_error" and not _has_error_in(meant, one["loc"][:-2])
    ]
    if unknown:
        where = _where(unknown[0]["loc"])
        allowed = ", ".join(dict.fromkeys(one["ctx"]["expected"].replace(" or ", ", ") for one in unknown))
        text = f"{where} is {_SHORTENED.repr(unknown[0]['input'])[:80]}; allowed are {allowed}"
        return InvalidRequest(text, param=where, constraint="literal_error")
    found = max(meant or of_field, key=lambda one: len(one["loc"]))
    where = _where(found["loc"])
    if found["type"] == "extra_forbidden":
        known = _options(kind, found["loc"][:-1])
        asked = did_you_mean(str(found["loc"][-1]), known)
        return UnsupportedOption(f"{where} is not an option of this server{asked}; leave it out", param=where)
    if found["type"] == "missing":
        return InvalidRequest(f"{where} is missing", param=where)
    alike = [one for one in of_field if one["type"] == found["type"] and _are_siblings(one["loc"], found["loc"])]
    others = [name for name in dict.fromkeys(_where(one["loc"]) for one in alike) if name != where][:_MAX_ALIKE]
    also = f"; so are {', '.join(others)}" if others else ""
    said = f"{where} is {_SHORTENED.repr(found['input'])[:80]}: {found['msg'].lower()}{also}"
    return InvalidRequest(said, param=where, constraint=found["type"])


def _where(place: Sequence[int | str]) -> str:
    """Return the field's name for an error's location, such as ``messages.0.content``."""
    name, *inside = place or ("the body",)
    found = ".".join([str(name), *(str(part) for part in inside if not _ALTERNATIVE.match(str(part)))])
    return found.removesuffix(".[key]")[:_MAX_NAME_CHARS]


def _has_error_in(errors: Sequence[Any], place: Sequence[int | str]) -> bool:
    return any(one["loc"][: len(place)] == place for one in errors)


def _is_type_of_alternative(error: Any) -> bool:
    """Return whether an alternative of a union does not apply, because it is for objects of another ``type``."""
    place: tuple[int | str, ...] = ("", *error["loc"])
    of_alternative = place[-1] == "type" and str(place[-2])[:1].isupper()
    return of_alternative and error["type"] in ("literal_error", "missing")


def _are_siblings(one: Sequence[int | str], other: Sequence[int | str]) -> bool:
    """Return whether two locations are members of the same object or list."""
    return len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1


def _options(kind: type[BaseModel], place: Sequence[int | str]) -> set[str]:
    """Return the options at a location in a body; for a union, the options of all its alternatives."""
    kinds = [kind]
    for step in place:
        inner = [f for k in kinds for name, f in k.model_fields.items() if step in (name, f.alias)]
        if inner:
            kinds = [k for field in inner for k in _models(field.annotation)]
        else:  # the step may name an alternative of a union
            kinds = [k for k in kinds if k.__name__ == step] or kinds
    return {field.alias or name for k in kinds for name, field in k.model_fields.items()}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the model classes in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
