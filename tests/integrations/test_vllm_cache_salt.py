"""Under which salt vLLM's requests are kept, how much of them, and what of the model decides their keys."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvsidecar.integrations.vllm.cache_salt import AdapterDigests, UnknownAdapter, cacheable_tokens, request_salt
from kvsidecar.integrations.vllm.rope_parameters import rope_parameters

from tests.integrations.connector_pair import PROMPT, Request


def adapter(folder: Path | str, number: int = 1, name: str = "l", in_place: bool = False) -> Any:
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(folder), load_inplace=in_place)


def test_a_cache_salt_is_the_tenants_salt() -> None:
    adapters = AdapterDigests()
    assert request_salt(Request("a", PROMPT, cache_salt="alice"), adapters) == b"alice"
    assert request_salt(Request("a", PROMPT), adapters) == b""
    assert len(request_salt(Request("a", PROMPT, cache_salt="x" * 1000), adapters)) <= 256


def test_an_adapter_is_known_by_its_contents(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    adapters, lora = AdapterDigests(), adapter(tmp_path)
    first = request_salt(Request("a", PROMPT, lora_request=lora), adapters)
    assert first == request_salt(Request("a", PROMPT, lora_request=adapter(tmp_path, 2, "m")), adapters)
    assert first != request_salt(Request("a", PROMPT, lora_request=lora, cache_salt="alice"), adapters)
    assert first[0] == 0xFF, "no cache_salt has this byte"
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_model.safetensors").write_bytes(b"other")
    assert request_salt(Request("a", PROMPT, lora_request=adapter(other, 3)), adapters) != first
    with pytest.raises(UnknownAdapter, match="the LoRA adapter l has no weights at"):
        request_salt(Request("a", PROMPT, lora_request=adapter(tmp_path / "nowhere", 4)), adapters)


def test_files_that_change_under_a_loaded_adapter_are_not_what_the_engine_computes_with(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    adapters, lora = AdapterDigests(), adapter(tmp_path)
    first = request_salt(Request("a", PROMPT, lora_request=lora), adapters)
    weights.write_bytes(b"other")
    with pytest.raises(UnknownAdapter, match="the files of the LoRA adapter l changed after it was loaded"):
        request_salt(Request("a", PROMPT, lora_request=lora), adapters)
    assert request_salt(Request("a", PROMPT, lora_request=adapter(tmp_path, 2)), adapters) != first, (
        "loaded as another one"
    )


def test_an_adapter_that_is_loaded_in_place_from_another_folder_has_another_salt(tmp_path: Path) -> None:
    adapters, salts = AdapterDigests(), []
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "adapter_model.safetensors").write_text(version)
    for lora in (adapter(tmp_path / name, in_place=in_place) for name, in_place in (("one", False), ("two", True))):
        salts.append(request_salt(Request("a", PROMPT, lora_request=lora), adapters))
    assert salts[0] != salts[1]
    with pytest.raises(UnknownAdapter, match=r"vLLM uses the LoRA adapter l of .*two, not .*one"):
        request_salt(Request("a", PROMPT, lora_request=adapter(tmp_path / "one")), adapters)
    back = adapter(tmp_path / "one", in_place=True)
    assert request_salt(Request("a", PROMPT, lora_request=back), adapters) == salts[0]


def test_an_adapter_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    at_home = request_salt(Request("a", PROMPT, lora_request=adapter("~")), AdapterDigests())
    assert at_home == request_salt(Request("a", PROMPT, lora_request=adapter(tmp_path)), AdapterDigests())


def test_an_adapter_that_cannot_be_read_is_not_identified(tmp_path: Path) -> None:
    os.symlink(tmp_path / "nowhere", tmp_path / "adapter_model.safetensors")
    with pytest.raises(UnknownAdapter, match=r"the LoRA adapter l cannot be read: .*No such file"):
        request_salt(Request("a", PROMPT, lora_request=adapter(tmp_path)), AdapterDigests())


def test_nothing_behind_an_image_is_kept() -> None:
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=20))
    assert cacheable_tokens(Request("a", PROMPT, mm_features=[image])) == 20
    assert cacheable_tokens(Request("a", PROMPT, prompt_embeds=object())) == 0
    assert cacheable_tokens(Request("a", PROMPT)) == len(PROMPT)


@pytest.mark.parametrize("kind", [{"rope_type": "longrope"}, {"type": "su"}])
def test_longrope_depends_on_the_longest_prompt_that_the_engine_takes(kind: dict[str, str]) -> None:
    text = {"rope_scaling": kind, "hidden_size": 8}
    assert rope_parameters(text, 4096) != rope_parameters(text, 131072)


def test_other_ropes_do_not_depend_on_it() -> None:
    text = {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}
    assert rope_parameters(text, 4096) == rope_parameters(text, 131072)
    assert rope_parameters({"rope_theta": None}, 4096) == ""
