"""Convert, inspect and compare checkpoints.

It runs on the CPU, tensor by tensor, and needs neither Megatron nor vLLM:

    python tools/convert_checkpoint.py hf-to-megatron models/qwen pretrain/qwen
    python tools/convert_checkpoint.py megatron-to-hf pretrain/run models/x --hf-config models/qwen
    python tools/convert_checkpoint.py megatron-to-hf runs/x/checkpoints/step_000040 models/trained
    python tools/convert_checkpoint.py verify models/qwen models/qwen_again

A folder is written as TARGET.partial, read back, compared with its source bit by bit, and only then
renamed. The next command removes what a killed one left behind. More in docs/conversion.md.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from converting.compare import Difference, compare
from converting.options import print_options
from rich import progress as bars
from rich.table import Table
from user_errors import user_errors

from dapo_megatron.checkpoints.folder import MANIFEST, damaged_file
from dapo_megatron.checkpoints.formats.hf import HfWriter
from dapo_megatron.checkpoints.formats.open import open_store
from dapo_megatron.checkpoints.formats.store import Store, describe
from dapo_megatron.checkpoints.formats.tensor_file import TensorInfo
from dapo_megatron.checkpoints.formats.torch_dist.model_config import read_config
from dapo_megatron.checkpoints.formats.torch_dist.store import FORMAT, write_torch_dist
from dapo_megatron.checkpoints.formats.weights_folder import (
    copy_companions,
    declare_without_mtp,
    publish,
)
from dapo_megatron.cluster.output import protect_streams
from dapo_megatron.cluster.processes import resident_bytes
from dapo_megatron.literal_console import LiteralConsole
from dapo_megatron.types import CheckpointError, torch_dtype

GIB = 2**30
OPTIONS = {
    "model.path:": "config.json:",
    "Set model.drop_mtp=true": "Use --drop-mtp",
    "model.ignore_fields": "--ignore",
}
"""Words of a run's messages -> the options of this tool."""
NUM_SHOWN = 10
"""How many differences are printed. The JSON file has all of them."""
Advance = Callable[[int], object]
Write = Callable[[Store, Path, Mapping[str, TensorInfo], Advance], int]
"""Writes a store to a folder, with these dtypes. Returns the number of bytes."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Convert, inspect and compare checkpoints.",
)


Dtype = Literal["float32", "bfloat16"]
Source = Annotated[Path, typer.Argument(help="Folder to read.", show_default=False)]
Target = Annotated[Path, typer.Argument(help="Folder to write.", show_default=False)]
HfConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="config.json and tokenizer of a checkpoint of Megatron (torch_dist) without them.",
    ),
]
AsDtype = Annotated[
    Dtype | None, typer.Option(help="Convert weights to this type. By default they keep theirs.")
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace the whole folder TARGET, if it holds a model."),
]
Check = Annotated[bool, typer.Option(help="Read TARGET back and compare it with SOURCE.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="Unknown field of config.json to ignore."),
]
DropMtp = Annotated[
    bool, typer.Option("--drop-mtp", help="Leave out layers for multi-token prediction.")
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Also write the results here.")]


# ------------------------------------------------------------------------------- commands


@app.command()
def hf_to_megatron(
    source: Source,
    target: Target,
    dtype: AsDtype = None,
    overwrite: Overwrite = False,
    check: Check = True,
    hf_config: HfConfig = None,
    ignore: Ignore = None,
    drop_mtp: DropMtp = False,
    json_file: JsonPath = None,
) -> None:
    """Convert any folder with a model to a checkpoint that Megatron loads in any layout."""
    with report_errors(json_file) as results:
        store = open_store(source, ignore or (), hf_config, drop_mtp=drop_mtp)
        results |= convert(store, target, write_torch_dist, dtype, overwrite, check, ignore or ())
        results |= print_options(store.arch)


@app.command()
def megatron_to_hf(
    source: Source,
    target: Target,
    dtype: AsDtype = None,
    max_file_gib: Annotated[float, typer.Option(help="Maximum GiB of weights per file.")] = 4.0,
    overwrite: Overwrite = False,
    check: Check = True,
    hf_config: HfConfig = None,
    ignore: Ignore = None,
    drop_mtp: DropMtp = False,
    json_file: JsonPath = None,
) -> None:
    """Convert any folder with a model to an HF folder: of Megatron, of a run, or HF."""

    def write(
        store: Store, folder: Path, tensors: Mapping[str, TensorInfo], progress: Advance
    ) -> int:
        writer = HfWriter(folder, tensors, int(max_file_gib * GIB))
        writer.create()
        writer.copy(store, tensors, progress)
        writer.finish()
        return writer.nbytes

    with report_errors(json_file) as results:
        store = open_store(source, ignore or (), hf_config, drop_mtp=drop_mtp)
        results |= convert(store, target, write, dtype, overwrite, check, ignore or ())


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="Folder to inspect.", show_default=False)],
    hf_config: HfConfig = None,
    ignore: Ignore = None,
    drop_mtp: DropMtp = False,
    json_file: JsonPath = None,
) -> None:
    """Print what a folder holds. A damaged or unknown folder is refused with the reason."""
    with report_errors(json_file) as results:
        store = open_store(folder, ignore or (), hf_config, drop_mtp=drop_mtp)
        content = describe(store)
        results |= content
        layout = ", ".join(f"{key} {value}" for key, value in content["layout"].items())
        print(f"{folder}: {content['format']} ({layout}), {content['family']}")
        table = Table("tensor", "how many", "shape", "dtype", "bytes")
        for name, count, shape, kind, size in rows(content):
            table.add_row(name, str(count), shape, kind, f"{size:,}")
        # Wider than many terminals, because a truncated tensor name is useless.
        LiteralConsole(width=160).print(table)
        print(
            f"{len(content['tensors']):,} tensors in {content['files']} files, "
            f"{content['parameters']:,} parameters, {content['bytes']:,} bytes"
        )
        # Gated delta nets that a run saved have HF's norms, which Megatron-LM does not read.
        is_of_a_run = store.format == FORMAT and read_config(store.folder) is None
        if store.format == FORMAT and not (is_of_a_run and store.arch.delta):
            results |= print_options(store.arch)


@app.command()
def verify(
    left: Annotated[Path, typer.Argument(metavar="A", help="A folder.", show_default=False)],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another.", show_default=False)],
    hf_config: HfConfig = None,
    ignore: Ignore = None,
    drop_mtp: DropMtp = False,
    json_file: JsonPath = None,
) -> None:
    """Compare the models in two folders of any format and layout.

    Compares names, shapes, dtypes, every element bit by bit, and every config field. Exits with 1
    if they differ.
    """
    with report_errors(json_file) as results:
        a, b = (
            open_store(folder, ignore or (), hf_config, drop_mtp=drop_mtp)
            for folder in (left, right)
        )
        total = num_bytes(a)
        with bar("comparing", total) as advance:
            differences = list(compare(a, b, advance))
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
    write: Write,
    dtype: Dtype | None,
    overwrite: bool,
    check: bool,
    ignore: list[str] | tuple[str, ...],
) -> dict[str, Any]:
    """Write `store` in another format, read it back and publish it.

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
    if (store.folder / MANIFEST).exists() and (fault := damaged_file(store.folder)):
        raise CheckpointError(f"{store.folder} is damaged: {fault}")
    started, baseline = time.monotonic(), resident_bytes("VmRSS")
    with publish(target, overwrite=overwrite) as folder:
        with bar("writing", num_bytes(store)) as advance:
            nbytes = write(store, folder, infos, advance)
            copy_companions(store.model_folder, folder, new_dtype)
            if store.dropped:
                declare_without_mtp(folder)
        written = time.monotonic()
        if check:
            read_back(store, open_store(folder, ignore), same_dtype=new_dtype is None)
    done = time.monotonic()
    if store.dropped:
        print(f"left out: {store.dropped[0]} and {len(store.dropped) - 1:,} more tensors")
    speed = nbytes / (written - started) / 1e6
    print(
        f"{target}: {len(infos):,} tensors, {nbytes:,} bytes in {written - started:.1f} s "
        f"({speed:,.0f} MB/s)"
        + (f", read back and compared in {done - written:.1f} s" if check else ", not read back")
        + f"; peak memory {resident_bytes() / 2**20:,.0f} MiB"
    )
    return {
        "source": str(store.folder),
        "target": str(target),
        "tensors": len(infos),
        "dropped_tensors": len(store.dropped),
        "bytes": nbytes,
        "largest_tensor_bytes": max(info.nbytes for info in store.tensors.values()),
        "seconds": written - started,
        "check_seconds": done - written,
        "baseline_bytes": baseline,
        "peak_bytes": resident_bytes(),
    }


def read_back(source: Store, written: Store, *, same_dtype: bool) -> None:
    """Raise CheckpointError unless every written tensor equals its source."""
    with bar("reading back", num_bytes(source)) as advance:
        differences = list(compare(source, written, advance, same_dtype=same_dtype))
    if differences:
        raise CheckpointError(
            f"{written.folder}: not what was read from {source.folder}. Check the disk and try "
            "again; if the differences stay the same, it is a bug of this program:\n"
            f"{difference_lines(differences)}"
        )


# ------------------------------------------------------------------------------- output


@contextmanager
def report_errors(json_file: Path | None) -> Iterator[dict[str, Any]]:
    """Yield a dictionary for results, and write it to `json_file` at the end. Errors of the user
    end as a message."""
    results: dict[str, Any] = {}
    with user_errors(OPTIONS):
        yield results
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1), encoding="utf-8")


@contextmanager
def bar(what: str, total: int) -> Iterator[Advance]:
    """Show a progress bar over bytes. It appears only on a terminal and is removed at the end."""
    console = LiteralConsole(stderr=True)
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
    protect_streams()
    app()
