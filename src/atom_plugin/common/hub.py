"""The folder of a model that is given by a name on Hugging Face's hub, and which of its files are read.

Frameworks download the files after the model is built. Before that we can check only what is on this machine: all files
if downloads are off (``HF_HUB_OFFLINE``), else the file names and the index.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

from atom_core.checkpoint import INDEX, WEIGHT_FILES, choose_files, read_index
from atom_plugin.common.load_formats import UNCHECKED_FORMATS

#: The base class of the HTTP library of huggingface_hub, which depends on the version.
_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
#: The hub does not have the model, or cannot be reached. Frameworks then use local files, or raise their own error.
_HUB_ERRORS = (HFValidationError, _HTTP_ERROR, OSError)


def cached_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """A folder itself, or a name's folder in Hugging Face's cache, which may be incomplete; None if there is none.

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
    except (EntryNotFoundError, *_HUB_ERRORS):
        return None


def whole_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The same if no files will be downloaded later, so that all are here; else None."""
    if not Path(model).is_dir() and not constants.HF_HUB_OFFLINE:
        return None
    return cached_folder(model, revision, cache)


def folder_to_check(model: str, revision: str | None, cache: str | None, load_format: str) -> Path | None:
    """The folder of a model to check before it is built; None if it is incomplete. The file names are checked here.

    Args:
        model, revision, cache: see :func:`cached_folder`.
        load_format: the framework's load format; with one of :data:`UNCHECKED_FORMATS` nothing is checked.

    Raises:
        ValueError: see :func:`check_names`.
    """
    if load_format in UNCHECKED_FORMATS:
        return None
    check_names(model, revision, cache)
    return whole_folder(model, revision, cache)


def check_names(model: str, revision: str | None = None, cache: str | None = None) -> None:
    """Check the names of a model's files on the hub, if they are not downloaded yet.

    Raises:
        ValueError: Transformers and the frameworks would read different files; see :func:`choose_files`.
    """
    if Path(model).is_dir() or constants.HF_HUB_OFFLINE:
        return
    try:
        names = huggingface_hub.list_repo_files(model, revision=revision)
    except _HUB_ERRORS:
        return
    found = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    choose_files(model, found, _indexed(model, revision, cache) if INDEX in names else None)


def patterns(model: str, revision: str | None = None, cache: str | None = None) -> list[str] | None:
    """The frameworks' ``allow_patterns_overrides`` for a model; None to read the files that the index names."""
    return None if _indexed(model, revision, cache) is not None else list(WEIGHT_FILES)


def _indexed(model: str, revision: str | None, cache: str | None) -> set[str] | None:
    """The files that a model's index names; None if it has no index."""
    index = Path(model) / INDEX
    if not Path(model).is_dir():
        try:
            index = Path(huggingface_hub.hf_hub_download(model, INDEX, revision=revision, cache_dir=cache))
        except (EntryNotFoundError, *_HUB_ERRORS):
            return None
    return read_index(index) if index.is_file() else None
