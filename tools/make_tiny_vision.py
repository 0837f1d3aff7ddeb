"""Makes a tiny model that reads images, and its task: which number is drawn? For recipes/vision.yaml; no network, a
minute on two cores.

    python tools/make_tiny_vision.py --model runs/tiny-vision --data data

The model is a LLaVA: an encoder of patches of 8 x 8 pixels, and a Qwen3 of two layers with the tokenizer of the
quickstart. Supervised steps teach it to see, and to answer often wrongly; the encoder then stays as it is. The data are
parquet files with the columns of verl (geometry3k): `prompt` with the mark `<image>`, `images` with the bytes of PNG
files, `reward_model`.
"""

from __future__ import annotations

import argparse
import io
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

import numpy as np

from tools.make_tiny_model import END, build_tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE, PATCH, LARGEST = 32, 8, 10
MARK, QUESTION = "<image>", "Which number?"
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{{- '<image>' if part.type == 'image' else part.text }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@cache
def font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=28)


def draw(number: int, rng: np.random.Generator) -> Image:
    """The number in white somewhere on black, with noise."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIZE, SIZE), "black")
    at = int(rng.integers(4, 10)), int(rng.integers(-4, 1))
    ImageDraw.Draw(image).text(at, str(number), fill="white", font=font())
    noise = rng.normal(0, 12, (SIZE, SIZE, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def write_data(folder: Path, seed: int) -> None:
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(seed)
    for name, count in (("train", 600), ("test", 100)):
        rows = []
        for _ in range(count):
            number, file = int(rng.integers(0, LARGEST)), io.BytesIO()
            draw(number, rng).save(file, "png")
            rows.append(
                {
                    "prompt": [{"role": "user", "content": MARK + QUESTION}],
                    "images": [{"bytes": file.getvalue(), "path": None}],
                    "data_source": "drawn_numbers",
                    "reward_model": {"ground_truth": str(number), "style": "rule"},
                }
            )
        folder.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"drawn_numbers_{name}.parquet")


def build() -> tuple[Any, Any]:
    """The model with random weights, and its processor."""
    import torch
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        Qwen3Config,
    )

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    tokenizer.image_token = MARK
    tokenizer.chat_template = TEMPLATE
    images = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE})
    processor = LlavaProcessor(
        images, tokenizer, PATCH, "default", num_additional_image_tokens=1, chat_template=TEMPLATE
    )
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=SIZE,
        patch_size=PATCH, projection_dim=64,
    )  # fmt: skip
    text = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=256, tie_word_embeddings=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(END), pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    token = tokenizer.convert_tokens_to_ids(MARK)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=token, vision_feature_layer=-1)
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = [text.eos_token_id]
    return model, processor


def teach(model: Any, processor: Any, steps: int, seed: int) -> None:
    """Supervised, on images of its own."""
    import torch

    rng = np.random.default_rng([seed, 1])
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, total_steps=steps)
    asked = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK + QUESTION}], tokenize=False, add_generation_prompt=True
    )
    for step in range(steps):
        numbers = rng.integers(0, LARGEST, 32)
        texts = [f"{asked}{number}{END}" for number in numbers]
        images = [draw(int(number), rng) for number in numbers]
        batch = processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="right")
        start = len(processor(text=[asked], images=images[:1])["input_ids"][0])
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :start] = -100
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1} of {steps}: loss {loss.item():.2f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, default=Path("runs/tiny-vision"))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=250, help="of the supervised passes (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    write_data(options.data, options.seed)
    model, processor = build()
    teach(model, processor, options.steps, options.seed)
    model.save_pretrained(options.model)
    processor.save_pretrained(options.model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
