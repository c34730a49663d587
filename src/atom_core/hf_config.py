"""``config.json`` as a typed schema: the keys that a family reads, with their types and bounds.

A family states its keys as a subclass of :class:`HfConfig`, with the defaults of Transformers' class of that name. All
other keys are harmless, neutral, refused, or named in one warning; see :mod:`atom_core.hf_keys`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atom_core.hf_keys import check_other_keys

#: Bounds far above any model's, so that a wrong value cannot exhaust the memory.
Size = Annotated[int, Field(gt=0, le=2**24)]
Layers = Annotated[int, Field(gt=0, le=1024)]
Experts = Annotated[int, Field(gt=0, le=4096)]
DraftLayers = Annotated[int, Field(ge=0, le=64)]
Index = Annotated[int, Field(ge=0, le=2**16)]
Tokens = Annotated[int, Field(gt=0, le=2**31)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

HfConfigT = TypeVar("HfConfigT", bound="HfConfig")
SchemaT = TypeVar("SchemaT", bound=BaseModel)


class RopeKeys(BaseModel):
    """The keys inside ``rope_parameters`` or ``rope_scaling``; null means not given."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    rope_type: str | None = None
    type: str | None = None
    """The older name of ``rope_type``."""
    rope_theta: Positive | None = None
    partial_rotary_factor: Number | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Annotated[float, Field(gt=0, le=2**31)] | None = None
    attention_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    beta_fast: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    beta_slow: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    truncate: bool | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    short_factor: Sequence[Positive] | None = None
    long_factor: Sequence[Positive] | None = None


class MropeKeys(RopeKeys):
    """Rope with three axes (M-RoPE, arXiv 2409.12191), which agree for text: the keys that split a head over axes."""

    mrope_section: Sequence[Index] | None = None
    mrope_interleaved: bool | None = None


class HfConfig(BaseModel):
    """The keys that all decoder families read. A subclass adds its own keys and overrides defaults."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, protected_namespaces=())

    #: Values of ``model_type`` whose Transformers class computes the same as this family.
    model_types: ClassVar[tuple[str, ...]] = ()
    #: Keys for which this family supports only these values, whatever other families support.
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    #: The rope base of a configuration without one (Transformers' ``default_theta``).
    default_theta: ClassVar[float] = 10000.0
    #: The default ``partial_rotary_factor``; None: whole heads are rotated, and the key may not change it.
    default_partial: ClassVar[float | None] = None
    #: The keys of its rope.
    rope_schema: ClassVar[type[RopeKeys]] = RopeKeys

    architectures: list[str]
    model_type: str | None = None
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Annotated[int, Field(gt=0, le=2**16)]
    num_key_value_heads: Annotated[int, Field(gt=0, le=2**16)] | None = None
    head_dim: Size | None = None
    max_position_embeddings: Tokens
    rms_norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: Tokens | None = None
    partial_rotary_factor: Number | None = None
    quantization_config: dict[str, Any] | None = None
    """Read by :mod:`atom_core.quant`."""
    compression_config: dict[str, Any] | None = None
    """The older name in compressed-tensors files."""

    @classmethod
    def read(cls: type[HfConfigT], source: Mapping[str, Any] | Any) -> HfConfigT:
        """Validate a parsed ``config.json``, or any object with ``to_dict()`` such as a ``PretrainedConfig``.

        Raises:
            ValueError: a value is null, out of range or of the wrong type; or the ``model_type`` or a key is not
                supported by this family.
        """
        values = as_mapping(source)
        hf = validated(cls, values)
        hf.check_model_type()
        others = hf.model_extra or {}
        for key, allowed in cls.fixed.items():
            if (value := others.get(key)) is not None and value not in allowed:
                raise ValueError(
                    f"The model's config has {key}={value!r}, which {hf.architecture} does not have; supported: "
                    f"{' or '.join(map(repr, allowed))}, or leave it out."
                )
        check_other_keys(hf.architecture, {key: value for key, value in others.items() if key not in cls.fixed})
        return hf

    @property
    def architecture(self) -> str:
        """The first entry of ``architectures``."""
        return self.architectures[0]

    @property
    def rope_keys(self) -> RopeKeys:
        """``rope_scaling``, else ``rope_parameters``; Transformers prefers the first too.

        Raises:
            ValueError: a value has the wrong type or is out of range, or each kind of layer has its own rope.
        """
        key = "rope_scaling" if self.rope_scaling else "rope_parameters"
        values = getattr(self, key) or {}
        nested = sorted(name for name, value in values.items() if isinstance(value, Mapping))
        if nested:
            raise ValueError(
                f"The model's config has a rope for each kind of layer ({key}: {', '.join(nested)}), which "
                f"{self.architecture} does not have; supported: one for all layers."
            )
        rope = validated(self.rope_schema, values, f"{key}.")
        check_other_keys(self.architecture, rope.model_extra or {}, f"{key}.")
        return rope

    def check_model_type(self) -> None:
        """Raise a ValueError unless ``model_type``, which Transformers reads, fits ``architectures``, as vLLM does."""
        if self.model_type is not None and self.model_type not in self.model_types:
            raise ValueError(
                f"The model's config has architectures=[{self.architecture!r}] and model_type={self.model_type!r}, "
                f"which are different models: Transformers reads the second, vLLM and SGLang read the first. "
                f"Supported with {self.architecture}: model_type {' or '.join(map(repr, self.model_types))}."
            )


def as_mapping(source: Mapping[str, Any] | Any) -> Mapping[str, Any]:
    """A parsed ``config.json``, or an object's ``to_dict()``."""
    return source if isinstance(source, Mapping) else source.to_dict()


def validated(schema: type[SchemaT], values: Mapping[str, Any], prefix: str = "") -> SchemaT:
    """``values`` validated by ``schema``.

    Raises:
        ValueError: one line with the first wrong key, its value and what is needed.
    """
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        raise ValueError(_one_line(schema, error, prefix)) from None


def _one_line(schema: type[BaseModel], error: ValidationError, prefix: str) -> str:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0])
    if first["type"] == "missing":
        return f"The model's config has no {prefix + key!r}, which its architecture needs."
    if len(first["loc"]) > 1 and isinstance(first["loc"][1], int):
        key = f"{key}[{first['loc'][1]}]"
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    annotation = schema.model_fields[str(first["loc"][0])].annotation
    return f"The model's config has {prefix}{key}={shown}; {_needed(annotation, first)} is needed."


def _needed(annotation: Any, error: Any) -> str:
    """A description of the values that a field takes."""
    limits = error.get("ctx") or {}
    if error["type"] == "less_than_equal":
        return f"a number of at most {limits['le']}"
    if error["type"] == "finite_number":
        return "a finite number"
    kinds = str(annotation)
    descriptions = (
        ("bool", "true or false"),
        ("int", "a positive integer" if error["type"] != "greater_than_equal" else "an integer from 0 on"),
        ("float", "a positive number" if "greater_than" in error["type"] else "a number"),
        ("dict", "an object"),
        ("str", "a text"),
    )
    in_list = "list" in kinds.lower() or "Sequence" in kinds
    found = next((text for kind, text in descriptions if kind in kinds), "another value")
    return f"a list, each {found}," if in_list else found
