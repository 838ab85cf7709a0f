"""The commands of docs/conversion.md run, and its table of options is that of the program."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dapo_megatron.checkpoints.formats.open import open_model, open_store
from dapo_megatron.config.file import load_config
from dapo_megatron.model import FAMILIES, architecture
from dapo_megatron.model.families import ALIASES
from dapo_megatron.model.published import published_models
from dapo_megatron.run.build import load_prompts
from tests.helpers.checkpoints import MODELS, flip_bit, invoke
from tests.helpers.configs import REPOSITORY
from tests.helpers.torch_dist import to_torch_dist
from tools.converting.options import megatron_lm_options

PAGE = (REPOSITORY / "docs" / "conversion.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(?:\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CONVERT = "python tools/convert_checkpoint.py "


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the models that the page names: of HF, and of a training in Megatron."""
    tiny = REPOSITORY / "model_configs"
    for name, model in (("models/qwen", "tiny_qwen3"), ("models/experts", "tiny_qwen3_moe")):
        shutil.copytree(tiny / model, tmp_path / name)
    (tmp_path / "pretrain").mkdir()
    trained = to_torch_dist(open_store(tmp_path / "models" / "qwen"), tmp_path / "pretrain" / "run")
    for path in filter(Path.is_file, trained.iterdir()):
        path.unlink()  # Megatron-LM writes no config.json and no tokenizer
    (trained / "release").rename(trained / "iter_0000100")
    (trained / "latest_checkpointed_iteration.txt").write_text("100")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def block_with(text: str) -> str:
    [block] = [block for block in BLOCKS if text in block]
    return block


def commands(block: str) -> Iterator[list[str]]:
    """Yield the arguments of each command of this project's program."""
    for line in block.replace("\\\n", " ").splitlines():
        _, is_command, rest = line.partition(CONVERT)
        if is_command:
            yield shlex.split(rest)


def test_the_commands_of_the_program_run(folder: Path) -> None:
    given = {"SOURCE": "models/experts", "FOLDER": "models/experts", "A": "models/experts"}
    ran = []
    for number, words in enumerate(commands(block_with("inspect FOLDER"))):
        names = {**given, "TARGET": f"target_{number}", "B": "target_0"}
        code, output = invoke(*(names.get(word, word) for word in words))
        assert code == 0, (words, output)
        ran.append(words[0])
    assert ran == ["hf-to-megatron", "megatron-to-hf", "inspect", "verify"]


def test_the_way_from_megatron_lm_and_back(folder: Path) -> None:
    block = block_with("megatron-to-hf pretrain/run")
    assert [words[0] for words in commands(block)] == ["inspect", "megatron-to-hf"]
    for words in commands(block):
        code, output = invoke(*words)
        assert code == 0, output
    [(config, override)] = re.findall(r"dapo_megatron train (\S+) (model\.path=\S+)", block)
    # tests/learning trains with this config.
    loaded = load_config(REPOSITORY / config, [override])
    assert open_model(loaded.model).format == "hf"
    assert load_prompts(loaded, {}, {}).train
    # The last one copies files into the folder of Megatron.
    [copy] = re.findall(r"`cp (models/qwen)/\{config\.json,\*token\*\} (\S+)`", PAGE)
    for pattern in ("config.json", "*token*"):
        for path in Path(copy[0]).glob(pattern):
            shutil.copy(path, copy[1])
    assert open_store(Path(copy[1])).format == "torch_dist"


def test_the_output_of_verify_is_that_of_the_page(folder: Path) -> None:
    assert invoke("hf-to-megatron", "models/qwen", "megatron/qwen")[0] == 0
    values = open_store(Path("models/qwen")).read("model.layers.1.self_attn.o_proj.weight")
    flip_bit(folder / "megatron" / "qwen" / "release" / "__0_0.distcp", values)
    block = block_with("$ " + CONVERT + "verify")
    [words] = commands(block)
    code, output = invoke(*words)
    # Values and their place depend on the model.
    shape = [re.sub(r"[-\d.e]+", "0", " ".join(text.split())) for text in (block, output)]
    assert code == 1 and shape[0].endswith(shape[1]), output


def test_the_options_of_megatron_lm_are_those_of_the_page(folder: Path) -> None:
    assert invoke("hf-to-megatron", "models/qwen", "megatron/qwen")[0] == 0
    block = block_with("options of Megatron-LM")
    [words] = commands(block)
    code, output = invoke(*words)
    assert code == 0 and output.endswith(block.partition("...\n")[2]), output


def rows() -> dict[str, str]:
    """Return the options of each family in the table, by model_type, and those of all."""
    table = re.search(r"^\| family \| options \|\n\|---\|---\|\n(.*?)\n\n", PAGE, re.DOTALL | re.M)
    assert table is not None
    options_of = {}
    for row in table[1].splitlines():
        names, options = row.strip("|").split(" | ", 1)
        for name in re.findall(r"[a-z0-9_]+", names):
            options_of[name] = options
    for other in ("qwen3_moe", "qwen3", "glm4_moe"):
        for name, options in options_of.items():
            if f"of `{other}`" in options:
                options_of[name] += options_of[other]
    return options_of


def test_the_table_of_options_is_that_of_the_program() -> None:
    options_of = rows()
    assert options_of.keys() == {"all", *FAMILIES}
    configs = [*MODELS.values(), *(dict(model.hf) for model in published_models().values())]
    for config in configs:
        used = {word for option in megatron_lm_options(architecture(config))
                for word in option.split() if word.startswith("--")}  # fmt: skip
        family = str(config["model_type"])
        named = options_of["all"] + options_of[ALIASES.get(family, family)]
        missing = {option for option in used if not re.search(rf"{option}[ `]", named)}
        assert not missing, (family, missing)
        common = set(re.findall(r"--[a-z-]+", options_of["all"]))
        assert common - used <= {"--untie-embeddings-and-output-weights"}, family
