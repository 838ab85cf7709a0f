"""What `tools/prepare_data.py` does: published data to different prompts, counted and told of in a
report that a run keeps."""
