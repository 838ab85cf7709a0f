"""Steps of `tools/prepare_data.py`: published data to different prompts, with a report of what was
dropped."""
