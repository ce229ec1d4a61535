"""Streamed models of these tests lie in a folder of their own too."""

from tests.inference_svc.models.layer_streaming.conftest import home

__all__ = ["home"]
