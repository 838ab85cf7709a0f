"""Parts of `tools/convert_checkpoint.py`."""
