"""Convert, inspect, compare and reshard checkpoints.

It runs on the CPU, block by block, and needs neither Megatron nor vLLM:

    python tools/convert_checkpoint.py hf-to-megatron models/qwen megatron/qwen --tensor-parallel 4
    python tools/convert_checkpoint.py megatron-to-hf megatron/qwen models/qwen_again
    python tools/convert_checkpoint.py megatron-to-hf runs/x/checkpoints/step_000040 models/trained
    python tools/convert_checkpoint.py verify models/qwen models/qwen_again

A folder is written as TARGET.partial, read back, compared with its source bit by bit, and only then
renamed. The next command removes what a killed one left behind. More in docs/conversion.md.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from math import log2
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from dapo_megatron.checkpoints.formats.compare import (
    Difference,
    compare,
    compare_replicas,
    replica_bytes,
)
from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.megatron import MegatronLayout, MegatronWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import Store, StoreWriter, describe, fill
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.weights_folder import publish
from dapo_megatron.cluster.processes import resident_bytes
from dapo_megatron.config import PolicyConfig, refuse
from dapo_megatron.model import Architecture
from dapo_megatron.plan.layout import policy_problems, stage_layers
from dapo_megatron.types import CheckpointError, DapoError, torch_dtype

GIB = 2**30
NUM_SHOWN = 10
"""How many differences are printed. The JSON file has all of them."""
MAX_SIZE = 64
"""Largest parallel size that is proposed."""
MakeWriter = Callable[[Path, Mapping[str, TensorInfo]], StoreWriter]
Advance = Callable[[int], object]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Convert, inspect, compare and reshard checkpoints.",
)


class Dtype(StrEnum):
    """Data types that weights can be converted to."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


Source = Annotated[Path, typer.Argument(help="Folder to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)]
TensorSize = Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")]
PipelineSize = Annotated[int, typer.Option(min=1, help="Stages that share the layers.")]
ExpertSize = Annotated[int, typer.Option(min=1, help="Ranks that share a layer's experts.")]
EndLayers = Annotated[
    int | None,
    typer.Option(min=1, help="Layers of that stage. The other stages share the rest equally."),
]
AsDtype = Annotated[
    Dtype | None, typer.Option(help="Convert weights to this type. By default they keep theirs.")
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace the whole folder TARGET, if it holds a model."),
]
Check = Annotated[
    bool,
    typer.Option(help="Compare copies of a tensor in SOURCE; read TARGET back and compare it."),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="Unknown field of config.json to ignore."),
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the results here.")]


# ------------------------------------------------------------------------------- commands


@app.command("hf-to-megatron", help="Convert any folder with a model to a Megatron folder.")
@app.command("reshard", help="The same command, named for folders that already have a layout.")
def to_megatron(
    source: Source,
    target: Target,
    tensor_parallel: TensorSize = 1,
    pipeline_parallel: PipelineSize = 1,
    expert_parallel: ExpertSize = 1,
    first_stage_layers: EndLayers = None,
    last_stage_layers: EndLayers = None,
    dtype: AsDtype = None,
    overwrite: Overwrite = False,
    check: Check = True,
    ignore: Ignore = None,
    json_file: JsonPath = None,
) -> None:
    """Write a Megatron folder. The format of SOURCE is read from its files."""
    with report_errors(json_file) as results:
        store = open_store(source, ignore or ())
        sizes = (tensor_parallel, pipeline_parallel, expert_parallel)
        layout = make_layout(store.arch, sizes, (first_stage_layers, last_stage_layers))

        def writer(folder: Path, tensors: Mapping[str, TensorInfo]) -> MegatronWriter:
            return MegatronWriter(folder, store.arch, layout, tensors)

        results |= convert(store, target, writer, dtype, overwrite, check, ignore or ())


@app.command()
def megatron_to_hf(
    source: Source,
    target: Target,
    dtype: AsDtype = None,
    max_file_gib: Annotated[float, typer.Option(help="Maximum GiB of weights per file.")] = 4.0,
    overwrite: Overwrite = False,
    check: Check = True,
    ignore: Ignore = None,
    json_file: JsonPath = None,
) -> None:
    """Convert any folder with a model (Megatron, training checkpoint, HF) to an HF folder."""

    def writer(folder: Path, tensors: Mapping[str, TensorInfo]) -> HfWriter:
        return HfWriter(folder, tensors, int(max_file_gib * GIB))

    with report_errors(json_file) as results:
        store = open_store(source, ignore or ())
        results |= convert(store, target, writer, dtype, overwrite, check, ignore or ())


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder to inspect.", show_default=False)],
    ignore: Ignore = None,
    json_file: JsonPath = None,
) -> None:
    """Print what a folder holds. A damaged or unknown folder is refused with the reason."""
    with report_errors(json_file) as results:
        content = describe(open_store(folder, ignore or ()))
        results |= content
        layout = ", ".join(f"{key} {value}" for key, value in content["layout"].items())
        print(f"{folder}: {content['format']} ({layout}), {content['family']}")
        table = Table("tensor", "how many", "shape", "dtype", "bytes")
        for name, count, shape, kind, size in rows(content):
            table.add_row(name, str(count), shape, kind, f"{size:,}")
        # Wider than many terminals, because a truncated tensor name is useless.
        Console(width=160).print(table)
        print(
            f"{len(content['tensors']):,} tensors in {content['files']} files, "
            f"{content['parameters']:,} parameters, {content['bytes']:,} bytes"
        )


@app.command()
def verify(
    left: Annotated[Path, typer.Argument(metavar="A", help="A folder.", show_default=False)],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another.", show_default=False)],
    replicas: Annotated[
        bool, typer.Option(help="Also compare the copies of a tensor within each folder.")
    ] = True,
    ignore: Ignore = None,
    json_file: JsonPath = None,
) -> None:
    """Compare the models in two folders of any format and layout.

    Compares names, shapes, dtypes, every element bit by bit, and every config field. Exits with 1
    if they differ.
    """
    with report_errors(json_file) as results:
        a, b = (open_store(folder, ignore or ()) for folder in (left, right))
        with_replicas = [store for store in (a, b) if replicas]
        total = num_bytes(a) + sum(map(replica_bytes, with_replicas))
        with bar("comparing", total) as advance:
            differences = list(compare(a, b, advance))
            for store in with_replicas:
                differences += compare_replicas(store, advance)
        results |= {"same": not differences, "tensors": len(a.tensors), "bytes": total}
        results["differences"] = [asdict(difference) for difference in differences]
        if not differences:
            print(f"the same: {len(a.tensors):,} tensors, {total:,} bytes, every config field")
    if differences:
        print(f"{left} and {right} differ:\n{difference_lines(differences)}")
        raise typer.Exit(1)


# ------------------------------------------------------------------------------- converting


def convert(
    store: Store,
    target: Path,
    make_writer: MakeWriter,
    dtype: Dtype | None,
    overwrite: bool,
    check: bool,
    ignore: list[str] | tuple[str, ...],
) -> dict[str, Any]:
    """Write `store` in another format or layout, read it back and publish it.

    Returns the results for --json.
    """
    is_inside = store.folder.resolve().is_relative_to(target.resolve())
    if is_inside and store.folder.resolve() != target.resolve():
        raise CheckpointError(f"{target}: SOURCE is inside it; choose another name")
    new_dtype = torch_dtype(dtype) if dtype else None
    infos = {
        name: TensorInfo(info.shape, new_dtype or info.dtype)
        for name, info in store.tensors.items()
    }
    started, baseline = time.monotonic(), resident_bytes("VmRSS")
    with publish(target, overwrite=overwrite) as folder:
        if check:
            check_copies(store)
        writer = make_writer(folder, infos)
        with bar(
            "writing", sum(store.slice_bytes(file_slice) for file_slice in writer.file_slices)
        ) as advance:
            writer.create()
            fill(writer, store, advance)
            writer.finish(store.folder, new_dtype)
        written = time.monotonic()
        if check:
            read_back(store, open_store(folder, ignore), same_dtype=new_dtype is None)
    done = time.monotonic()
    speed = writer.nbytes / (written - started) / 1e6
    print(
        f"{target}: {len(infos):,} tensors, {writer.nbytes:,} bytes in {written - started:.1f} s "
        f"({speed:,.0f} MB/s)"
        + (f", read back and compared in {done - written:.1f} s" if check else ", not read back")
        + f"; peak memory {resident_bytes() / 2**20:,.0f} MiB"
    )
    return {
        "source": str(store.folder),
        "target": str(target),
        "tensors": len(infos),
        "bytes": writer.nbytes,
        "largest_tensor_bytes": max(info.nbytes for info in store.tensors.values()),
        "seconds": written - started,
        "check_seconds": done - written,
        "baseline_bytes": baseline,
        "peak_bytes": resident_bytes(),
    }


def check_copies(source: Store) -> None:
    """Raise CheckpointError if the source holds copies of a tensor that differ."""
    with bar("comparing copies", replica_bytes(source)) as advance:
        differences = list(compare_replicas(source, advance))
    if differences:
        raise CheckpointError(
            f"{source.folder}: holds copies of a tensor that differ, and this program cannot know "
            "which is right. Take another checkpoint, or use --no-check, which takes the first "
            f"copy of each:\n{difference_lines(differences)}"
        )


def read_back(source: Store, written: Store, *, same_dtype: bool) -> None:
    """Raise CheckpointError unless every copy of every written tensor equals its source."""
    with bar("reading back", num_bytes(source) + replica_bytes(written)) as advance:
        differences = list(compare(source, written, advance, same_dtype=same_dtype))
        differences += compare_replicas(written, advance)
    if differences:
        raise CheckpointError(
            f"{written.folder}: not what was read from {source.folder}. Check the disk and try "
            "again; if the differences stay the same, it is a bug of this program:\n"
            f"{difference_lines(differences)}"
        )


# ------------------------------------------------------------------------------- layouts


def make_layout(
    arch: Architecture, sizes: tuple[int, int, int], ends: tuple[int | None, int | None]
) -> MegatronLayout:
    """Return the layout of the options: tensor x pipeline x expert parallel.

    Accepts exactly the layouts that training accepts. Raises ConfigError, which names every option
    that does not fit and the nearest values that do.
    """
    tensor, pipeline, expert = sizes
    problems = []
    for option, size, ends_of_option in (
        ("--tensor-parallel", tensor, (None, None)),
        ("--pipeline-parallel", pipeline, ends),
        ("--expert-parallel", expert, (None, None)),
    ):
        if misfits := option_problems(arch, option, size, ends_of_option):
            fitting = [
                n
                for n in range(1, MAX_SIZE + 1)
                if not option_problems(arch, option, n, ends_of_option)
            ]
            nearest = sorted(fitting, key=lambda n: (abs(log2(n / size)), n))[:3]
            options = [f"{option} {n}" for n in sorted(nearest)]
            if option == "--pipeline-parallel":
                options = [*uneven_stages(arch, pipeline), *options]
            problems += [*misfits, f"  that fit: {', '.join(options) or 'none'}"]
    refuse(problems)
    policy = policy_of("--pipeline-parallel", pipeline, ends)
    stages = stage_layers(policy, arch.num_layers)
    return MegatronLayout(tensor, tuple(len(layers) for [layers] in stages), expert)


def option_problems(
    arch: Architecture, option: str, size: int, ends: tuple[int | None, int | None]
) -> list[str]:
    """Return the problems of one option of a layout, with all other sizes 1."""
    policy = policy_of(option, size, ends)
    keys = r"(?:policy\.)?(tensor|pipeline|expert)_parallel|(?:policy\.)?(first|last)_stage_layers"
    return [
        re.sub(keys, as_option, text).replace("use null", "leave it out")
        for text in policy_problems(policy, size, arch)
    ]


def as_option(match: re.Match[str]) -> str:
    """Convert a key of the config to an option of this program."""
    return "--" + match.group().removeprefix("policy.").replace("_", "-")


def policy_of(option: str, size: int, ends: tuple[int | None, int | None]) -> PolicyConfig:
    """Return a policy that is parallel along one axis only."""
    key = option.removeprefix("--").replace("-", "_")
    return PolicyConfig(precision="float32").model_copy(
        update={
            key: size,
            "sequence_parallel": key == "tensor_parallel" and size > 1,
            "first_stage_layers": ends[0],
            "last_stage_layers": ends[1],
        }
    )


def uneven_stages(arch: Architecture, pipeline: int) -> list[str]:
    """Propose a first stage of another size, as near to the other stages as possible.

    The list holds one proposal, or none if no first stage fits.
    """
    layers = arch.num_layers
    for first in sorted(range(1, layers), key=lambda n: (abs(n - layers / pipeline), -n)):
        if not option_problems(arch, "--pipeline-parallel", pipeline, (first, None)):
            rest = (layers - first) // (pipeline - 1)
            return [
                f"--pipeline-parallel {pipeline} --first-stage-layers {first} "
                f"({first} layers, then {rest} each)"
            ]
    return []


# ------------------------------------------------------------------------------- output


@contextmanager
def report_errors(json_file: Path | None) -> Iterator[dict[str, Any]]:
    """Yield a dictionary for results, and write it to `json_file` at the end.

    User errors and interrupts (SIGINT, SIGTERM) end as a message and exit code 2 or 130, without a
    traceback.
    """
    results: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield results
    except DapoError as error:
        text = str(error).replace("model.path:", "config.json:")
        print(f"error: {text.replace('model.ignore_fields', '--ignore')}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted; no incomplete files are left", file=sys.stderr)
        raise typer.Exit(130) from None
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1), encoding="utf-8")


@contextmanager
def bar(what: str, total: int) -> Iterator[Advance]:
    """Show a progress bar over bytes. It appears only on a terminal and is removed at the end."""
    console = Console(stderr=True)
    columns = (
        bars.TextColumn(what),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    is_hidden = not console.is_terminal
    with bars.Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


def rows(description: dict[str, Any]) -> list[tuple[str, int, str, str, int]]:
    """Return one row for all tensors that differ only in layer or expert.

    A row is (name, number of tensors, shape, dtype, bytes of all of them).
    """
    kinds: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for name, info in description["tensors"].items():
        kind = re.sub(r"\.\d+\.", ".*.", name), str(info["shape"]), info["dtype"]
        kinds.setdefault(kind, []).append((name, info["bytes"]))
    return [
        (pattern if same[1:] else same[0][0], len(same), shape, dtype, sum(n for _, n in same))
        for (pattern, shape, dtype), same in kinds.items()
    ]


def difference_lines(differences: list[Difference]) -> str:
    """Return the first differences, one per line."""
    lines = [f"  {diff.name}: {diff.kind}: {diff.text}" for diff in differences[:NUM_SHOWN]]
    if differences[NUM_SHOWN:]:
        lines.append(f"  and {len(differences) - NUM_SHOWN:,} more (--json FILE has all)")
    return "\n".join(lines)


def num_bytes(store: Store) -> int:
    """Return the bytes of all tensors, each counted once."""
    return sum(info.nbytes for info in store.tensors.values())


if __name__ == "__main__":
    app()
