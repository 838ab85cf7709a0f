"""Turn a published data set into distinct prompts, one row each, and report what was dropped.

    python tools/prepare_data.py dapo-math-17k.parquet --output data/dapo_math.parquet \\
        --evaluation aime-2024.parquet --tokenizer models/qwen --max-prompt-tokens 2048
    python tools/prepare_data.py aime-2024.parquet --output data/aime_2024.parquet
    python tools/prepare_data.py hub:BytedTsinghua-SIA/DAPO-Math-17k --output data/dapo_math.parquet

Next to FILE.parquet it writes FILE.report.json. Both are made in FILE.parquet.partial and moved
when complete. More in docs/data.md.
"""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from preparing.prepare import LABELS, Settings, prepare
from preparing.unique import Source
from pydantic import ValidationError
from user_errors import user_errors

from dapo_megatron.cluster.output import protect_streams
from dapo_megatron.cluster.processes import resident_bytes
from dapo_megatron.config import Columns
from dapo_megatron.config.yaml12 import parse_yaml
from dapo_megatron.data.prompts import report_path
from dapo_megatron.data.rows import DAPO_MATH_COLUMNS
from dapo_megatron.data.tokenizer import load_tokenizer
from dapo_megatron.files import partial_folder, sha256
from dapo_megatron.types import ConfigError, DataError

HUB = re.compile(r"hub:(?P<name>[^@#]+)(?:@(?P<revision>[^#]+))?(?:#(?P<split>.+))?")
MIB = 2**20


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


InputNames = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...",
        help=r"Parquet or JSONL files, or hub:OWNER/NAME\[@REVISION]\[#SPLIT].",
        show_default=False,
    ),
]
Output = Annotated[
    Path, typer.Option(help="Parquet file to write, with a report next to it.", show_default=False)
]
Evaluation = Annotated[
    list[Path] | None, typer.Option(help="File of an evaluation set; may be repeated.")
]
Tokenizer = Annotated[Path | None, typer.Option(help="Folder of a tokenizer with a chat template.")]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Drop prompts of more tokens, chat template included.")
]
Near = Annotated[
    Literal["drop", "report", "off"], typer.Option(help="What to do with near-duplicates.")
]
Overlap = Annotated[
    Literal["drop", "report"], typer.Option(help="What to do with prompts of an evaluation set.")
]
Threshold = Annotated[
    float, typer.Option(min=0.1, max=1.0, help="Jaccard similarity from which prompts are near.")
]
_columns = partial(typer.Option, metavar="{prompt: NAME, answer: NAME}", show_default=False)
ColumnNames = Annotated[
    str | None,
    _columns(help="Columns of INPUT with prompt and answer. By default the DAPO-Math schema."),
]
EvaluationColumnNames = Annotated[
    str | None, _columns(help="The same for the files of --evaluation.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUTPUT and its report.")]


@app.command()
def main(
    inputs: InputNames,
    output: Output,
    evaluation: Evaluation = None,
    tokenizer: Tokenizer = None,
    max_prompt_tokens: MaxTokens = None,
    near_duplicates: Near = "report",
    overlap: Overlap = "drop",
    similarity: Threshold = 0.8,
    columns: ColumnNames = None,
    evaluation_columns: EvaluationColumnNames = None,
    force: Force = False,
) -> None:
    """Write the distinct prompts of published data, and report what was dropped and why."""
    started = time.monotonic()
    with user_errors({}):
        files = outputs_of(output, inputs, evaluation or [], force)
        settings = Settings(
            similarity=similarity,
            overlap=overlap,
            near_duplicates=near_duplicates,
            tokenizer=tokenizer_of(tokenizer, max_prompt_tokens),
            max_prompt_tokens=max_prompt_tokens or 0,
            columns=parse_columns("--columns", columns),
            evaluation_columns=parse_columns("--evaluation-columns", evaluation_columns),
        )
        options = {
            "overlap": overlap,
            "near_duplicates": near_duplicates,
            "similarity": similarity,
            "tokenizer": str(tokenizer) if tokenizer else None,
            "max_prompt_tokens": max_prompt_tokens,
            **({"columns": columns} if columns else {}),
            **({"evaluation_columns": evaluation_columns} if evaluation_columns else {}),
        }
        sources = [source_of(name) for name in inputs]
        held_out = [Source(str(path), path) for path in evaluation or []]
        with work_folder(output) as folder:
            data, report_file = (folder / file.name for file in files)
            outcome = prepare(sources, held_out, settings, data)
            report = report_on(outcome, sources, held_out, data, options)
            text = json.dumps(report, indent=1, ensure_ascii=False)
            report_file.write_text(text + "\n", encoding="utf-8")
            for file in reversed(files):  # the data last: a data file always has its report
                (folder / file.name).replace(file)
        show(report, files, time.monotonic() - started)


def outputs_of(output: Path, inputs: list[str], evaluation: list[Path], force: bool) -> list[Path]:
    """Return the paths of data and report.

    Raises DataError if a file would be lost: an input, or an existing file without --force.
    """
    if output.suffix != ".parquet":
        raise DataError(f"--output {output}: must end in .parquet")
    if output.resolve() in {Path(name).resolve() for name in [*inputs, *evaluation]}:
        raise DataError(f"--output {output}: is an input too; choose another name")
    files = [output, report_path(output)]
    existing = [str(file) for file in files if file.exists()]
    if existing and not force:
        raise DataError(f"{', '.join(existing)}: exists; --force replaces it")
    if output.is_dir():
        raise DataError(f"--output {output}: is a folder")
    return files


def tokenizer_of(folder: Path | None, max_prompt_tokens: int | None) -> Any:
    """Return the tokenizer of a local folder; None if there is no limit. Raises DataError."""
    if (folder is None) != (max_prompt_tokens is None):
        raise DataError("--tokenizer and --max-prompt-tokens: set both, or neither")
    return load_tokenizer(folder, "--tokenizer") if folder else None


def parse_columns(option: str, text: str | None) -> Columns:
    """Return the columns that an option names, in the config's syntax. Raises ConfigError."""
    if text is None:
        return DAPO_MATH_COLUMNS
    try:
        return Columns.model_validate(parse_yaml(text, option))
    except ValidationError as error:
        raise ConfigError(
            f"{option}: write {{prompt: NAME, answer: NAME}} with the names of two columns, "
            f"not {text!r:.100}"
        ) from error


def source_of(name: str) -> Source:
    """Return a local file or a data set of the hub as a source. Raises DataError for neither."""
    if match := HUB.fullmatch(name):
        return Source(name, None, match["name"], match["revision"], match["split"] or "train")
    path = Path(name)
    if not path.exists():
        hint = f"; from the hub: hub:{name}" if name.count("/") == 1 and not path.suffix else ""
        raise DataError(f"{name}: no such file{hint}")
    return Source(name, path)


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """Make a temporary folder next to the output. Raises DataError if the disk fails."""
    try:
        with partial_folder(output.with_name(f"{output.name}.partial")) as folder:
            yield folder
    except OSError as error:
        raise DataError(
            f"{error.filename or output}: cannot be written ({error.strerror or error})"
        ) from error


def report_on(
    outcome: dict[str, Any],
    sources: list[Source],
    evaluation: list[Source],
    data: Path,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the report. The same inputs and settings give the same report."""
    return {
        "output": {
            "name": data.name,
            "rows": outcome["rows"]["out"],
            "bytes": data.stat().st_size,
            "sha256": sha256(data),
        },
        "rows": outcome["rows"],
        "prompts": outcome["prompts"],
        "inputs": [
            {
                "name": source.name,
                "rows": num_rows,
                "sha256": sha256(source.path) if source.path else f"{digest} (of the rows)",
            }
            for source, (num_rows, digest) in zip(sources, outcome["files"], strict=True)
        ],
        "evaluation": [
            {"name": source.name, "rows": num_rows, "sha256": sha256(Path(source.name))}
            for source, num_rows in zip(evaluation, outcome["evaluation_rows"], strict=True)
        ],
        "settings": {**options, "frame": outcome["frame"]},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("pyarrow", "datasketch", "transformers")},
        },
        "examples": outcome["examples"],
    }


# ------------------------------------------------------------------------------- output


def show(report: dict[str, Any], files: list[Path], seconds: float) -> None:
    """Print how many rows were read, dropped and written."""
    rows = report["rows"]
    print(f"{rows['in']:>12,} rows read")
    for reason, number in rows["dropped"].items():
        if number:
            print(f"{-number:>12,} {LABELS[reason]}")
    print(f"{rows['out']:>12,} rows written")
    for reason, number in rows["kept"].items():
        print(f"{number:>12,} of them {LABELS[reason]} (kept)")
    print(", ".join(map(str, files)))
    print(f"{seconds:.1f} s, peak memory {resident_bytes() / MIB:.0f} MiB")


if __name__ == "__main__":
    protect_streams()
    app()
