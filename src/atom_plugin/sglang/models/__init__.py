"""The package for ``SGLANG_EXTERNAL_MODEL_PACKAGE``: SGLang imports its modules and reads their ``EntryClass``."""
