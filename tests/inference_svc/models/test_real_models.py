"""Models that people have: SmolLM2, from the user's package index, against transformers reading the same file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from kvsidecar.errors import Unavailable
from kvsidecar.models.model_library import ModelLibrary
from kvsidecar.models.model_pull import pull
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.systems.environments import EngineNotInstalled, find
from inference_svc import Engine
from inference_svc.context_reuse.shipped_verdicts import shipped_verdict
from inference_svc.models.gguf.gguf_config import config_of
from inference_svc.models.gguf.gguf_file import read_gguf
from inference_svc.models.loader import load
from inference_svc.models.model_resolver import resolve

THINGS = ["France", "Italy", "Japan", "rain", "a loan", "bread", "gravity", "a poem", "Python", "the moon"]
QUESTIONS = ["What is {}?", "Tell me one fact about {}.", "Who knows most about {}?", "Why does {} matter?",
             "Write a sentence with {} in it."]  # fmt: skip
PROMPTS = [question.format(thing) for question in QUESTIONS for thing in THINGS]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The GGUF file: the user's own if it was pulled, else fetched for these tests."""
    if ModelLibrary().find("smollm2") is not None:
        yield resolve("smollm2")
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        try:
            pull("smollm2")
        except Unavailable as error:
            pytest.skip(str(error))
        yield resolve("smollm2")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_knows_a_capital(smollm2: Path, dtype: str) -> None:
    with Engine.from_pretrained("smollm2", cache=None, dtype=dtype, pool_bytes="128MiB") as engine:
        question = [{"role": "user", "content": "What is the capital of Germany?"}]
        answer = engine.generate(question, max_tokens=20)  # sampled as the model says: greedily
    assert answer.text == "The capital of Germany is Berlin."
    assert answer.finish_reason == "stop"


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_shipped_verdict_is_found(dtype: str) -> None:
    assert shipped_verdict(load("smollm2", dtype=dtype).descriptor(16)) is not None


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_greedy_answers_are_those_of_transformers_with_the_same_file(smollm2: Path) -> None:
    with Engine.from_pretrained("smollm2", cache=None, dtype="float32", pool_bytes="512MiB") as engine:
        tokenizer = engine._runtime.engine.loaded.tokenizer
        prompts = [_asked(tokenizer, question) for question in PROMPTS]
        answers = [r.token_ids for r in engine.generate_batch(prompts, max_tokens=24, temperature=0)]
    theirs = _transformers(smollm2)
    for prompt, answer in zip(prompts, answers, strict=True):
        # The same answer, token by token, if each is the likeliest behind those before it.
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer
    assert len({tuple(a) for a in answers}) == len(PROMPTS)


_LLAMA_CPP = """
import json, sys
import llama_cpp as l, numpy as np
file, (prompts, texts) = sys.argv[1], json.load(sys.stdin)
model = l.llama_model_load_from_file(file.encode(), l.llama_model_default_params())
vocabulary = l.llama_model_get_vocab(model)
size, out, ids = l.llama_vocab_n_tokens(vocabulary), [], []
for text in (text.encode() for text in texts):
    found = (l.llama_token * (len(text) + 1))()
    ids.append(found[: l.llama_tokenize(vocabulary, text, len(text), found, len(found), True, True)])
for prompt in prompts:
    context = l.llama_init_from_model(model, l.llama_context_default_params())
    tokens = (l.llama_token * len(prompt))(*prompt)  # the batch points to it
    assert l.llama_decode(context, l.llama_batch_get_one(tokens, len(prompt))) == 0
    out.append(np.ctypeslib.as_array(l.llama_get_logits_ith(context, -1), (size,)).copy())
    l.llama_free(context)
np.save(sys.argv[2], np.stack(out))
print(json.dumps(ids))
"""
# Texts that other pre-tokenizers split otherwise.
TEXTS = [
    "Steps:\n\n1. Mix\n2. Bake", "    3", "x = 12345; y=  42", "a\r\nb\r\n\r\n 7", "\tdef f(x):\n\t\treturn x1+2",
    "   \n 7", "½ ² Ⅷ ٣٤ 一二三 十", "日本語 12月3日", "한국어 3개", "don’t I've they'RE",
    "\u00a0nbsp\u3000x", "<|im_start|>user\n 5<|im_end|>",
]  # fmt: skip


def test_tokens_and_distributions_are_those_of_llama_cpp_with_the_same_file(smollm2: Path, tmp_path: Path) -> None:
    """Distributions as far as llama.cpp's go, which rounds a product's inputs to 8 bits where its weights have few."""
    try:
        environment = find("llama_cpp")
    except EngineNotInstalled as error:
        pytest.skip(str(error))
    theirs = _transformers(smollm2)
    with Engine.from_pretrained("smollm2", cache=None, dtype="float32", pool_bytes="128MiB") as engine:
        tokenizer = engine._runtime.engine.loaded.tokenizer
        prompts = [_asked(tokenizer, question) for question in PROMPTS[::2]]
        ours = [r.token_ids[0] for r in engine.generate_batch(prompts, max_tokens=1, temperature=0)]
    file = tmp_path / "logits.npy"
    command = [str(environment.python), "-c", _LLAMA_CPP, str(smollm2), str(file)]
    done = subprocess.run(
        command,
        input=json.dumps([prompts, TEXTS]),
        text=True,
        env=environment.variables(),
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    for text, ids in zip(TEXTS, json.loads(done.stdout), strict=True):
        assert tokenizer.encode(text) == ids, text
    logits = torch.from_numpy(np.load(file)).log_softmax(-1)
    with torch.inference_mode():
        exact = torch.stack([theirs(torch.tensor([p])).logits[0, -1] for p in prompts]).log_softmax(-1)
    divergence = (exact.exp() * (exact - logits)).sum(-1)
    assert divergence.mean() < 0.01
    assert (logits.argmax(-1) == torch.tensor(ours)).float().mean() > 0.9


def _asked(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    chat = [{"role": "user", "content": question}]
    found: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return found


def _transformers(file: Path) -> AutoModelForCausalLM:
    """The model as transformers' own reader has it, in float32."""
    config = config_of(read_gguf(file))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.tie_weights()
    return model
