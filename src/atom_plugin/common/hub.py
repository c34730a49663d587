"""The folder of a model that is given by a name on Hugging Face's hub, and which of its files are read.

Frameworks download a name's files once the model is built. What is looked at before is what is here by then: all of it
where nothing may be fetched (``HF_HUB_OFFLINE``), else the names of the files and their index.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from atom_core.checkpoint import INDEX, WEIGHT_FILES, choose_files, read_index

#: A value of ``--load-format``: a rank's weights by the model's own names (:mod:`atom_plugin.common.shards`).
SHARDED_STATE = "sharded_state"
#: Those with which no checkpoint is there to be compared with the model before it is built.
UNCHECKED_FORMATS = ("dummy", SHARDED_STATE)

#: Of the HTTP library that huggingface_hub brings, which versions call differently.
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
#: The hub has no such model, or cannot be asked; frameworks go by what they have, or say it themselves.
_NOT_TOLD = (HFValidationError, _HTTP_ERROR, OSError)


def cached_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """A folder itself, or what Hugging Face's cache has of a name, which may be a part; None: nothing.

    Args:
        model: the folder or the name.
        revision: a branch, tag or commit; None: the main branch.
        cache: the cache's folder; None: Hugging Face's own.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except (EntryNotFoundError, *_NOT_TOLD):
        return None


def whole_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The same where all files that will be read are there by now, if they ever are; else None."""
    if not Path(model).is_dir() and not constants.HF_HUB_OFFLINE:
        return None
    return cached_folder(model, revision, cache)


def folder_to_check(model: str, revision: str | None, cache: str | None, load_format: str) -> Path | None:
    """What can be looked at of a model before it is built: the names of its files, and its whole folder, if it is here.

    Args:
        model, revision, cache: see :func:`cached_folder`.
        load_format: the framework's name of it; with one of :data:`UNCHECKED_FORMATS` there is nothing to look at.

    Raises:
        ValueError: see :func:`check_names`.
    """
    if load_format in UNCHECKED_FORMATS:
        return None
    check_names(model, revision, cache)
    return whole_folder(model, revision, cache)


def check_names(model: str, revision: str | None = None, cache: str | None = None) -> None:
    """Look at the names of a model's files on the hub, where they are still to be fetched.

    Raises:
        ValueError: Transformers and the frameworks would read different ones; see :func:`choose_files`.
    """
    if Path(model).is_dir() or constants.HF_HUB_OFFLINE:
        return
    try:
        names = huggingface_hub.list_repo_files(model, revision=revision)
    except _NOT_TOLD:
        return
    found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    choose_files(model, found, _indexed(model, revision, cache) if INDEX in names else None)


def patterns(model: str, revision: str | None = None, cache: str | None = None) -> list[str] | None:
    """What frameworks are told to read of a model, their ``allow_patterns_overrides``; None: what the index names."""
    return None if _indexed(model, revision, cache) is not None else list(WEIGHT_FILES)


def _indexed(model: str, revision: str | None, cache: str | None) -> set[str] | None:
    """The files that a model's index names; None: it has none."""
    index = Path(model) / INDEX
    if not Path(model).is_dir():
        try:
            index = Path(huggingface_hub.hf_hub_download(model, INDEX, revision=revision, cache_dir=cache))
        except (EntryNotFoundError, *_NOT_TOLD):
            return None
    return read_index(index) if index.is_file() else None
