"""Directory of the weights that an engine has loaded."""

from __future__ import annotations

from pathlib import Path

from kvsidecar.errors import ConfigurationError


def weights_dir_of(model: str, cache: str | None = None, revision: str | None = None) -> Path:
    """Return the folder of a model's files; ``model`` is this folder or a repository on Hugging Face's hub.

    Raises ConfigurationError for a repository that is not in the hub's local cache.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise ConfigurationError(
            f"cannot tell what the weights of {model} are: no folder and no repository in the local cache"
        )
    return Path(found).parent
