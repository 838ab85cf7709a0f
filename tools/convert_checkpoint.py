"""Convert, inspect, compare and reshard checkpoints: block by block on the CPU, without Megatron
and vLLM.

    python tools/convert_checkpoint.py hf-to-megatron models/qwen megatron/qwen --tensor-parallel 4
    python tools/convert_checkpoint.py megatron-to-hf megatron/qwen models/qwen_again
    python tools/convert_checkpoint.py megatron-to-hf runs/x/checkpoints/step_000040 models/trained
    python tools/convert_checkpoint.py verify models/qwen models/qwen_again

A folder is written as TARGET.partial, read back, compared with its source bit by bit, and only then
renamed. What a killed command left behind, the next one removes. More in docs/conversion.md.
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
"""Differences that are printed; the JSON file has all."""
MAX_SIZE = 64
"""The largest parallel size that is proposed."""
MakeWriter = Callable[[Path, Mapping[str, TensorInfo]], StoreWriter]
Advance = Callable[[int], object]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Convert, inspect, compare and reshard checkpoints.",
)


class Dtype(StrEnum):
    """What weights can be converted to."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


Source = Annotated[Path, typer.Argument(help="Folder to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)]
TensorSize = Annotated[int, typer.Option(min=1, help="Ranks that share each layer.")]
PipelineSize = Annotated[int, typer.Option(min=1, help="Stages that share the layers.")]
ExpertSize = Annotated[int, typer.Option(min=1, help="Ranks that share a layer's experts.")]
EndLayers = Annotated[
    int | None, typer.Option(min=1, help="Layers of that stage; the others share the rest equally.")
]
AsDtype = Annotated[Dtype | None, typer.Option(help="Convert to it; by default nothing changes.")]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace TARGET whole, if it has a model."),
]
Check = Annotated[
    bool, typer.Option(help="Compare the copies in SOURCE, and TARGET, read back, with it.")
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="Unknown field of config.json that does not matter."),
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the figures here.")]


# ------------------------------------------------------------------------------- commands


@app.command("hf-to-megatron", help="Any folder with a model into a Megatron folder of a layout.")
@app.command("reshard", help="The same by the name for a folder that has a layout already.")
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
    """Two names for one thing: what SOURCE is, its files say."""
    with told(json_file) as figures:
        store = open_store(source, ignore or ())
        sizes = (tensor_parallel, pipeline_parallel, expert_parallel)
        layout = make_layout(store.arch, sizes, (first_stage_layers, last_stage_layers))

        def writer(folder: Path, tensors: Mapping[str, TensorInfo]) -> MegatronWriter:
            return MegatronWriter(folder, store.arch, layout, tensors)

        figures |= convert(store, target, writer, dtype, overwrite, check, ignore or ())


@app.command()
def megatron_to_hf(
    source: Source,
    target: Target,
    dtype: AsDtype = None,
    max_file_gib: Annotated[float, typer.Option(help="Weights per file at most.")] = 4.0,
    overwrite: Overwrite = False,
    check: Check = True,
    ignore: Ignore = None,
    json_file: JsonPath = None,
) -> None:
    """Any folder with a model (Megatron, training checkpoint, HF) into an HF folder."""

    def writer(folder: Path, tensors: Mapping[str, TensorInfo]) -> HfWriter:
        return HfWriter(folder, tensors, int(max_file_gib * GIB))

    with told(json_file) as figures:
        store = open_store(source, ignore or ())
        figures |= convert(store, target, writer, dtype, overwrite, check, ignore or ())


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder to look at.", show_default=False)],
    ignore: Ignore = None,
    json_file: JsonPath = None,
) -> None:
    """What a folder holds; one that is damaged or not understood is refused with the reason."""
    with told(json_file) as figures:
        found = describe(open_store(folder, ignore or ()))
        figures |= found
        layout = ", ".join(f"{key} {value}" for key, value in found["layout"].items())
        print(f"{folder}: {found['format']} ({layout}), {found['family']}")
        table = Table("tensor", "how many", "shape", "dtype", "bytes")
        for name, count, shape, kind, size in rows(found):
            table.add_row(name, str(count), shape, kind, f"{size:,}")
        # As wide as it needs, whatever the terminal: a name cut short is worth nothing.
        Console(width=160).print(table)
        print(
            f"{len(found['tensors']):,} tensors in {found['files']} files, "
            f"{found['parameters']:,} parameters, {found['bytes']:,} bytes"
        )


@app.command()
def verify(
    left: Annotated[Path, typer.Argument(metavar="A", help="A folder.", show_default=False)],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another.", show_default=False)],
    replicas: Annotated[
        bool, typer.Option(help="Also compare what a folder holds more than once.")
    ] = True,
    ignore: Ignore = None,
    json_file: JsonPath = None,
) -> None:
    """Whether two folders, of any formats and layouts, hold the same model: names, shapes, dtypes,
    every element bit by bit, every config field. Exits with 1 if not."""
    with told(json_file) as figures:
        a, b = (open_store(folder, ignore or ()) for folder in (left, right))
        repeated = [store for store in (a, b) if replicas]
        total = num_bytes(a) + sum(map(replica_bytes, repeated))
        with bar("comparing", total) as advance:
            found = list(compare(a, b, advance))
            for store in repeated:
                found += compare_replicas(store, advance)
        figures |= {"same": not found, "tensors": len(a.tensors), "bytes": total}
        figures["differences"] = [asdict(one) for one in found]
        if not found:
            print(f"the same: {len(a.tensors):,} tensors, {total:,} bytes, every config field")
    if found:
        print(f"{left} and {right} differ:\n{listed(found)}")
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
    """Write `store` in another format or layout, read it back, publish it; returns figures."""
    inside = store.folder.resolve().is_relative_to(target.resolve())
    if inside and store.folder.resolve() != target.resolve():
        raise CheckpointError(f"{target}: SOURCE is inside it; choose another name")
    to = torch_dtype(dtype) if dtype else None
    infos = {name: TensorInfo(info.shape, to or info.dtype) for name, info in store.tensors.items()}
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
            writer.finish(store.folder, to)
        written = time.monotonic()
        if check:
            read_back(store, open_store(folder, ignore), same_dtype=to is None)
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
    """Raise CheckpointError if the source holds a tensor more than once, and not alike."""
    with bar("comparing copies", replica_bytes(source)) as advance:
        found = list(compare_replicas(source, advance))
    if found:
        raise CheckpointError(
            f"{source.folder}: holds copies of a tensor that differ, and which is right is not "
            f"known; --no-check takes the first of each:\n{listed(found)}"
        )


def read_back(source: Store, written: Store, *, same_dtype: bool) -> None:
    """Raise CheckpointError unless what was written, each copy of it, is what was read."""
    with bar("reading back", num_bytes(source) + replica_bytes(written)) as advance:
        found = list(compare(source, written, advance, same_dtype=same_dtype))
        found += compare_replicas(written, advance)
    if found:
        raise CheckpointError(
            f"{written.folder}: not what was read from {source.folder}; the disk or this program "
            f"is at fault:\n{listed(found)}"
        )


# ------------------------------------------------------------------------------- layouts


def make_layout(
    arch: Architecture, sizes: tuple[int, int, int], ends: tuple[int | None, int | None]
) -> MegatronLayout:
    """The layout of the options, tensor x pipeline x expert parallel; exactly those that training
    accepts are. Raises ConfigError with every option at fault and the nearest values that fit."""
    tensor, pipeline, expert = sizes
    problems = []
    for option, asked, given in (
        ("--tensor-parallel", tensor, (None, None)),
        ("--pipeline-parallel", pipeline, ends),
        ("--expert-parallel", expert, (None, None)),
    ):
        if found := misfits(arch, option, asked, given):
            fitting = [n for n in range(1, MAX_SIZE + 1) if not misfits(arch, option, n, given)]
            near = sorted(fitting, key=lambda n: (abs(log2(n / asked)), n))[:3]
            options = [f"{option} {n}" for n in sorted(near)]
            if option == "--pipeline-parallel":
                options = [*uneven(arch, pipeline), *options]
            problems += [*found, f"  that fit: {', '.join(options) or 'none'}"]
    refuse(problems)
    policy = policy_of("--pipeline-parallel", pipeline, ends)
    stages = stage_layers(policy, arch.num_layers)
    return MegatronLayout(tensor, tuple(len(layers) for [layers] in stages), expert)


def misfits(
    arch: Architecture, option: str, size: int, ends: tuple[int | None, int | None]
) -> list[str]:
    """What is wrong with one option of a layout, the other sizes being 1."""
    policy = policy_of(option, size, ends)
    keys = r"(?:policy\.)?(tensor|pipeline|expert)_parallel|(?:policy\.)?(first|last)_stage_layers"
    return [
        re.sub(keys, as_option, text).replace("use null", "leave it out")
        for text in policy_problems(policy, size, arch)
    ]


def as_option(match: re.Match[str]) -> str:
    """A key of the config as an option of this program."""
    return "--" + match.group().removeprefix("policy.").replace("_", "-")


def policy_of(option: str, size: int, ends: tuple[int | None, int | None]) -> PolicyConfig:
    """A policy that is parallel along one axis alone."""
    key = option.removeprefix("--").replace("-", "_")
    return PolicyConfig(precision="float32").model_copy(
        update={
            key: size,
            "sequence_parallel": key == "tensor_parallel" and size > 1,
            "first_stage_layers": ends[0],
            "last_stage_layers": ends[1],
        }
    )


def uneven(arch: Architecture, pipeline: int) -> list[str]:
    """How stages that differ would fit, the first as near the others as can be."""
    layers = arch.num_layers
    for first in sorted(range(1, layers), key=lambda n: (abs(n - layers / pipeline), -n)):
        if not misfits(arch, "--pipeline-parallel", pipeline, (first, None)):
            rest = (layers - first) // (pipeline - 1)
            return [
                f"--pipeline-parallel {pipeline} --first-stage-layers {first} "
                f"({first} layers, then {rest} each)"
            ]
    return []


# ------------------------------------------------------------------------------- telling


@contextmanager
def told(json_file: Path | None) -> Iterator[dict[str, Any]]:
    """Figures to fill; a user's mistake and an interrupt are messages, not tracebacks."""
    figures: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield figures
    except DapoError as error:
        text = str(error).replace("model.path:", "config.json:")
        print(f"error: {text.replace('model.ignore_fields', '--ignore')}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("interrupted; nothing half-written is left", file=sys.stderr)
        raise typer.Exit(130) from None
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1), encoding="utf-8")


@contextmanager
def bar(what: str, total: int) -> Iterator[Advance]:
    """A progress bar over bytes, on a terminal, gone when done."""
    console = Console(stderr=True)
    columns = (
        bars.TextColumn(what),
        bars.BarColumn(),
        bars.DownloadColumn(),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    with bars.Progress(*columns, console=console, transient=True, disable=hidden) as shown:
        task = shown.add_task(what, total=total)
        yield lambda size: shown.advance(task, size)


def rows(description: dict[str, Any]) -> list[tuple[str, int, str, str, int]]:
    """Return one row for tensors that differ only in layer or expert: name, how many, shape, dtype,
    bytes of all."""
    kinds: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for name, info in description["tensors"].items():
        kind = re.sub(r"\.\d+\.", ".*.", name), str(info["shape"]), info["dtype"]
        kinds.setdefault(kind, []).append((name, info["bytes"]))
    return [
        (pattern if same[1:] else same[0][0], len(same), shape, dtype, sum(n for _, n in same))
        for (pattern, shape, dtype), same in kinds.items()
    ]


def listed(found: list[Difference]) -> str:
    """The first differences, a line each."""
    lines = [f"  {one.name}: {one.kind}: {one.text}" for one in found[:NUM_SHOWN]]
    if found[NUM_SHOWN:]:
        lines.append(f"  and {len(found) - NUM_SHOWN:,} more (--json FILE has all)")
    return "\n".join(lines)


def num_bytes(store: Store) -> int:
    """Of all tensors."""
    return sum(info.nbytes for info in store.tensors.values())


if __name__ == "__main__":
    app()
