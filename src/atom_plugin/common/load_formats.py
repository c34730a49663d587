"""Values of ``--load-format`` that both frameworks have, and that need a case of their own."""

from __future__ import annotations

#: A rank's weights by the model's own names (:mod:`atom_plugin.common.shards`).
SHARDED_STATE = "sharded_state"
#: Load formats without a checkpoint to compare with the model before it is built.
UNCHECKED_FORMATS = ("dummy", SHARDED_STATE)
