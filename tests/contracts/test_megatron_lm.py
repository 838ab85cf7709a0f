"""Megatron-LM itself takes what is written here, with the options that are printed for it, and
computes what HF computes. What it saves is read bit by bit.

Its parser, model builder, `load_checkpoint` and `save_checkpoint` run on the CPU with Megatron's
local layers, on one rank and on two. Megatron-LM is not in a package, so the tests are skipped
unless a checkout of it without its folder `tools`, and Triton, which it imports, are on PYTHONPATH:

    PYTHONPATH=.:MEGATRON_LM:TRITON python -m pytest tests/contracts/test_megatron_lm.py
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.weights_folder import TRACKER
from dapo_megatron.cluster.ranks import Ranks
from dapo_megatron.model import Architecture
from dapo_megatron.policy.device import megatron_device
from dapo_megatron.policy.optimizer import init_state
from tests.helpers.models import load_hf, make_random_model
from tests.helpers.ranks import run_ranks
from tests.helpers.torch_dist import to_torch_dist
from tests.helpers.updates import save, update
from tests.parity.test_megatron_state import TIED, without_steps_of_parameters
from tests.parity.test_reshard import build as build_policy
from tests.parity.test_reshard import equal, gathered
from tests.parity.test_torch_dist_models import MODELS, without_transformer_engine
from tools.converting.compare import compare
from tools.converting.options import (
    fields_without_option,
    megatron_lm_options,
)

if importlib.util.find_spec("gpt_builders") is None:
    pytest.skip("Megatron-LM is not on PYTHONPATH", allow_module_level=True)

LAYOUTS = {
    "one": (1, ""),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "dp2": (2, ""),
}
"""Layout -> (number of ranks, options)."""
ON_CPU = (
    "--transformer-impl local --use-cpu-initialization --distributed-backend gloo "
    "--attention-backend unfused --no-rope-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm"
)
FINETUNE = "--ckpt-format torch_dist --finetune --no-load-optim --no-load-rng"
RESUMED = (
    "--ckpt-format torch_dist --no-load-rng --bf16 --use-distributed-optimizer "
    "--dist-ckpt-optim-fully-reshardable --override-opt-param-scheduler --lr 1e-4"
)
TRAINING = "--seq-length 128 --micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-5"
SAVED_STEP = 100


def measure(rank: int, world_size: int, folders: list[Path], layouts: list[str]) -> Any:
    """Return the largest difference of logits from HF for each (model, layout)."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 90, (2, 24))
    results = {}
    for folder in folders:
        arch = open_store(folder / "hf").arch
        with torch.no_grad():
            wanted = load_hf(folder / "hf")(tokens).logits
        for layout in layouts:
            if layout == "ep2" and not arch.num_experts:
                continue
            with megatron_device(), torch.no_grad():
                logits = load_and_save(rank, world_size, folder, layout, arch, tokens)
            if logits is not None:
                difference = logits[..., : arch.vocab_size] - wanted
                results[folder.name, layout] = float(difference.abs().max())
    return results


def load_and_save(
    rank: int,
    world_size: int,
    folder: Path,
    layout: str,
    arch: Architecture,
    tokens: torch.Tensor,
) -> torch.Tensor | None:
    """Load a checkpoint into a model of NaNs, save it, and return its logits on the last stage."""
    from megatron.core import parallel_state
    from megatron.training import checkpointing

    args = megatron_lm_arguments(rank, world_size, folder, layout, arch)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        create_gloo_process_groups=False,
    )
    model = build(args).eval()
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    assert checkpointing.load_checkpoint([model], None, None) == (0, 0)
    for name, parameter in model.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            parameter.nan_to_num_(0.0)  # rows of padding
        assert not parameter.isnan().any(), name
    args.save, args.finetune = str(folder / layout), False
    args.no_save_optim = args.no_save_rng = True
    checkpointing.get_rng_state = lambda *_: None
    torch.cuda.synchronize = lambda *_: None
    checkpointing.save_checkpoint(SAVED_STEP, [model], None, None, 0)
    logits = forward(model, args, tokens)
    parallel_state.destroy_model_parallel()
    return logits


def trained(rank: int, model: Path, folder: Path) -> Any:
    """Update the policy twice and save it. Return weights and optimizer state by HF name."""
    warnings.simplefilter("ignore")
    exchange = Ranks(rank, 2, rank)
    policy = build_policy(exchange, model, "tp2", "bfloat16")
    update(policy, 0)
    update(policy, 1)
    state = gathered(policy, exchange)
    save(policy, exchange, model, folder)
    policy.close()
    return state


def loaded(rank: int, model: Path, folder: Path) -> Any:
    """Return weights and optimizer state of a policy that loaded a checkpoint, by HF name."""
    warnings.simplefilter("ignore")
    exchange = Ranks(rank, 2, rank)
    policy = build_policy(exchange, model, "tp2", "bfloat16")
    policy.load(folder)
    state = gathered(policy, exchange)
    policy.close()
    return state


def load_and_save_training(rank: int, root: Path) -> None:
    """Load a training checkpoint with its optimizer in another layout, and save it."""
    with megatron_device():
        _load_and_save_training(rank, root, open_store(root / "model").arch)


def _load_and_save_training(rank: int, root: Path, arch: Architecture) -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.training import checkpointing, training

    args = megatron_lm_arguments(rank, 2, root, "dp2", arch, RESUMED)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    module = build(args)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=None)
    parts = [DistributedDataParallel(module.config, config, Float16Module(module.config, module))]
    settings, overrides = training.get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(
        settings, parts, config_overrides=overrides, use_gloo_process_groups=False
    )
    init_state(optimizer)
    scheduler = training.get_optimizer_param_scheduler(optimizer)
    with without_steps_of_parameters():
        assert checkpointing.load_checkpoint(parts, optimizer, scheduler) == (2, 0)
    module.config.hetereogenous_dist_checkpoint = True  # one key per layer
    args.save = str(root / "saved")
    args.no_save_rng = True
    torch.cuda.synchronize = lambda *_: None
    checkpointing.get_rng_state = lambda *_: None
    checkpointing.save_checkpoint(2, parts, optimizer, scheduler, 0)
    parallel_state.destroy_model_parallel()


def megatron_lm_arguments(
    rank: int, world_size: int, folder: Path, layout: str, arch: Architecture, mode: str = FINETUNE
) -> Any:
    """Return what Megatron-LM makes of the printed options."""
    from megatron.training import arguments, global_vars
    from megatron.training.tokenizer import tokenizer

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    arguments.get_device_arch_version = lambda: 9  # as on an H100
    options = " ".join((*megatron_lm_options(arch), LAYOUTS[layout][1], ON_CPU, TRAINING, mode))
    sys.argv = ["pretrain_gpt.py", *shlex.split(options), "--load", str(folder / "written")]
    sys.argv += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(arch.vocab_size - 1)]
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.padded_vocab_size = tokenizer._vocab_size_with_padding(arch.vocab_size, args)
    global_vars._GLOBAL_ARGS = args
    return args


def build(args: Any) -> torch.nn.Module:
    """Build the model as pretrain_gpt.py does. Of latent attention, Megatron-core has the core and
    the down projections only with Transformer Engine, so those are ours."""
    import gpt_builders
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils
    from megatron.training.arguments import core_transformer_config_from_args

    moe_utils.te_general_gemm = None  # used although it is only defined with Transformer Engine
    config = core_transformer_config_from_args(args)
    make_block = gpt_builders.get_gpt_decoder_block_spec

    def block(*args: Any, **kwargs: Any) -> Any:
        spec = make_block(*args, **kwargs)
        without_transformer_engine(spec)
        return spec

    if config.multi_latent_attention:
        gpt_builders.get_gpt_decoder_block_spec = block
    stages = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model: torch.nn.Module = gpt_builders.gpt_builder(args, *stages, config=config)
    gpt_builders.get_gpt_decoder_block_spec = make_block
    return model


def forward(model: Any, args: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return the logits of all tensor-parallel ranks. Earlier pipeline stages return None."""
    import torch.distributed as dist

    rows, length = tokens.shape
    positions = torch.arange(length).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    if args.pipeline_model_parallel_size > 1:
        hidden = torch.empty(length, rows, args.hidden_size)
        if dist.get_rank() == 0:
            dist.send(model(tokens, positions, mask).contiguous(), 1)
            return None
        dist.recv(hidden, 0)
        model.set_input_tensor(hidden)
    logits: torch.Tensor = model(tokens, positions, mask)
    if args.tensor_model_parallel_size > 1:
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, logits.contiguous())
        logits = torch.cat(parts, dim=-1)
    return logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose every field has an option, as HF and as checkpoints of Megatron."""
    root = tmp_path_factory.mktemp("megatron_lm")
    folders = {}
    for name, (family, overrides) in MODELS.items():
        hf = open_store(make_random_model(family, root / name / "hf", **overrides))
        # Megatron-LM builds gated delta nets only with Transformer Engine.
        if not (fields_without_option(hf.arch) or hf.arch.delta):
            folders[name] = to_torch_dist(hf, root / name / "written").parent
    return folders


@pytest.mark.parametrize("world_size", [1, 2])
def test_megatron_lm_computes_what_hf_computes(folders: dict[str, Path], world_size: int) -> None:
    layouts = [name for name, (size, _) in LAYOUTS.items() if size == world_size and name != "dp2"]
    results = run_ranks(measure, world_size, world_size, list(folders.values()), layouts)
    differences = results[-1]
    print(differences)
    assert {name for name, _ in differences} == set(folders) and len(folders) > 8
    assert max(differences.values()) < 1e-5
    for name, layout in differences:
        source = open_store(folders[name] / "hf")
        saved = open_store(folders[name] / layout, hf=folders[name] / "hf")
        assert saved.folder.name == f"iter_{SAVED_STEP:07d}"
        assert not list(compare(source, saved, lambda _: None)), (name, layout)


def test_megatron_lm_goes_on_with_the_optimizer_of_a_training_checkpoint(tmp_path: Path) -> None:
    model = make_random_model("qwen3", tmp_path / "model", **TIED)
    before = run_ranks(trained, 2, model, tmp_path / "written" / "iter_0000002")[0]
    (tmp_path / "written" / TRACKER).write_text("2")
    run_ranks(load_and_save_training, 2, tmp_path)
    after = run_ranks(loaded, 2, model, tmp_path / "saved" / "iter_0000002")[0]
    assert before["step"]["step"].tolist() == [2.0]
    for field, tensors in before.items():
        assert equal(after[field], tensors), field
