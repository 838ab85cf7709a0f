"""Keys of a model's tensors in Megatron's checkpoints.

A key is the name of a parameter in Megatron-core, with these differences:
- `decoder.layers.mlp.linear_fc2.weight` is all layers, stacked along a first axis. Models with
  different layers have a key for each layer instead, `decoder.layers.3.mlp.linear_fc2.weight`.
- `mlp.experts.experts.linear_fc2.weight` is all experts, stacked along the next axis. Rarely there
  is a key for each expert, `mlp.experts.experts.7.linear_fc2.weight`, and the halves of gate and up
  have separate keys, which end in `_w` and `_v` (the setting singleton_local_shards).
- The parts of a gated delta net's projection and convolution have separate keys, which end in
  `.query`, `.key` and so on.
- A norm before a linear layer belongs to that layer in Transformer Engine, and in some models of
  Megatron's own layers it has that name, too (`sharded_state_dict_keys_map` of a layer's spec).
Tensors of all tensor-parallel ranks are one tensor. `CENTERED` has other values than in HF.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dapo_megatron.model import Architecture, ChunkPlace, LocalParameter, layout_of

_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Name of a norm -> its name as part of the next linear layer."""
_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""The same of latent attention."""
_DELTA_NORMS = {"input_layernorm.weight": "self_attention.in_proj.layer_norm_weight"}
"""The same of a layer with a gated delta net."""
_OWN_NORMS = {
    fused: name for norms in (_NORMS, _LATENT_NORMS, _DELTA_NORMS) for name, fused in norms.items()
}
CENTERED = "self_attention.out_norm.weight"
"""Norm of a gated delta net's output. Megatron stores its weight minus 1: it multiplies by
1 + weight, as in other norms of these models, and HF by the weight."""

_LAYER = re.compile(r"^decoder\.layers\.(?:([0-9]{1,9})\.)?(.+)$")
_STORED_EXPERT = re.compile(
    r"^mlp\.experts\.experts\.(?:([0-9]{1,9})\.)?(linear_fc[12]\.weight.*)$"
)
_LOCAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.([0-9]+)\.(.+)$")
_PART = re.compile(
    r"^(.+\.linear_fc1\.weight)_([wv])$"
    r"|^(.+\.(?:in_proj|conv1d)\.weight)\.(query|key|value|z|beta|alpha)$"
)
_PARTS = ("w", "v"), ("query", "key", "value", "z", "beta", "alpha")
_WITHOUT_STATE = (
    *("embedding.word_embeddings", "output_layer", "mlp.router"),
    *("mlp.shared_experts", "self_attention", "self_attention.conv1d"),
)


@dataclass(frozen=True, slots=True)
class Name:
    """A parsed key or name of a parameter. `rest` is the name in its layer, without the expert, or
    the whole name outside of layers. Layer and expert are None if there is none, or if the key
    stacks them: then `stacks_layers` or `stacks_experts`. `part` is the number of the parameter's
    part that the key holds, if it holds only one."""

    rest: str
    layer: int | None = None
    expert: int | None = None
    stacks_layers: bool = False
    stacks_experts: bool = False
    part: int | None = None

    @property
    def num_leading(self) -> int:
        """Number of axes before the parameter's own."""
        return self.stacks_layers + self.stacks_experts

    def entry(self, index: tuple[int, ...]) -> Name:
        """Return the name of one entry of the stacked axes."""
        numbers = iter(index)
        layer = next(numbers) if self.stacks_layers else self.layer
        expert = next(numbers) if self.stacks_experts else self.expert
        return Name(self.rest, layer, expert)

    @property
    def local(self) -> str:
        """Name of the parameter in `layout_of` of a whole model."""
        rest = self.rest
        if self.expert is not None:
            rest = f"mlp.experts.local_experts.{self.expert}.{rest}"
        return rest if self.layer is None else f"decoder.layers.{self.layer}.{rest}"

    @property
    def key(self) -> str:
        """The key."""
        rest = self.rest
        if self.stacks_experts:
            rest = f"mlp.experts.experts.{rest}"
        if self.stacks_layers:
            return f"decoder.layers.{rest}"
        return rest if self.layer is None else f"decoder.layers.{self.layer}.{rest}"


def parse_key(key: str) -> Name:
    """Parse a key of a checkpoint."""
    part = None
    if match := _PART.match(key):
        halves, segments = _PARTS
        key = match[1] or match[3]
        part = halves.index(match[2]) if match[2] else segments.index(match[4])
    match = _LAYER.match(key)
    if match is None:
        return Name(key)
    layer, rest = match[1], match[2]
    name = Name(
        _OWN_NORMS.get(rest, rest),
        layer=None if layer is None else int(layer),
        stacks_layers=layer is None,
        part=part,
    )
    if expert := _STORED_EXPERT.match(rest):
        number = None if expert[1] is None else int(expert[1])
        return replace(name, rest=expert[2], expert=number, stacks_experts=number is None)
    return name


def parameters_of(arch: Architecture) -> dict[str, LocalParameter]:
    """Return the parameters of the whole model by their names in Megatron's own layers."""
    return layout_of(arch, ChunkPlace(0, 1, 0, arch.num_layers, True, True))


def stacks_layers(arch: Architecture) -> bool:
    """Return whether to write the layers of a model stacked.

    Megatron stacks the layers of dense models, unless some have gated delta nets. With experts, it
    depends on how its configuration states which layers have them. It reads layers that are not
    stacked in both cases, because according to `common.pt` they are not.
    """
    return not (arch.num_experts or arch.delta)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """Position of a parameter in a checkpoint: a key, and an index in its stacked axes of these
    sizes."""

    name: Name
    index: tuple[int, ...]
    sizes: tuple[int, ...]


def key_entry(local: str, arch: Architecture) -> KeyEntry:
    """Return where the parameter with this name in Megatron's own layers is written."""
    match = _LAYER.match(local)
    if match is None:
        return KeyEntry(Name(local), (), ())
    layer, rest = int(match[1]), match[2]
    stacked = stacks_layers(arch)
    name = Name(rest, layer=None if stacked else layer, stacks_layers=stacked)
    index, sizes = ((layer,), (arch.num_layers,)) if stacked else ((), ())
    if expert := _LOCAL_EXPERT.match(rest):
        name = replace(name, rest=expert[2], stacks_experts=True)
        index, sizes = (*index, int(expert[1])), (*sizes, arch.num_experts)
    return KeyEntry(name, index, sizes)


def keys_of(name: Name, arch: Architecture) -> list[str]:
    """Return all keys under which Megatron's layers look for a tensor."""
    norms = _NORMS | (_LATENT_NORMS if arch.latent else {})
    if name.layer is not None and arch.has_delta(name.layer):
        norms = norms | _DELTA_NORMS
    fused = norms.get(name.rest)
    return [name.key, *([replace(name, rest=fused).key] if fused else [])]


def part_keys(name: Name) -> list[str]:
    """Return the keys of the parts of a gated delta net's projection or convolution. Other
    parameters are stored whole."""
    has_parts = name.rest.endswith((".in_proj.weight", ".conv1d.weight"))
    return [f"{name.key}.{part}" for part in _PARTS[1]] if has_parts else []


def state_keys(arch: Architecture) -> Iterator[str]:
    """Yield the keys of the modules' extra states, which Megatron asks for. They hold nothing:
    Transformer Engine has some in FP8 only."""
    names = [key_entry(local, arch) for local in parameters_of(arch)]
    attention = "self_attention.core_attention.weight"
    names += [
        key_entry(f"decoder.layers.{layer}.{attention}", arch) for layer in arch.attention_layers
    ]
    for entry in names:
        module = entry.name.rest.rpartition(".")[0]
        if module not in _WITHOUT_STATE:
            key = replace(entry.name, rest=f"{module}._extra_state").key
            index, sizes = entry.index or (0,), entry.sizes or (1,)
            numbers = ["shard", ".".join(map(str, index)), ".".join(map(str, sizes))]
            yield f"{key}/{'_'.join(numbers)}"
