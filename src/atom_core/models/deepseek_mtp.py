"""The draft layer of DeepSeek V3 and R1 (MLA and experts, as the model's layers); see :mod:`atom_core.models.draft`."""

from __future__ import annotations

from atom_core.models.deepseek import DeepseekV3ForCausalLM
from atom_core.models.draft import DraftModel


class DeepseekV3Draft(DraftModel):
    """See the module's text."""

    @classmethod
    def family(cls) -> type[DeepseekV3ForCausalLM]:
        """See :class:`DraftModel`."""
        return DeepseekV3ForCausalLM
