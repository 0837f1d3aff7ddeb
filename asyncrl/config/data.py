from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from asyncrl.config.checks import section
from asyncrl.errors import ConfigError, explain
from asyncrl.ranges import NonNegative, NonNegativeInt, Positive, PositiveInt


@section("data.mixture.")
class SourceConfig:
    path: str = "???"
    """As data.train."""
    weight: Positive = 1.0
    """Share of the prompts, relative to the other sources."""
    options: dict[str, Any] = field(default_factory=dict)
    """As data.options."""


@section("data.curriculum.")
class CurriculumConfig:
    key: str = ""
    """Number in the rows' extra_info that says how easy a row is, such as pass_rate (`asyncrl-eval --rows` writes it).
    Empty: no curriculum."""
    epochs: NonNegativeInt = 1
    """Passes over the data from easy to hard; later passes are shuffled."""
    jitter: NonNegative = 0.1
    """Spread of the noise on the number, so that the order differs between epochs."""
    min: float = 0.0
    """Rows with a smaller number are dropped and counted."""
    max: float = 1.0
    """Rows with a larger number are dropped and counted."""

    def __post_init__(self) -> None:
        if self.min > self.max:
            found = "no row lies between them"
            raise ConfigError(explain(f"data.curriculum.min={self.min} and max={self.max}", found, "set min below max"))


@section("data.")
class DataConfig:
    train: str = ""
    """JSONL or parquet file, a directory of one of them, a hub name (`org/name` or `org/name/config`, with `:split`),
    or a generator `package.module:Name`, which draws a new row for every group."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the generator: `Name(seed, **options)[index]` is the row `index`, an object as in a file. It must be
    the same whenever it is asked for."""
    mixture: dict[str, SourceConfig] = field(default_factory=dict)
    """Several training sets instead of data.train: name -> path and weight."""
    schema: Literal["auto", "verl", "gsm8k", "prompt_answer", "conversations", "nemo_gym"] = "auto"
    """Columns of the rows. verl: prompt, data_source, reward_model (DAPO-Math-17k too). gsm8k: question, answer.
    prompt_answer: prompt, answer (or none, for rewards of your own). conversations: conversations or messages, with
    answer or a last reply. nemo_gym: responses_create_params. auto: by the columns."""
    system_prompt: str | None = None
    """Prepended to every prompt without a system message."""
    continue_final_message: bool = True
    """The policy continues a prompt that ends with a message of the assistant. False closes that message and begins
    another."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Order from easy rows to hard ones."""
    eval: dict[str, str] = field(default_factory=dict)
    """Held-out sets: name -> file or hub name."""
    drop_duplicates: bool = True
    """Train duplicate rows once, and count them. Duplicates have the same messages, ground truth, data source and
    extra_info (except its `index`). A mixture compares rows within each source; held-out sets keep duplicates."""
    shuffle: bool = True
    """Each epoch is a permutation drawn from (run.seed, epoch); False keeps the order of the file."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt after the chat template, in tokens."""
    image_directory: str | None = None
    """Directory that keeps the images of prompts, by hash, as long as the run's checkpoints; all nodes share it. None:
    rows are text, and rows with images are refused."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """A longer prompt: error stops the run before it starts; drop leaves the row out and counts it."""
