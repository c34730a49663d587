"""A typed schema of ``quantization_config`` for each method, checked before a reader interprets the values.

Nested objects may have other keys; :mod:`atom_core.quant.keys` checks those of the top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

_LENIENT = ConfigDict(extra="allow", strict=True, frozen=True)


class Fp8Keys(BaseModel):
    """Of ``quant_method`` "fp8"."""

    model_config = _LENIENT

    activation_scheme: str = "dynamic"
    weight_block_size: list[int] | None = None
    ignored_layers: list[str] | None = None
    modules_to_not_convert: list[str] | None = None


class CompressedTensor(BaseModel):
    """The format of the weights or activations of a compressed-tensors group."""

    model_config = _LENIENT

    num_bits: int | None = None
    type: str | None = None
    strategy: str | None = None
    symmetric: bool = True
    dynamic: bool | str = False
    group_size: int | None = None
    block_structure: list[int] | str | None = None


class CompressedGroup(BaseModel):
    """A scheme and its modules."""

    model_config = _LENIENT

    targets: list[str] | None = None
    weights: CompressedTensor | None = None
    input_activations: CompressedTensor | None = None


class Sparsity(BaseModel):
    """The sparse format of weights."""

    model_config = _LENIENT

    format: str = "dense"


class CompressedKeys(BaseModel):
    """Of ``quant_method`` "compressed-tensors"."""

    model_config = _LENIENT

    config_groups: dict[str, CompressedGroup] | None = None
    ignore: list[str] | None = None
    sparsity_config: Sparsity | None = None
    transform_config: dict[str, Any] | None = None


class ModeloptInner(BaseModel):
    """The keys that older modelopt files nest one level deeper."""

    model_config = _LENIENT

    quant_algo: str | None = None
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None


class ModeloptKeys(ModeloptInner):
    """Of ``quant_method`` "modelopt"."""

    quantization: ModeloptInner | None = None


class Mxfp4Keys(BaseModel):
    """Of ``quant_method`` "mxfp4"."""

    model_config = _LENIENT

    modules_to_not_convert: list[str] | None = None


class QuarkTensor(BaseModel):
    """The format of a layer's weight or input."""

    model_config = _LENIENT

    dtype: str | None = None
    qscheme: str | None = None
    symmetric: bool | None = None
    is_dynamic: bool | None = None
    group_size: int | None = None
    block_size: list[int] | None = None
    scale_type: str | None = None
    scale_format: str | None = None
    scale_calculation_mode: str | None = None


class QuarkLayer(BaseModel):
    """A layer's scheme; a list means quantised twice."""

    model_config = _LENIENT

    weight: QuarkTensor | list[QuarkTensor] | None = None
    input_tensors: QuarkTensor | list[QuarkTensor] | None = None


class QuarkKeys(BaseModel):
    """Of ``quant_method`` "quark"."""

    model_config = _LENIENT

    global_quant_config: QuarkLayer | None = None
    layer_quant_config: dict[str, QuarkLayer | None] | None = None
    layer_type_quant_config: dict[str, Any] | None = None
    exclude: list[str] | None = None


SCHEMAS: Mapping[str, type[BaseModel]] = {
    "fp8": Fp8Keys,
    "compressed-tensors": CompressedKeys,
    "modelopt": ModeloptKeys,
    "mxfp4": Mxfp4Keys,
    "quark": QuarkKeys,
}
#: Readable names of pydantic's error types.
_TYPE_NAMES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}


def check_types(method: str, config: Mapping[str, Any]) -> None:
    """Check ``config`` against the schema of ``method``.

    Raises:
        ValueError: one line with the first wrong key, its value and what is needed.
    """
    try:
        SCHEMAS[method].model_validate(dict(config))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        value, path = errors[0]["input"], _path(config, errors[0]["loc"])
        # A key with several allowed types has one error for each.
        needed = dict.fromkeys(_TYPE_NAMES.get(it["type"], it["msg"]) for it in errors if it["input"] is value)
        raise ValueError(
            f"The model's config has quantization_config.{path}={repr(value)[:80]}; {' or '.join(needed)} is needed."
        ) from None


def _path(config: Any, location: tuple[int | str, ...]) -> str:
    """The keys of a pydantic location, without the types that it contains."""
    path, place = "", config
    for step in location:
        if isinstance(place, Mapping) and step in place:
            path, place = f"{path}.{step}" if path else str(step), place[step]
        elif isinstance(place, (list, tuple)) and isinstance(step, int) and step < len(place):
            path, place = f"{path}[{step}]", place[step]
    return path
