"""Fixture for the tests of LoRA: the files of streamed models go to a temporary folder."""

from tests.inference_svc.models.layer_streaming.conftest import home

__all__ = ["home"]
