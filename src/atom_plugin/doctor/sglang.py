"""Checks that SGLang is asked for our models, and of SGLang's variables that exclude our plug-in.

They follow `sglang/srt/models/registry.py`, which loads the modules of the package SGLANG_EXTERNAL_MODEL_PACKAGE except
those in SGLANG_DISABLED_MODEL_ARCHS, and `sglang/srt/plugins/__init__.py`, in which SGLANG_PLUGINS, if not empty,
filters entry points by name.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable, Mapping

from atom_plugin.common.settings import readable_settings
from atom_plugin.doctor.finding import Finding
from atom_plugin.doctor.framework import PLUGIN_NAME, SGLANG
from atom_plugin.sglang import BACKEND, MODEL_PACKAGE, PACKAGE_VARIABLE, ROCM_BACKEND, models
from atom_plugin.sglang.kernels import check_order

_REMEDY = f"Set {PACKAGE_VARIABLE}={MODEL_PACKAGE}."


def check_asked_for(environ: Mapping[str, str]) -> Iterable[Finding]:
    """The variable that asks for our models is not set, or misspelt. `check_sglang_variables` checks its value."""
    if not environ.get(PACKAGE_VARIABLE):
        others = environ.keys() - {PACKAGE_VARIABLE}
        nearest = difflib.get_close_matches(PACKAGE_VARIABLE, others, n=1, cutoff=0.9)
        instead = f"; {nearest[0]} is" if nearest else ""
        yield Finding(
            f"{PACKAGE_VARIABLE} is set neither in the environment nor in the command{instead}.",
            "SGLang silently runs its own model.",
            f"Put {PACKAGE_VARIABLE}={MODEL_PACKAGE} before the command.",
        )


def check_sglang_variables(environ: Mapping[str, str]) -> Iterable[Finding]:
    """Another package, and variables that exclude our entry point or our models."""
    package = environ.get(PACKAGE_VARIABLE)
    if package and package != MODEL_PACKAGE:
        yield Finding(
            f"{PACKAGE_VARIABLE}={package!r} is not the package with our models.", _other_package(package), _REMEDY
        )

    allowed = _names(environ, "SGLANG_PLUGINS")
    if environ.get("SGLANG_PLUGINS") and PLUGIN_NAME not in allowed:
        yield Finding(
            f"SGLANG_PLUGINS={environ['SGLANG_PLUGINS']!r} leaves out {PLUGIN_NAME!r}: SGLang runs only the entry "
            "points named there.",
            SGLANG.left_out,
            f"Add it (SGLANG_PLUGINS={','.join([*allowed, PLUGIN_NAME])}), or unset SGLANG_PLUGINS.",
        )

    disabled = _names(environ, "SGLANG_DISABLED_MODEL_ARCHS")
    for module in pkgutil.iter_modules(models.__path__):
        if module.name in disabled:
            yield Finding(
                f"SGLANG_DISABLED_MODEL_ARCHS={environ['SGLANG_DISABLED_MODEL_ARCHS']!r} names {module.name!r}, which "
                "is also a module with our models.",
                f"SGLang skips {MODEL_PACKAGE}.{module.name}, so we refuse to start.",
                f"Remove {module.name} from SGLANG_DISABLED_MODEL_ARCHS, or unset it.",
            )


def check_attention_backends(flags: Mapping[str, str]) -> Iterable[Finding]:
    """Only one of prefill and decode runs on our attention backend."""
    both = flags.get("--attention-backend")
    prefill = flags.get("--prefill-attention-backend") or both
    decode = flags.get("--decode-attention-backend") or both
    if prefill != decode and not {prefill, decode}.isdisjoint((BACKEND, ROCM_BACKEND)):
        yield Finding(
            f"Prefill runs on the attention backend {prefill or '(not named)'}, decode on {decode or '(not named)'}.",
            SGLANG.refused
            if prefill and decode
            else "SGLang picks its own backend for the other phase, and our model loses its fused step.",
            f"Leave out all three flags, which means {BACKEND}, or give only --attention-backend.",
        )


def check_cache_order(environ: Mapping[str, str]) -> Iterable[Finding]:
    """A cache in aiter's shuffled layout, which SGLang's pools do not support."""
    try:
        check_order(readable_settings(environ))
    except ValueError as error:
        yield Finding.of(str(error), SGLANG.refused, f"Leave it out, or {SGLANG.otherwise}.")


def _names(environ: Mapping[str, str], variable: str) -> list[str]:
    """The names in a comma-separated list, stripped as SGLang does."""
    return [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]


def _other_package(package: str) -> str:
    """What SGLang does with another `package`."""
    if not all(name.isidentifier() for name in package.split(".")):
        return "SGLang cannot import it and stops with an error."
    if package.partition(".")[0] == MODEL_PACKAGE.partition(".")[0]:
        return "We refuse to start; if our entry point does not run, SGLang silently runs its own model."
    return "SGLang loads its models from that package, or stops with an error if there is none; none of them is ours."
