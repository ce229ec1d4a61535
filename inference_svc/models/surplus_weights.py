"""Finds a checkpoint's weights that its model has no place for.

Without them the model computes something else, such as queries without a bias.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvsidecar.errors import ModelUnsupported

# Layers from the model's number of layers on are for training or speculation. Other tensors, such as the frequencies of
# rotary positions, follow from config.json.
_LAYER_WEIGHT = re.compile(r"model\.layers\.(\d+)\..*\.(?:weight|bias)")


def check_surplus(folder: Path, model: Any, names: Iterable[str]) -> None:
    """Raise ModelUnsupported if ``names`` has a weight or bias of a layer that ``model`` has no place for."""
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    for name in sorted({*names} - model.state_dict().keys()):
        found = _LAYER_WEIGHT.fullmatch(name)
        if found is None or int(found[1]) >= model.config.num_hidden_layers:
            continue
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ModelUnsupported(
                f"{folder} has {name}, which its model ({type(model).__name__} by config.json) has no place for; "
                "use a config.json that describes these weights"
            )
