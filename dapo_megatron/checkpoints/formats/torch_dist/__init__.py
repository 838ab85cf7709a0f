"""Megatron-core's own checkpoints (`torch_dist`), read and written without Megatron and without
running what their pickles name.

A checkpoint is a folder `iter_0000100` or `release` with
- `.metadata`, a pickle: shape and dtype of every tensor, and which file holds which chunk of it;
- `__<rank>_<i>.distcp`: the chunks, each as `torch.save` writes it;
- `common.pt`: what is not sharded, with the arguments of Megatron-LM; newer versions put it into
  the .distcp files as the object `common_state`;
- `metadata.json`: the name of the format;
- `run_config.yaml`, only of Megatron-Bridge and of this project: the model's configuration;
- `dapo_megatron.json`, only of this project: the mark by which `--overwrite` recognizes its own.
Next to it is `latest_checkpointed_iteration.txt`, which names the newest checkpoint.
"""
