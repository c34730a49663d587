"""The SGLang adapter; not written yet."""
