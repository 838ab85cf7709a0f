"""Steps of `tools/prepare_data.py`: from published data to distinct prompts and a report."""
