"""Finds a pretrained model by its directory, or by its hub name in the local Hugging Face cache.

Only `download` uses the network.
"""

import os
from pathlib import Path

from common.errors import UserError, check, reason_of
from common.storage.addresses import shown

FILES = ("*.safetensors", "*.json", "*.txt", "tokenizer.model")
"""Patterns of the files that `download` downloads. Pickles and subdirectories are not downloaded."""


def locate(name: Path, option: str = "--config.pretrained", advice: str = "") -> Path:
    """Returns the directory of a model.

    Args:
      name: a directory, or a name on the Hugging Face hub such as "org/model" or "org/model@revision". A directory
        takes precedence.
      option: command-line option that has the value `name`, for error messages.
      advice: text after "is not a readable directory" in the error message; "" for the default text.

    Raises:
      UserError: `name` is not a readable directory, and the local cache has no model of this name.
    """
    directory = Path(os.path.expanduser(name))
    if os.access(directory, os.X_OK) and directory.is_dir():
        return directory
    missing = f"{option}={shown(directory)} is not a readable directory"
    check(
        not directory.is_absolute() and _is_name(str(name)),
        missing + (advice or ": give the directory of a model in Hugging Face format"),
    )
    found = cached(str(name))
    if found is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        raise UserError(
            f"{missing}{advice}; the Hugging Face cache in {HF_HUB_CACHE} has no model of this name: download"
            " the model with --download of perception.train or perception.worth, or give the directory of a model"
        )
    return found


def _is_name(name: str) -> bool:
    """Returns whether a model on the hub can have this name, such as "org/model@revision"."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name.partition("@")[0])
    except HFValidationError:
        return False
    return True


def cached(name: str) -> Path | None:
    """Returns the directory of a hub model in the local cache (HF_HUB_CACHE, HF_HOME); None if the cache lacks it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    model, _, revision = name.partition("@")
    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision or None)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def download(name: str) -> Path:
    """Downloads configuration, weights and tokenizer of a hub model to the local cache. Returns their directory.

    If the hub cannot be used, returns the snapshot in the cache, which may be incomplete.

    Raises:
      UserError: the download fails and the cache has no snapshot of the model, or the cache is not writable.
    """
    from huggingface_hub import snapshot_download

    model, _, revision = name.partition("@")
    try:
        found = snapshot_download(
            model, revision=revision or None, allow_patterns=list(FILES), ignore_patterns=["*/*"]
        )
    # huggingface_hub, its HTTP library and the operating system raise different types of exceptions.
    except Exception as error:
        raise UserError(
            f"--download cannot fetch {name}: {reason_of(error)}; check the name, your access to the model, the"
            " network, and the space and permissions of the Hugging Face cache"
        ) from error
    return Path(found)
