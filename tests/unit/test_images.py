"""Images in prompts: ids that name them, a store by hash, and the forms that datasets have."""

import base64
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import Gemma3Config, LlamaConfig

from asyncrl.config.model import ModelConfig
from asyncrl.data.images import ImageTokens
from asyncrl.data.rows import IMAGE, RowReader
from asyncrl.errors import ConfigError, DataError, StorageError
from asyncrl.types.images import FIRST_ID, KEY_TOKENS, ImageStore, as_model_ids, image_ids, images_in
from tests.make import quickstart
from tools.make_tiny_vision import build

KEYS = st.text("0123456789abcdef", min_size=28, max_size=28)
RUNS = st.lists(st.tuples(KEYS, st.integers(KEY_TOKENS, 40), st.lists(st.integers(0, 99), max_size=3)), max_size=4)


@given(RUNS)
def test_ids_name_the_images_wherever_they_stand(runs):
    """Side by side too, and with the processor's own tokens between."""
    ids = np.concatenate([np.zeros(0, np.int32), *(x for key, n, text in runs for x in (image_ids(key, n), text))])
    ids = ids.astype(np.int32)
    found = images_in(ids)
    assert [image.key for image in found] == [key for key, _, _ in runs]
    assert [len(image.at) for image in found] == [n for _, n, _ in runs]
    assert (ids[np.concatenate([np.zeros(0, int), *(image.at for image in found)])] >= FIRST_ID).all()
    assert as_model_ids(ids, 7).max(initial=0) < 100


@pytest.mark.parametrize("part", [slice(1, None), slice(0, 3), slice(4, None)])
def test_a_part_of_an_image_is_no_image(part):
    with pytest.raises(ValueError, match="part of an image"):
        images_in(image_ids("ab" * 14, 9)[part])


def png(color):
    file = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(file, "png")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


@pytest.fixture
def reader(tmp_path):
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(BLUE)
    return RowReader(image_directory=str(tmp_path / "images"))


def colours(reader, record, tmp_path):
    """The text of the only message, with the colours of its images."""
    row = reader.record(record | {"answer": "1"}, f"{tmp_path / 'rows.jsonl'}:1")
    (message,) = row.messages
    store = ImageStore(tmp_path / "images")
    return IMAGE.sub(lambda m: "R" if store.open([m[1]])[0].getpixel((0, 0)) == (255, 0, 0) else "B", message.content)


def asked(content, **columns):
    return {"prompt": [{"role": "user", "content": content}], **columns}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (asked("<image>one<image>", images=[{"bytes": RED, "path": None}, {"path": "blue.png"}]), "RoneB"),
        (asked("which?", images=["red.png", "blue.png"]), "RBwhich?"),
        (asked("which?", image={"url": "data:image/png;base64," + base64.b64encode(BLUE).decode()}), "Bwhich?"),
        (asked([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}], images=[RED, BLUE]), "aRB"),
        (asked([{"type": "image", "image": BLUE}, {"type": "text", "text": "b"}]), "Bb"),
        (asked([{"type": "image_url", "image_url": {"url": "red.png"}}, {"type": "image"}], images=["blue.png"]), "RB"),
        (asked("which?", images=[Image.new("RGBA", (2, 2), "blue")]), "Bwhich?"),
        ({"prompt": "<image>?", "images": ["blue.png"]}, "B?"),
    ],
)
def test_datasets_bring_images_in_many_forms(reader, record, expected, tmp_path):
    assert colours(reader, record, tmp_path) == expected


@pytest.mark.parametrize(
    ("record", "found"),
    [
        (asked("<image><image>", images=["red.png"]), "more places for images"),
        (asked("<image>", images=["red.png", "blue.png"]), "1 images without a place"),
        (asked([{"type": "image"}]), "more places for images"),
        (asked("?", images=["none.png"]), r"none\.png"),
        (asked("?", images=[b"no image"]), "cannot identify image"),
        (asked("?", images=[7]), "int '7'"),
        (asked("?", videos=["a.mp4"]), "videos, and only text"),
    ],
)
def test_what_is_no_image_or_has_no_place_names_its_row(reader, record, found, tmp_path):
    with pytest.raises(DataError, match=found) as caught:
        reader.record(record | {"answer": "1"}, f"{tmp_path / 'rows.jsonl'}:4")
    assert "rows.jsonl:4" in str(caught.value)


def test_without_a_directory_rows_are_text():
    with pytest.raises(DataError, match=r"data\.image_directory is not set"):
        RowReader().record(asked("?", images=["red.png"], answer="1"), "f:1")


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "images").write_text("a file")
    with pytest.raises(StorageError, match="images"):
        RowReader(image_directory=str(tmp_path / "images")).record(asked("?", images=[RED], answer="1"), "f:1")


def test_a_sign_that_texts_have_is_no_image():
    """Word processors leave it where an object was."""
    row = RowReader().record(asked("a \ufffc b", answer="1"), "f:1")
    assert row.messages[0].content == "a \ufffc b"
    assert not IMAGE.findall(row.messages[0].content)


def test_an_image_is_kept_once_and_a_lost_one_is_named(tmp_path):
    store = ImageStore(tmp_path)
    assert store.put(RED) == store.put(RED) != store.put(BLUE)
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(FileNotFoundError, match="0000"):
        store.open(["0" * 28])


@pytest.mark.parametrize(
    "other",
    [
        ("rollout.engine=sglang",),
        ("trainer.backend=megatron",),
        ("algorithm.preset=ppo",),
        ("teacher.path=a/b", "algorithm.distillation.coefficient=1"),
    ],
)
def test_what_reads_no_images_is_refused(other):
    recipe = quickstart("data.image_directory=images")
    assert recipe.model.image_directory == "images"
    with pytest.raises(ConfigError, match=r"data\.image_directory with .*(?s:.*)it reads no images"):
        quickstart("data.image_directory=images", *other)


def test_samples_keep_the_reference(reader, tmp_path):
    row = reader.record(asked("?", images=["red.png"], answer="1"), f"{tmp_path / 'f.jsonl'}:1")
    assert IMAGE.findall(json.loads(json.dumps(row.messages[0].content))) == [ImageStore(tmp_path).put(RED)]


def test_a_model_that_looks_ahead_within_an_image_is_refused(tmp_path):
    """Its trainer and its embedded engine would agree, and both be another model."""
    build()[1].save_pretrained(tmp_path)
    named = ModelConfig(path=str(tmp_path), image_directory=str(tmp_path / "images"))
    for config, found in ((Gemma3Config(), "look ahead"), (LlamaConfig(), "no image_token_id")):
        config.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=found):
            ImageTokens(named)
